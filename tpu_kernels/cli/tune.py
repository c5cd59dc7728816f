"""``tpu-kernels tune``: try configurations of a kernel for a target and keep the best."""

from __future__ import annotations

import argparse

from tpu_kernels.cli.argspec import parse_choices, random_tensors
from tpu_kernels.cli.arguments import (
    add_call_arguments,
    add_target_option,
    call_arguments,
    targets,
)
from tpu_kernels.cli.kernels import add_import_option, find_kernel
from tpu_kernels.cli.output import Output

DESCRIPTION = """\
Compile one call of a kernel with every configuration, rank those that work, and store the best for
later calls with the same shapes. Exit code 1 if no configuration works for a target.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    add_call_arguments(parser)
    add_target_option(parser)
    parser.add_argument(
        "--configs",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE,...",
        help="values to try of one parameter, all combinations of several (default: the kernel's)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        metavar="SECONDS",
        help="time limit of one configuration",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        metavar="SECONDS",
        help="time limit of the whole run; configurations left over are skipped",
    )
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Tune and print; False if no configuration works for some target."""
    from tpu_kernels.tuning import autotune

    kernel = find_kernel(options.kernel, options.imports)
    args, kwargs = call_arguments(options.arguments, random_tensors())
    limits = {"timeout_s": options.timeout_s, "budget_s": options.budget_s}
    reports = []
    for target in targets(options.target):
        output.note(f"tuning {kernel.name} for {target} ...")
        report = autotune(
            kernel,
            args,
            configs=parse_choices(options.configs) or None,
            target=target,
            **{name: limit for name, limit in limits.items() if limit is not None},
            **kwargs,
        )
        reports.append(report)
        output.line(report.text)
    ok = all(report.ok for report in reports)
    output.document({"ok": ok, "reports": {str(r.target): r.to_dict() for r in reports}})
    return ok
