"""``python -m tpu_kernels.backends.torch_tpu.launcher [-q] [-m] PROGRAM [ARGUMENTS]``.

Runs a program in this process as ``python PROGRAM`` (or ``python -m PROGRAM``) would, after the
real TorchTPU was started on the CPU. What ``tpu-kernels run --torch-tpu`` becomes.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib import metadata

from tpu_kernels.backends.torch_tpu import cpu_plugin, detection


def command(program: Sequence[str], *, module: bool = False, quiet: bool = False) -> list[str]:
    """The command line of a process that runs a program.

    Args:
        program: File or module, then its arguments.
        module: Whether the first is a module's name.
        quiet: Say nothing about the experimental nature of this.

    Example:
        >>> command(["train.py", "--steps", "3"])[1:]
        ['-m', 'tpu_kernels.backends.torch_tpu.launcher', 'train.py', '--steps', '3']
    """
    flags = [flag for flag, wanted in (("-q", quiet), ("-m", module)) if wanted]
    return [sys.executable, "-m", __name__, *flags, *program]


def environment() -> dict[str, str]:
    """The environment of such a process: torch must not load TorchTPU by itself."""
    return {**os.environ, detection.AUTOLOAD: "0"}


def main(words: Sequence[str]) -> None:
    """Start TorchTPU and become the program."""
    flags = []
    while words and words[0] in ("-q", "-m"):
        flags.append(words[0])
        words = words[1:]
    plugin = cpu_plugin.activate()
    if "-q" not in flags:
        sys.stderr.write(
            f"tpu-kernels: TorchTPU {metadata.version('torch_tpu')} on the CPU, by {plugin} in "
            "place of libtpu. Experimental; no statement about time.\n"
        )
    program, *_ = words
    sys.argv = list(words)
    if "-m" in flags:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
