"""The real TorchTPU, on a CPU plug-in: one process for each program of ``programs/``.

A process costs ten seconds or more, so a program has many checks; each is a test here.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.torch_tpu.runner import OK
from tpu_kernels.backends.torch_tpu import cpu_plugin

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAMS = sorted(path.stem for path in (HERE / "programs").glob("*.py"))
NEEDS_LIBTPU = {"compiler"}
SETTINGS = {"public_calls": {"TPU_KERNELS_TORCH_TPU_CALLS": "public"}}
TIME_LIMIT_S = 600.0  # a busy machine takes four times as long as an idle one


def checks(program: str) -> list[str]:
    """The names of a program's checks; it cannot be imported in this process."""
    tree = ast.parse((HERE / "programs" / f"{program}.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("check_")]


CASES = [
    pytest.param(
        program,
        check,
        marks=pytest.mark.libtpu if program in NEEDS_LIBTPU else (),
        id=f"{program}-{check.removeprefix('check_')}",
    )
    for program in PROGRAMS
    for check in checks(program)
]


def start(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and the end of the output of ``tpu-kernels run --torch-tpu -q ...``."""
    command = [sys.executable, "-m", "tpu_kernels", "run", "--torch-tpu", "-q", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout[-4000:]


@functools.cache
def outcomes(program: str) -> dict[str, str]:
    """What became of each check of a program."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        module = f"tests.torch_tpu.programs.{program}"
        # An empty folder for torch's caches: nothing of an earlier run may answer.
        environment = {"TORCHINDUCTOR_CACHE_DIR": folder, **SETTINGS.get(program, {})}
        code, output = start(["-m", "tests.torch_tpu.runner", module, str(results)], environment)
        found: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
    ended = f"the process ended with {code} before it was done\n{output}"
    return {name: found.get(name, ended) for name in checks(program)}


@pytest.mark.torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(TIME_LIMIT_S + 60)
@pytest.mark.parametrize(("program", "check"), CASES)
def test_check(program: str, check: str) -> None:
    outcome = outcomes(program)[check]
    assert outcome == OK, outcome


STALE = """
import sys
import jax, torch
import tpu_kernels as tk

value = float(sys.argv[1])

@tk.tpu_kernel("stale::kernel")
def kernel(x: jax.Array) -> jax.Array:
    return x * 0 + value

@tk.tpu_kernel("stale::tuned", configs={"size": [1, 2, 3]})
def tuned(x: jax.Array, *, size: int = 1) -> jax.Array:
    return x * 0 + size

def replacement(x, y):
    return x * y * 0 + value

x = torch.ones(2, 2, device="tpu")
cache = tk.TuningCache()
request = tuned.bind(x).request("v6e")
from tpu_kernels.tuning import lookup
lookup.store(request, cache, {"size": int(value)}, None)

def results():
    torch._dynamo.reset()
    functions = [lambda a: kernel(a) * 1, lambda a: tuned(a) * 1]
    found = [torch.compile(f, backend="tpu")(x)[0, 0].item() for f in functions]
    with tk.override("aten::mm", replacement):
        found.append(torch.compile(lambda a: torch.mm(a, a) * 1, backend="tpu")(x)[0, 0].item())
    return found

first = results()
counters = torch._dynamo.utils.counters["aot_autograd"]
missed = counters["autograd_cache_hit"]
second = results()
print("RESULT", first == second == [value] * 3, missed, counters["autograd_cache_hit"] - missed)
"""


@pytest.mark.torch_tpu
@pytest.mark.slow
@pytest.mark.timeout(2 * TIME_LIMIT_S + 60)
def test_the_next_process_gets_no_executable_of_before_a_change(tmp_path: Path) -> None:
    """A kernel's body, a tuned config and an override change between two processes."""
    script = tmp_path / "script.py"
    script.write_text(STALE)
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "TPU_KERNELS_CACHE_DIR": str(tmp_path / "ours"),
    }
    for value in ("1", "2"):
        code, output = start([str(script), value], environment)
        assert code == 0, output
        # No hit before, and hits when the same is compiled again: the cache was on.
        assert "RESULT True 0 3" in output, output


def test_torch_tpu_is_installed_where_it_was_asked_for() -> None:
    """Guards the tests above where they must not be skipped."""
    if os.environ.get("TPU_KERNELS_REQUIRE_TORCH_TPU"):
        assert cpu_plugin.why_not() is None
