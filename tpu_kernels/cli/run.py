"""``tpu-kernels run --torch-tpu``: a program on the real TorchTPU, on a machine without a TPU."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tpu_kernels.cli.output import Output
from tpu_kernels.errors import ArgumentError, DeviceError, MissingDependency

DESCRIPTION = """\
Run a Python program on the real TorchTPU, with an XLA:CPU plug-in in the place of the TPU.

Experimental. What runs is TorchTPU's own code (operators, lowering, eager modes, compile backend);
Pallas kernels are interpreted, other Mosaic kernels cannot run, there is one device, and times mean
nothing. Linux on x86-64; pip install 'tpu_kernels[torch-tpu-cpu]'.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--torch-tpu", action="store_true", help="run on TorchTPU (required: there is no other way)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module's name")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not print what this runs on")
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM ...",
        help="a Python file, then its arguments",
    )


def run(options: argparse.Namespace, output: Output) -> bool:
    """Become the program; returns only if that fails.

    Raises:
        ArgumentError: No program was named, it is not a file, or ``--torch-tpu`` is missing.
        MissingDependency: A package is missing.
        DeviceError: The platform is another.
    """
    if not options.torch_tpu:
        raise ArgumentError(
            "run: on what? --torch-tpu is required",
            hint="tpu-kernels run --torch-tpu program.py; for the simulated device, "
            "`import tpu_kernels.device` in the program and start it with python",
        )
    if not options.program:
        raise ArgumentError("run: no program", hint="tpu-kernels run --torch-tpu program.py")
    if not options.module and not Path(options.program[0]).is_file():
        raise ArgumentError(f"run: {options.program[0]!r} is not a file")
    from tpu_kernels.backends.torch_tpu import cpu_plugin, launcher

    reason = cpu_plugin.why_not()
    if reason is not None:
        kind = MissingDependency if "installed" in reason else DeviceError
        raise kind(
            f"run --torch-tpu: {reason}", hint=f"pip install 'tpu_kernels[{cpu_plugin.EXTRA}]'"
        )
    command = launcher.command(options.program, module=options.module, quiet=options.quiet)
    sys.stdout.flush()
    # Not a child: signals, the terminal and the exit code are the program's own.
    os.execve(command[0], command, launcher.environment())
