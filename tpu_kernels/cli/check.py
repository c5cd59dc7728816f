"""``tpu-kernels check``: every check of a kernel that needs no TPU, target by target."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tpu_kernels.cli.argspec import parse_config, random_tensors
from tpu_kernels.cli.arguments import (
    add_call_arguments,
    add_compile_options,
    call_arguments,
    targets,
)
from tpu_kernels.cli.kernels import add_import_option, find_kernel
from tpu_kernels.cli.memo import Memo, Recorder
from tpu_kernels.cli.output import Output, output_path
from tpu_kernels.errors import MissingDependency

if TYPE_CHECKING:
    from tpu_kernels.verify.report import CheckReport, CheckRow

DESCRIPTION = """\
Check one call of a kernel: against its reference, in the TPU interpreter, along its grid, and with
--target by the real TPU compiler. Exit code 1 if a check fails.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    add_call_arguments(parser)
    parser.add_argument(
        "--target",
        default="",
        metavar="CHIP[,CHIP...]",
        help="TPU generations to compile for: v4, v5e, v5p, v6e, tpu7x (default: none)",
    )
    parser.add_argument(
        "--passes",
        default="",
        metavar="PASS[,PASS...]",
        help="op, numerics, grad, races, bounds, nan, grid, edges, determinism, compile (default: "
        "the first seven; with --target grid and compile)",
    )
    add_compile_options(
        parser,
        timeout_s=300.0,
        limits="time limit of a run in another process, and of a compilation",
    )
    parser.add_argument(
        "--shrink-s",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="where a pass that runs the kernel fails, time to look for the smallest call that "
        "fails in the same way; 0 for none (default: %(default)s)",
    )
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Check and print; False if something fails."""
    words = {name: value for name, value in vars(options).items() if name not in ("run", "json")}
    memo = Memo("check", words)
    if not options.no_cache and memo.repeat(output):
        return True
    recorder = Recorder(output)
    with memo.watch():
        ok = _checked(options, recorder)
    if ok:  # what failed may have failed for want of time, and is about to be changed
        memo.keep(recorder)
    return ok


def _checked(options: argparse.Namespace, output: Output) -> bool:
    from tpu_kernels.verify.check import check

    kernel = find_kernel(options.kernel, options.imports)
    args, kwargs = call_arguments(options.arguments, random_tensors())
    chips = targets(options.target)
    common = {
        "config": parse_config(options.config) or None,
        "passes": targets(options.passes) or None,
        "timeout_s": options.timeout_s,
        "cache": not options.no_cache,
        "shrink_s": options.shrink_s,
        **kwargs,
    }
    if chips:
        found = check(kernel, args, target=chips, **common)
        reports = list(found.values())
    else:
        reports = [check(kernel, args, **common)]
    ok = all(report.ok for report in reports)
    _require_a_verdict(reports)
    output.document({"ok": ok, "reports": [report.to_dict() for report in reports]})
    for report in reports:
        output.table(_title(report), ("pass", "", "found"), [_cells(row) for row in report.rows])
        for row in report.rows:
            if row.status == "failed":
                output.line(f"\n{row.text}")
    return ok


def _title(report: CheckReport) -> str:
    return report.text.partition("\n")[0]


def _cells(row: CheckRow) -> tuple[str, str, str]:
    what = row.what.partition("\n")[0]
    return row.name, row.status, f"{what} ({output_path(row.where)})" if row.where else what


def _require_a_verdict(reports: list[CheckReport]) -> None:
    """A machine without the compiler has answered nothing: that is not a no."""
    failed = any(row.status == "failed" for report in reports for row in report.rows)
    for report in reports:
        compiled = report.compiled
        if compiled is not None and compiled.status == "unavailable" and not failed:
            raise MissingDependency(
                compiled.error or "the TPU compiler is not installed",
                hint=compiled.hint or "pip install 'tpu_kernels[aot]'",
            )
