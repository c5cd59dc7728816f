"""``tpu-kernels overrides``: what overrides the user's modules make, and how they did."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from tpu_kernels.cli.kernels import add_import_option, load_kernels
from tpu_kernels.cli.output import Output, output_path

if TYPE_CHECKING:
    from tpu_kernels.registry.overrides import OverrideRecord
    from tpu_kernels.verify.report import CheckReport

DESCRIPTION = """\
Import modules that make overrides, and list these: operator, implementation, predicate, scope, how
often each answered, how often and why it declined, its errors. The counts are those of what the
modules run when they are imported. With --check each override is compared with the operator that
it replaces, on torch's own samples; exit code 1 if one differs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_import_option(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare each override with the original, forward and backward, on torch's samples",
    )


def run(options: argparse.Namespace, output: Output) -> bool:
    """Print the overrides; False if one that is checked differs from the original."""
    from tpu_kernels.registry.overrides import overrides

    load_kernels(options.imports)
    records = overrides()
    reports = _check() if options.check else []
    document: dict[str, object] = {"overrides": [dataclasses.asdict(r) for r in records]}
    if options.check:
        document["ok"] = all(report.ok for report in reports)
        document["reports"] = [report.to_dict() for report in reports]
    output.document(document)
    columns = (
        "operator",
        "implementation",
        "when",
        "device",
        "scope",
        "priority",
        "hits",
        "declines",
        "errors",
        "last decline or error",
        "defined at",
    )
    output.table("", columns, [_row(record) for record in records])
    if not records:
        output.line("no overrides: --import names the modules that make them")
    for report in reports:
        output.line(f"\n{report.text}")
    return all(report.ok for report in reports)


def _check() -> list[CheckReport]:
    from tpu_kernels.registry.overrides.handle import listed
    from tpu_kernels.verify.check import check

    return [check(override) for override in listed()]


def _row(record: OverrideRecord) -> tuple[object, ...]:
    return (
        record.op,
        record.impl,
        record.predicate,
        record.device,
        record.scope,
        record.priority,
        record.hits,
        record.declines,
        record.errors,
        record.last_error or record.last_decline,
        output_path(record.where) if record.where else None,
    )
