"""Tuning all calls of a workload, one after the other, under one budget."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_kernels.errors import KernelError
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning.report import TuneReport
from tpu_kernels.tuning.tuner import TuningFallback, autotune
from tpu_kernels.tuning.workload import Workload, WorkloadCall


@dataclass(frozen=True)
class BatchResult:
    """What became of one call for one target.

    Attributes:
        call: The call.
        target: The chip.
        report: The tuning report, None if the call was not tuned.
        reason: Why it was not tuned.
    """

    call: WorkloadCall
    target: str
    report: TuneReport | None
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether a config was found, or none was to be found."""
        return self.report is None or self.report.ok


def tune_workload(
    workload: Workload,
    kernels: Mapping[str, Kernel],
    targets: list[str],
    *,
    budget_s: float | None = None,
    fill: Callable[[Any], Any] | None = None,
    started: Callable[[WorkloadCall, str], Mapping[str, Any] | None] | None = None,
    **options: Any,
) -> Iterator[BatchResult]:
    """Tune every call of a workload for every target.

    Args:
        workload: The calls.
        kernels: The kernels by name; calls of others are left out with a reason.
        targets: The chips.
        budget_s: Seconds for all; what is left is divided among the calls that are left.
        fill: Gives the arguments of a call values, for measures that run kernels.
        started: Called before each call; what it returns are more options of `autotune` for it.
        **options: Passed to `autotune`.

    Returns:
        An iterator of results, each as soon as it is there. A call that does not fit its kernel is
        a result with the reason.
    """
    jobs = [(call, target) for target in targets for call in workload]
    deadline = None if budget_s is None else time.monotonic() + budget_s
    for position, (call, target) in enumerate(jobs):
        kernel = kernels.get(call.kernel)
        if kernel is None:
            yield BatchResult(call, target, None, f"no kernel is called {call.kernel!r}")
            continue
        if not kernel.spec.configs and options.get("configs") is None:
            yield BatchResult(call, target, None, "the kernel declares no configs to try")
            continue
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                yield BatchResult(call, target, None, "the time budget had ended")
                continue
            options = {**options, "budget_s": left / (len(jobs) - position)}
        own = dict(options)
        if started is not None:
            own |= started(call, target) or {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TuningFallback)  # the report says it
                arguments = call.bind_arguments(kernel)
                if fill is not None:
                    arguments = fill(arguments)
                report = autotune(kernel, (), target=target, **arguments, **own)
        except KernelError as error:
            yield BatchResult(call, target, None, str(error))
        else:
            yield BatchResult(call, target, report)
