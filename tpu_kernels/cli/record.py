"""``tpu-kernels record``: run a program and write down which kernels it ran, with which shapes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tpu_kernels.cli.output import Output
from tpu_kernels.config import RECORD
from tpu_kernels.errors import ArgumentError

DESCRIPTION = """\
Run a program and record which kernels it and its child processes run, with which shapes, dtypes and
static values, into a file that `tpu-kernels tune --workload` takes. The exit code is the program's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("workload.json"),
        metavar="FILE",
        help="file to write (default: %(default)s); calls that it holds already are kept",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help="such as python train.py",
    )


def run(options: argparse.Namespace, output: Output) -> bool:
    """Run the program and write the file.

    Raises:
        ArgumentError: No program was named, or it cannot be started.
        SystemExit: With the program's exit code, where that is not 0.
    """
    from tpu_kernels.tuning.recording import collect
    from tpu_kernels.tuning.workload import Workload

    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        raise ArgumentError("record: no program", hint="tpu-kernels record -- python train.py")
    workload = Workload.load(options.output) if options.output.exists() else Workload()
    with tempfile.TemporaryDirectory(prefix="tpu_kernels-record-") as folder:
        # With --json, stdout holds one document: the program's output goes to stderr.
        stdout = sys.stderr if output.json_wanted else None
        try:
            done = subprocess.run(
                command, env={**os.environ, RECORD: folder}, stdout=stdout, check=False
            )
        except OSError as error:
            raise ArgumentError(f"record: cannot start {command[0]!r}: {error}") from error
        calls = collect(Path(folder))
    new = [workload.add(call) for call in calls].count(True)
    workload.save(options.output)
    output.document(
        {
            "file": str(options.output),
            "exit_code": done.returncode,
            "new": new,
            "calls": [call.to_json() for call in calls],
        }
    )
    output.table(
        "", ("kernel", "call"), [(c.kernel, str(c).removeprefix(c.kernel).strip()) for c in calls]
    )
    output.line(f"{len(calls)} distinct calls, {new} of them new, in {options.output}")
    if done.returncode:
        raise SystemExit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    return True
