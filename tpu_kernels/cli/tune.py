"""``tpu-kernels tune``: try configurations of a kernel for a target and keep the best."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kernels.cli.argspec import empty_tensor, parse_choices, with_values
from tpu_kernels.cli.arguments import CALL_HELP, add_target_option, call_arguments, targets
from tpu_kernels.cli.kernels import add_import_option, find_kernel, load_kernels
from tpu_kernels.cli.output import Output
from tpu_kernels.cli.progress import SearchProgress
from tpu_kernels.errors import ArgumentError

if TYPE_CHECKING:
    from tpu_kernels.tuning.batch import BatchResult
    from tpu_kernels.tuning.cluster import RayWorkers
    from tpu_kernels.tuning.report import TuneReport
    from tpu_kernels.tuning.workload import Workload

DESCRIPTION = """\
Compile one call of a kernel, or every call of a workload, with every configuration, rank those that
work, and store the best for later calls with the same shapes. Exit code 1 if no configuration works
for a target.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments and options of the subcommand."""
    parser.add_argument(
        "kernel", metavar="KERNEL", nargs="?", help="name of the kernel, such as tpu::matmul"
    )
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", default=[], help=CALL_HELP)
    parser.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="tune every call of a file that `tpu-kernels record` wrote; KERNEL narrows it",
    )
    parser.add_argument(
        "--shapes",
        metavar="NAME",
        help="tune the layers of a model, such as llama3-8b/prefill; KERNEL narrows it",
    )
    add_target_option(parser)
    parser.add_argument(
        "--configs",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE,...",
        help="values to try of one parameter, all combinations of several (default: the kernel's)",
    )
    parser.add_argument(
        "--measure",
        choices=("auto", "compiler", "roofline", "device"),
        default="auto",
        help="what ranks configurations: the TPU compiler and the cost model; the grid alone "
        "(roofline); time on the TPU that TorchTPU owns (device); or the compiler and, where there "
        "is such a chip, that time of its best few (auto, the default)",
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
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="sample a larger space: try so many configurations of it (extra 'search')",
    )
    parser.add_argument(
        "--xla", action="store_true", help="also compile the reference without the kernel"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="spread the work over a Ray cluster (extra 'ray'): its address, such as auto or "
        "ray://host:10001; without one, Ray on this machine",
    )
    parser.add_argument(
        "--ray-workers", type=int, metavar="N", help="with --ray: actors (default: one per CPU)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the search: one HTML page")
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="with --plot: PNG files too (matplotlib)"
    )
    add_import_option(parser)


def run(options: argparse.Namespace, output: Output) -> bool:
    """Tune and print; False if no configuration works for some target."""
    if options.ray is None and options.ray_workers is not None:
        raise ArgumentError("tune: --ray-workers without --ray", hint="add --ray")
    with contextlib.ExitStack() as stack:
        workers = None
        if options.ray is not None:
            from tpu_kernels.tuning.cluster import RayWorkers

            address = None if options.ray == "local" else options.ray
            workers = stack.enter_context(RayWorkers(address, options.ray_workers))
            output.note(f"{workers.max_workers} workers on the Ray cluster")
        if options.workload is not None or options.shapes is not None:
            return _tune_workload(_workload(options), options, output, workers)
        return _tune_call(options, output, workers)


def _tune_call(options: argparse.Namespace, output: Output, workers: RayWorkers | None) -> bool:
    if options.kernel is None:
        raise ArgumentError("tune: what?", hint="name a kernel, --workload FILE or --shapes NAME")
    from tpu_kernels.tuning import autotune

    kernel = find_kernel(options.kernel, options.imports)
    args, kwargs = call_arguments(options.arguments, empty_tensor)
    if (fill := _filling(options)) is not None:
        args, kwargs = fill(args), fill(kwargs)
    reports = []
    chips = targets(options.target)
    for target in chips:
        with SearchProgress(output, budget_s=options.budget_s) as shown:
            report = autotune(
                kernel,
                args,
                target=target,
                workers=workers,
                **shown.search(f"{kernel.name} for {target}"),
                **_limits(options),
                **kwargs,
            )
        reports.append(report)
        output.line(report.text)
    _draw(reports, options, output)
    ok = all(report.ok for report in reports)
    output.document({"ok": ok, "reports": {str(r.target): r.to_dict() for r in reports}})
    return ok


def _filling(options: argparse.Namespace) -> Callable[[Any], Any] | None:
    """What gives arguments values; None where only their types count: nothing is executed."""
    from tpu_kernels.tuning import device

    if options.measure == "device" and device.current() is None:
        raise ArgumentError(
            "tune: --measure device needs a TPU that TorchTPU owns in this process",
            hint="without one, leave --measure out",
        )
    measured = options.measure in ("auto", "device") and device.current() is not None
    return with_values if measured else None


def _draw(reports: list[TuneReport], options: argparse.Namespace, output: Output) -> None:
    if options.plot is None:
        return
    from tpu_kernels.tuning import plot

    for file in plot.write(reports, options.plot, png=options.png):
        output.note(f"wrote {file}")


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    given = {
        "configs": parse_choices(options.configs) or None,
        "measure": options.measure,
        "timeout_s": options.timeout_s,
        "budget_s": options.budget_s,
        "trials": options.trials,
        "xla": options.xla or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _workload(options: argparse.Namespace) -> Workload:
    from tpu_kernels.tuning.shape_sets import shape_set
    from tpu_kernels.tuning.workload import Workload

    if options.arguments:
        raise ArgumentError(
            f"tune: arguments {' '.join(options.arguments)!r} beside a workload",
            hint="the workload has the arguments; a kernel's name narrows it",
        )
    calls = [
        *(Workload.load(options.workload) if options.workload is not None else ()),
        *(shape_set(options.shapes) if options.shapes is not None else ()),
    ]
    chosen = [call for call in calls if options.kernel in (None, call.kernel)]
    if not chosen:
        raise ArgumentError(
            f"tune: the workload has no calls of {options.kernel or 'any kernel'}",
            hint=f"its kernels: {', '.join(sorted({call.kernel for call in calls})) or 'none'}",
        )
    return Workload(chosen)


def _tune_workload(
    workload: Workload, options: argparse.Namespace, output: Output, workers: RayWorkers | None
) -> bool:
    from tpu_kernels.tuning.batch import tune_workload
    from tpu_kernels.tuning.report import config_text

    chips = targets(options.target)
    total = len(workload) * len(chips)
    results: list[BatchResult] = []
    kernels = load_kernels(options.imports)
    with SearchProgress(output, searches=total, budget_s=options.budget_s) as shown:
        for result in tune_workload(
            workload,
            kernels,
            chips,
            started=lambda call, target: shown.search(f"{call} for {target}"),
            fill=_filling(options),
            workers=workers,
            **_limits(options),
        ):
            results.append(result)
            if result.report is not None:
                shown.note(f"  {result.report.text.splitlines()[0]}")
    rows = []
    for result in results:
        best = result.report.best if result.report is not None else None
        rows.append(
            (
                result.target,
                result.call.origin or str(result.call),
                config_text(best.config) if best is not None else None,
                f"{best.rank:.1f} µs" if best is not None else None,
                result.reason or (result.report.decision if result.report is not None else ""),
            )
        )
    output.table("", ("target", "call", "config", "time", "why"), rows)
    tuned = [result.report for result in results if result.report is not None]
    _draw(tuned, options, output)
    ok = bool(tuned) and all(result.ok for result in results)
    output.document(
        {
            "ok": ok,
            "results": [
                {
                    "target": r.target,
                    "call": r.call.to_json(),
                    "reason": r.reason,
                    "report": r.report.to_dict() if r.report is not None else None,
                }
                for r in results
            ],
        }
    )
    return ok
