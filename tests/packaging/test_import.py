"""`import tpu_kernels` is quick, silent, and changes nothing for the program that imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

IMPORT_LIMIT_MS = 100  # after torch, whose own import takes seconds
HELP_LIMIT_MS = 150  # of CPU time, from the start of the interpreter to its end
REPEATS = 3  # the best counts: anything else on the machine only adds to a time

TIMED_IMPORT = """
import time, torch
start = time.perf_counter()
import tpu_kernels
print(1000 * (time.perf_counter() - start))
"""

HEAVY_MODULES = """
import sys, torch
before = set(sys.modules)
import tpu_kernels
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new & {"jax", "jaxlib", "libtpu", "helion", "torch_tpu", "rich", "triton"}))
"""

# Everything that a library could be tempted to change in the process that imports it.
GLOBALS = """
import logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch._dynamo, jax

def state():
    return {
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "jax config": {name: jax.config._read(name) for name in jax.config.values},
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "name of PrivateUse1": torch._C._get_privateuse1_backend_name(),
        "torch.tpu": hasattr(torch, "tpu"),
        "torch.compile backends": torch._dynamo.list_backends(exclude_tags=()),
        "dynamo config": torch._dynamo.config.get_config_copy(),
        "torch random state": torch.get_rng_state().tolist(),
        "numpy random state": str(numpy.random.get_state()),
        "python random state": random.getstate(),
        "numpy print options": numpy.get_printoptions(),
        "signal handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "excepthook": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "module path": list(sys.path),
        "import hooks": (list(sys.meta_path), list(sys.path_hooks)),
        "threads": threading.active_count(),
        "working folder": os.getcwd(),
        "recursion limit": sys.getrecursionlimit(),
    }

before = state()
import tpu_kernels
after = state()
print(*(name for name in before if before[name] != after[name]), sep=", ")
"""


def python(code: str, cwd: Path) -> str:
    """Run code in a fresh interpreter; returns what it printed, and fails if it warned."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_the_import_is_quick(tmp_path: Path) -> None:
    times = [float(python(TIMED_IMPORT, tmp_path)) for _ in range(REPEATS)]
    assert min(times) < IMPORT_LIMIT_MS


def test_the_import_brings_in_no_heavy_module(tmp_path: Path) -> None:
    assert python(HEAVY_MODULES, tmp_path) == ""


def test_the_import_changes_no_global_and_prints_nothing(tmp_path: Path) -> None:
    assert python(GLOBALS, tmp_path) == ""


def test_help_is_quick(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpu_kernels", "--help"]
    times = []
    for _ in range(REPEATS):
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        times.append(1000 * (usage.ru_utime + usage.ru_stime))
    assert min(times) < HELP_LIMIT_MS


def test_help_imports_neither_torch_nor_jax(tmp_path: Path) -> None:
    code = (
        "import sys; from tpu_kernels.cli.main import build_parser; build_parser().format_help();"
        "print(*sorted({'torch', 'jax', 'numpy', 'rich', 'helion'} & set(sys.modules)))"
    )
    assert python(code, tmp_path) == ""
