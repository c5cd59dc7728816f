"""The examples run to their end and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# The examples, on a machine without the compiler: its distribution cannot be found.
WITHOUT_COMPILER = """
import runpy, sys
from importlib import metadata

version = metadata.version

def all_but_libtpu(name):
    if name == "libtpu":
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = all_but_libtpu
sys.path.insert(0, {folder!r})
sys.argv = ["quickstart.py", "--quick"]
runpy.run_path({folder!r} + "/quickstart.py", run_name="__main__")
"""


def run(cache: Path, *arguments: str) -> str:
    """What a Python process prints; it starts with an empty cache and must end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "TPU_KERNELS_CACHE_DIR": str(cache),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.libtpu
def test_the_quickstart_tunes_trains_and_compiles(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "quickstart.py"), "--quick")
    assert "3 of 3 configs work" in printed  # two given, and what the kernel chooses itself
    assert "(tuned)" in printed
    assert "The losses agree" in printed
    for target in ("v5e", "v6e", "tpu7x"):
        (row,) = (line for line in printed.splitlines() if line.startswith(f"│ {target}"))
        assert "ok" in row


def test_the_quickstart_does_what_it_can_without_the_compiler(tmp_path: Path) -> None:
    printed = run(tmp_path, "-c", WITHOUT_COMPILER.format(folder=str(EXAMPLES)))
    assert "Nothing is tuned or compiled for a TPU: the TPU compiler" in printed
    assert 'pip install "tpu_kernels[aot]"' in printed
    assert "The losses agree" in printed


@pytest.mark.libtpu
def test_the_attention_example_trains_and_compiles(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "attention.py"))
    assert "The losses agree; the kernel answered 12 calls." in printed
    assert "tpu::attention on v6e: ok" in printed


@pytest.mark.libtpu
def test_the_fused_linear_example_trains_and_compiles(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "fused_linear.py"))
    assert "The losses agree; the override answered" in printed
    assert "tpu::gated_matmul on v6e: ok" in printed


@pytest.mark.libtpu
def test_the_helion_example_overrides_in_a_block_and_compiles(tmp_path: Path) -> None:
    printed = run(tmp_path, str(EXAMPLES / "helion_block.py"), "--width", "256")
    assert "overridden: rms_norm 1 time(s), attention 1 time(s)" in printed
    assert "helion_block::rms_norm_residual on v6e: ok" in printed
    assert "helion_block::attention on v6e: ok" in printed
