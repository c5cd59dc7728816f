"""Entry point of ``tpu-kernels``: parses, runs the subcommand, turns errors into exit codes.

Exit codes, the same for every subcommand:

- 0: done; where the command answers a question, the answer is yes.
- 1: the answer is no: a kernel does not compile for a target, no configuration works, a required
  package is missing.
- 2: the question could not be asked: wrong usage, unknown kernel, malformed argument, a file that
  cannot be imported, a missing optional package.
- 3: an error of the tool itself; the traceback is printed.
- 130: interrupted by Ctrl-C.

Nothing heavy is imported here: ``tpu-kernels --help`` needs neither torch nor JAX.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from tpu_kernels.cli import compile as compile_command
from tpu_kernels.cli import env as env_command
from tpu_kernels.cli import list as list_command
from tpu_kernels.cli import show as show_command
from tpu_kernels.cli import tune as tune_command
from tpu_kernels.cli.output import Output
from tpu_kernels.errors import KernelError

EXIT_OK = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_FAILURE = 3
EXIT_INTERRUPTED = 130

COMMANDS = (list_command, show_command, compile_command, tune_command, env_command)

EPILOG = """\
exit codes:
  0  done, or the answer is yes
  1  the answer is no: a kernel does not compile, no configuration works, a package is missing
  2  wrong usage, unknown kernel, malformed argument, file that cannot be imported
  3  an error of the tool itself

example:
  tpu-kernels compile tpu::matmul 'bf16[1024,1024]' 'bf16[1024,1024]' --target v5e,v6e
"""


class _Version(argparse.Action):
    """Print the version; looking it up at parser construction would slow every command down."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"tpu-kernels {version('tpu_kernels')}\n")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, one subparser per command."""
    parser = argparse.ArgumentParser(
        prog="tpu-kernels",
        description="Inspect, compile and tune TPU kernels for PyTorch, without a TPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument(
            "--json", action="store_true", help="print one JSON document instead of tables"
        )
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code; see the module's docstring.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        tpu-kernels ...
        0
    """
    try:
        options = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse exits by itself after --help (0) and wrong usage (2)
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    output = Output(json_wanted=options.json)
    try:
        return EXIT_OK if options.run(options, output) else EXIT_NO
    except KernelError as error:
        output.error(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception:
        traceback.print_exc()
        return EXIT_FAILURE
