"""``tpu-kernels compile``: what the TPU compiler says about a kernel, target by target."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kernels.cli.argspec import empty_tensor, parse_config
from tpu_kernels.cli.arguments import (
    add_call_arguments,
    add_compile_options,
    add_target_option,
    call_arguments,
    targets,
)
from tpu_kernels.cli.kernels import add_import_option, find_subject
from tpu_kernels.cli.output import Output
from tpu_kernels.errors import MissingDependency

if TYPE_CHECKING:
    from tpu_kernels.compiler import CompileReport, CompileReports

DESCRIPTION = """\
Compile one call of a kernel with the real TPU compiler, for one or several generations. Exit code 1
if it does not compile for one of them. FILE.py:NAME in place of a kernel is a torch module (or its
class) or a function of tensors in a file: the whole becomes one program.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    add_call_arguments(parser)
    add_target_option(parser)
    add_compile_options(parser)
    parser.add_argument(
        "--backward",
        action="store_true",
        help="of a module, compile the gradients of its parameters too",
    )
    parser.add_argument(
        "--dump", type=Path, metavar="FOLDER", help="write the intermediate programs to a folder"
    )
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Compile and print; False if some target refuses."""
    from tpu_kernels.verify.compiling import compile as compile_kernel

    kernel = find_subject(options.kernel, options.imports)
    args, kwargs = call_arguments(options.arguments, empty_tensor)
    reports = compile_kernel(
        kernel,
        args,
        targets(options.target),
        config=parse_config(options.config) or None,
        backward=options.backward,
        timeout_s=options.timeout_s,
        cache=not options.no_cache,
        dump=options.dump,
        **kwargs,
    )
    require_a_verdict(reports)
    output.document({"ok": reports.ok, "reports": reports.to_dict()})
    _print(reports, output)
    return reports.ok


def require_a_verdict(reports: CompileReports) -> None:
    """A machine without the compiler has answered nothing: that is not a no."""
    for report in reports.values():
        if report.status == "unavailable":
            raise MissingDependency(
                report.error or "the TPU compiler is not installed",
                hint=report.hint or "pip install 'tpu_kernels[aot]'",
            )


def _print(reports: CompileReports, output: Output) -> None:
    columns = (
        "target",
        "verdict",
        "compiler",
        "arguments",
        "outputs",
        "temporaries",
        "VMEM",
        "SMEM",
        "code",
        "estimated",
    )
    output.table("", columns, [_row(report) for report in reports.values()])
    for report in reports.values():
        if not report.ok:
            output.line(f"\n{report.text}")


def _row(report: CompileReport) -> tuple[str | None, ...]:
    time_us = report.estimate.us if report.estimate is not None else None
    return (
        report.target,
        report.status,
        "cached" if report.cached else f"{report.seconds:.1f} s",
        _size(report.hbm_argument_bytes),
        _size(report.hbm_output_bytes),
        _size(report.hbm_temp_bytes),
        _size(report.vmem_bytes),
        _size(report.smem_bytes),
        _size(report.code_bytes),
        None if time_us is None else f"{time_us:.1f} µs",
    )


def _size(size: int | None) -> str | None:
    from tpu_kernels.compiler.report import mib

    return None if size is None else mib(size)
