"""`autotune`: from a kernel, its arguments and a config space to a stored choice and a report."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels.compiler.chips import Target, resolve
from tpu_kernels.compiler.pool import Workers
from tpu_kernels.compiler.versions import why_unavailable
from tpu_kernels.errors import ArgumentError, MissingDependency, TuningError
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import device, guided, running
from tpu_kernels.tuning.activity import Activity
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.report import TuneReport, config_text
from tpu_kernels.tuning.session import WALL, Progress, Session

MEASURES = ("auto", "compiler", "cost-model", "roofline", "wall", "device")
SEARCHES = ("auto", "exhaustive", "optuna")
_REASONS_SHOWN = 50
_EXHAUSTIVE = 256  # what "auto" tries completely
_TRIALS = 100  # what it tries of a larger space


class TuningFallback(UserWarning):
    """No config of a kernel works; its reference is what is left."""


class SimulatedTime(UserWarning):
    """Times were taken on the simulated device; they say nothing about a TPU."""


def autotune(
    kernel: Kernel,
    args: Sequence[Any] | torch.Tensor,
    *,
    configs: Any = None,
    constraints: Any = None,
    target: str | Target | None = None,
    measure: str = "auto",
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    timeout_s: float | None = None,
    budget_s: float | None = None,
    search: str = "auto",
    trials: int | None = None,
    seed: int = 0,
    xla: bool = False,
    strict: bool = False,
    cache: TuningCache | str | os.PathLike[str] | None = None,
    store: bool = True,
    progress: Callable[[Progress], None] | None = None,
    watch: Callable[[Activity], None] | None = None,
    workers: Workers | None = None,
    **kwargs: Any,
) -> TuneReport:
    """Find the best config of a kernel for given arguments, and let the next call use it.

    With a target, every candidate is compiled by the real TPU compiler, without a TPU, and ranked
    by its figures. Without one, every candidate runs on this machine's CPU, its result is compared
    with the reference, and its time is measured. Either way candidates run in processes of their
    own: one that fails, hangs or aborts is a row of the report.

    Args:
        kernel: What `tpu_kernel` returned.
        args: Its positional arguments (or the only one): tensors of the shapes and dtypes to
            tune for.
        configs: A dict of lists (all combinations), a list of dicts or `helion.Config`, or a
            function of the kernel's arguments that returns one; by default the kernel's own
            `configs`.
        constraints: A function, or several, of config values and arguments by name; false or a text
            leaves a config out. They add to the kernel's own.
        target: The chip to tune for, such as ``"v6e"``; None for this machine's CPU.
        measure: ``"compiler"`` or ``"cost-model"`` (the TPU compiler's figures), ``"roofline"``
            (grid and blocks alone, nothing is compiled), ``"wall"`` (time on this CPU),
            ``"device"`` (time on the TPU that TorchTPU owns in this process; on the simulated
            device, with a warning, where it owns none), or ``"auto"``: with a target
            ``"compiler"`` and, where TorchTPU owns such a chip, time on it of all candidates within
            10% of the best; ``"wall"`` without a target.
        reference: A torch function of the kernel's arguments that results are compared with (on the
            CPU only); by default the kernel's own.
        tolerance: Largest accepted error, relative to the reference's largest value; by dtype.
        timeout_s: Seconds for one candidate; 300 for compiling, 60 on the CPU.
        budget_s: Seconds for the whole search; what is not tried by then is ``"skipped"``.
        search: ``"exhaustive"`` tries every config, ``"optuna"`` samples the space by a model of
            what it has seen (extra ``search``); ``"auto"`` samples more than 256 configs, where
            optuna is installed.
        trials: How many configs are tried of a space that is sampled; 100 by default. Given with
            ``search="auto"``, it makes every larger space be sampled.
        seed: Makes the samples repeatable.
        xla: Compile the kernel's reference without the kernel, too, and report what XLA reaches.
        strict: Raise if no candidate works, instead of reporting it.
        cache: Where the choice is kept; a `TuningCache`, its folder, or None for the user's cache.
        store: Whether to keep the choice at all.
        progress: Called whenever a candidate is decided.
        watch: Called with an `Activity` whenever a worker takes up a candidate or is done with one.
        workers: Who does the work: `cluster.RayWorkers`, for many machines; by default processes on
            this one.
        **kwargs: The kernel's arguments by name.

    Returns:
        The report: one row per candidate, the best, and why.

    Raises:
        ArgumentError: The arguments or options do not fit.
        ConfigError: The space is empty, or names what the kernel does not have.
        MissingDependency: The TPU compiler or optuna is asked for and not installed.
        TuningError: `strict`, and no candidate works; the text lists every reason.

    Example:
        >>> import jax, torch
        >>> from tpu_kernels.registry.decorator import tpu_kernel
        >>> @tpu_kernel("doc::scale")
        ... def scale(x: jax.Array, *, unroll: int = 1) -> jax.Array:
        ...     return 2 * x
        >>> report = autotune(scale, [torch.ones(8, 128)], configs={"unroll": [1, 2]},
        ...                   target="v6e", measure="roofline", store=False)
        >>> [(row.config, row.status) for row in report.results]
        [({'unroll': 1}, 'ok'), ({'unroll': 2}, 'ok')]
    """
    started = time.monotonic()
    _checked_kernel(kernel)
    on_device = device.current()
    if target is None and measure == "auto" and on_device is not None:
        target = on_device.chip
    chip = resolve(target) if target is not None else None
    session = Session(
        kernel=kernel,
        args=(args,) if isinstance(args, torch.Tensor) else tuple(args),
        kwargs=kwargs,
        measure=_measure_for(measure, target, on_device),
        target=chip,
        device=_device_for(measure, chip, on_device),
        reference=reference if reference is not None else kernel.spec.reference,
        tolerance=tolerance,
        timeout_s=timeout_s,
        deadline=math.inf if budget_s is None else started + budget_s,
        progress=progress,
        seed=seed,
        against_xla=xla,
        workers=workers,
        watch=watch,
    )
    session.prepare(configs, constraints)
    session.trials = _trials(search, trials, len(session.configs))
    cache = cache if isinstance(cache, TuningCache) else TuningCache(cache)
    if store:
        session.resume(str(cache.path / "searches"))
    try:
        running.run(session)
    except KeyboardInterrupt:
        # The best so far is worth keeping; the user still wants the program to stop.
        session.progress = None
        session.close("interrupted")
        if store:
            session.store(cache)
        raise
    session.close("the time budget had ended")
    stored = store and session.store(cache)
    if session.journal is not None and time.monotonic() < session.deadline:
        session.journal.close()
    report = dataclasses.replace(
        session.report(), seconds=time.monotonic() - started, stored=stored
    )
    if report.best is None:
        _no_config_works(report, strict)
    return report


def _trials(search: str, trials: int | None, size: int) -> int | None:
    """How many configs of a space are tried, None for all."""
    if search not in SEARCHES:
        raise ArgumentError(
            f"search={search!r} is not known", hint=f"use one of {', '.join(SEARCHES)}"
        )
    if trials is not None and trials < 1:
        raise ArgumentError(f"trials={trials} can decide nothing")
    if search == "exhaustive" or (search == "auto" and size <= (trials or _EXHAUSTIVE)):
        return None
    if search == "auto" and trials is None and not guided.available():
        return None
    return min(size, trials or _TRIALS)


def _checked_kernel(kernel: Any) -> Kernel:
    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            f"autotune takes a kernel, got {type(kernel).__name__}",
            hint="decorate the function with tpu_kernel and pass what that returns",
        )
    return kernel


def _device_for(
    measure: str, target: Target | None, on_device: device.Device | None
) -> device.Device | None:
    """The device that this search measures on, None for none."""
    if measure == "device":
        return on_device
    if measure != "auto" or on_device is None or target is None:
        return None
    return on_device if on_device.chip == target.chip.name else None


def _measure_for(measure: str, target: str | Target | None, on_device: device.Device | None) -> str:
    if measure not in MEASURES:
        raise ArgumentError(
            f"measure={measure!r} is not known", hint=f"use one of {', '.join(MEASURES)}"
        )
    chip = on_device.chip if on_device is not None else None
    if measure == "device" and chip is None:
        what = on_device.name if on_device is not None else "the simulated device"
        warnings.warn(
            f"measure='device' takes times on {what}: the Pallas interpreter on this "
            "CPU. They say nothing about a TPU; measure='compiler' with a target does.",
            SimulatedTime,
            stacklevel=3,
        )
    if measure == "device" and chip is not None and target is not None:
        if resolve(target).chip.name != chip:
            raise ArgumentError(
                f"measure='device' cannot tell the time on {target}: this machine has a {chip}",
                hint="leave target out, or use measure='compiler'",
            )
    elif measure in WALL and target is not None:
        raise ArgumentError(
            f"measure={measure!r} runs on this machine's CPU and cannot tell the time on {target}",
            hint="leave target out, or use measure='compiler'",
        )
    if measure == "auto":
        measure = "wall" if target is None else "compiler"
    if measure == "cost-model":
        measure = "compiler"
    if measure == "compiler" and (missing := why_unavailable()) is not None:
        raise MissingDependency(missing[0], hint=f"{missing[1]}; or use measure='roofline'")
    return measure


def _no_config_works(report: TuneReport, strict: bool) -> None:
    rows = [f"  {config_text(r.config)}: {r.status}: {r.reason}" for r in report.results]
    if len(rows) > _REASONS_SHOWN:
        rows[_REASONS_SHOWN:] = [f"  and {len(rows) - _REASONS_SHOWN} more"]
    where = f" for {report.target}" if report.target else ""
    text = f"kernel {report.kernel!r}: none of {len(report.results)} configs works{where}"
    if strict:
        raise TuningError("\n".join([text, *rows]), hint="try smaller blocks")
    left = "; its reference is what is left" if report.fallback else ""
    warnings.warn("\n".join([text + left, *rows]), TuningFallback, stacklevel=3)
