"""Entry point of ``tpu-kernels``: parses, runs the subcommand, turns errors into exit codes.

Exit codes, the same for every subcommand:

- 0: done; where the command answers a question, the answer is yes.
- 1: the answer is no: a kernel does not compile for a target, no configuration works, a required
  package is missing.
- 2: the question could not be asked: wrong usage, unknown kernel, malformed argument, a file that
  cannot be imported, a missing optional package.
- 3: an error of the tool itself; the traceback is printed.
- 130: interrupted by Ctrl-C.

Only the module of the command that was asked for is imported, and none of them imports torch or JAX
before it runs: ``--help`` and wrong usage answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from tpu_kernels.cli.output import Output
from tpu_kernels.errors import KernelError

EXIT_OK = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_FAILURE = 3
EXIT_INTERRUPTED = 130

# Each is the module of that name in this package: `DESCRIPTION`, `add_arguments`, `run`.
COMMANDS = {
    "list": "the kernels: shipped ones and, with --import, yours",
    "show": "one kernel: parameters, gradients, source; with arguments, the config it would use",
    "check": "check a kernel: reference, gradients, races, bounds, edges, TPU compiler",
    "compile": "compile a kernel for TPU generations; no TPU needed",
    "overrides": "the overrides of your modules: how often used, why not; --check compares them",
    "report": "draw a kernel on several TPUs: roofline, units, memory, pipeline; one HTML page",
    "run": "run a program on the real TorchTPU, without a TPU (experimental)",
    "record": "run a program and record which kernels it runs, with which shapes",
    "tune": "try configurations of a kernel for a target, keep the best",
    "bench": "kernels beside their references: the compiler's figures, simulated times",
    "cache": "tuned records, compiled programs, compile results: list, explain, export, prune",
    "env": "versions, devices, what works here and what is missing",
}

EPILOG = """\
exit codes:
  0  done, or the answer is yes
  1  the answer is no: a check fails, no configuration works, a package is missing
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


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        command: The subcommand whose arguments it has to know; the others are listed only.
    """
    parser = argparse.ArgumentParser(
        prog="tpu-kernels",
        description="Inspect, compile and tune TPU kernels for PyTorch, without a TPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name == command:
            _complete(subparser, importlib.import_module(f"tpu_kernels.cli.{name}"))
    return parser


def _complete(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """Give a subparser what the module of its command declares."""
    parser.description = module.DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of tables"
    )
    parser.set_defaults(run=module.run)


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse, and let options stand between the arguments of a kernel.

    argparse gives all positional words to the first place where some stand, and calls later ones
    unrecognised.
    """
    options, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-") and not _is_number(word)]
    if rest and not unknown and hasattr(options, "arguments"):
        options.arguments = [*options.arguments, *rest]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    return options


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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
    words = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        options = _parse(build_parser(command), words)
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
        import traceback

        traceback.print_exc()
        return EXIT_FAILURE
