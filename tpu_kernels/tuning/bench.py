"""Kernels beside their references, on the same inputs: times on the simulated device, and the
compiler's figures per chip."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tpu_kernels.compiler.chips import resolve
from tpu_kernels.compiler.compile import compile_function
from tpu_kernels.errors import KernelError
from tpu_kernels.registry import reference as references
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import compare, xla
from tpu_kernels.tuning.candidates import named_arguments, one_line
from tpu_kernels.tuning.device import current
from tpu_kernels.verify.compiling import compile as compile_kernel

SIMULATED = "simulated device"
"""Where times say nothing about a TPU."""
_ROUNDS = 5
_SHORTEST_S = 1e-3  # a sample takes at least this long, so that the clock's own cost does not count


@dataclass(frozen=True)
class BenchRow:
    """A kernel and its reference in one place.

    Attributes:
        kernel: Name of the kernel.
        call: The arguments, for reports.
        where: `SIMULATED`, the name of TorchTPU's device, or a chip, where times are estimates of
            the cost model.
        kernel_us: The kernel's time in µs, None where there is none.
        reference_us: The reference's; on a chip that of XLA's program for it.
        config: The kernel's config.
        note: Why a time is missing, or how the results differ.
    """

    kernel: str
    call: str
    where: str
    kernel_us: float | None
    reference_us: float | None
    config: Mapping[str, Any]
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster than the reference the kernel is.

        Example:
            >>> BenchRow("ns::f", "", "v6e", 2.0, 5.0, {}).speedup
            2.5
        """
        if not self.kernel_us or not self.reference_us:
            return None
        return self.reference_us / self.kernel_us

    @property
    def ok(self) -> bool:
        """Whether the kernel works there."""
        return self.kernel_us is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**asdict(self), "config": dict(self.config), "speedup": self.speedup}


def on_chip(
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: str,
    *,
    call: str = "",
    timeout_s: float = 600.0,
) -> BenchRow:
    """Compare by the compiler's figures.

    Args:
        kernel: The kernel.
        args: Positional arguments; of tensors only the type counts.
        kwargs: Arguments by name.
        target: The chip.
        call: The arguments, for reports.
        timeout_s: Seconds for each compilation.
    """
    chip = resolve(target)
    config = kernel.bind(*args, **kwargs).choice(chip.chip.name).config
    report = compile_kernel(kernel, tuple(args), target, timeout_s=timeout_s, **kwargs)
    own = report.estimate.us if report.ok and report.estimate is not None else None
    notes = [] if report.ok else [f"kernel: {one_line(report.error or report.status)}"]
    other = xla.try_reference(kernel, args, kwargs, chip, timeout_s=timeout_s)
    if not other.ok:
        notes.append(f"reference: {other.reason or other.status}")
    return BenchRow(kernel.name, call, target, own, other.cost, config, "; ".join(notes))


def beside_peer(
    row: BenchRow,
    peer: Callable[..., Any],
    name: str,
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    timeout_s: float = 600.0,
) -> BenchRow:
    """Put another kernel in the reference's place, by the same compiler's figures.

    Args:
        row: What `on_chip` found for the kernel.
        peer: A JAX function of the call's tensors, in order.
        name: What to call it.
        kernel: The kernel.
        args: Positional arguments, as for `on_chip`.
        kwargs: Arguments by name.
        timeout_s: Seconds for the compilation.

    Returns:
        A row with the peer's time as that of the reference.
    """
    avals = kernel.bind(*args, **kwargs).avals
    report = compile_function(peer, avals, row.where, name=name, timeout_s=timeout_s)
    us = report.estimate.us if report.ok and report.estimate is not None else None
    failed = "" if report.ok else f": {one_line(report.error or report.status)}"
    return replace(row, reference_us=us, note=f"beside {name}{failed}")


def on_device(
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    call: str = "",
    rounds: int = _ROUNDS,
) -> BenchRow:
    """Compare by times on the TPU that TorchTPU owns in this process, else on the simulated device.

    Measured in rounds, so that drift of the machine cancels.

    Args:
        kernel: The kernel.
        args: Positional arguments.
        kwargs: Arguments by name.
        call: The arguments, for reports.
        rounds: How many times each is measured.

    Returns:
        A row with the medians; the note says where the results differ.
    """
    from tpu_kernels.backends import device

    owned = current()
    if owned is None:
        device.install()
    where = owned.name if owned is not None else SIMULATED
    args, kwargs = _moved(list(args)), _moved(dict(kwargs))
    config = kernel.bind(*args, **kwargs).config
    values = named_arguments(kernel, args, kwargs)
    runs: list[Callable[[], Any]] = [lambda: kernel(*args, **kwargs)]
    if kernel.spec.reference is not None and not kernel.spec.mutates_args:
        runs.append(lambda: references.call(kernel.spec, values))
    notes: list[str] = []
    times: list[float | None] = [None, None]
    with torch.no_grad():
        try:
            results = [compare.leaves(run()) for run in runs]
            times[: len(runs)] = _times(runs, rounds)
        except (KernelError, RuntimeError, NotImplementedError) as error:
            return BenchRow(kernel.name, call, where, None, None, config, one_line(str(error)))
    if len(results) == 2:
        shared = results[0][: len(results[1])]  # a reference may return fewer
        if reason := compare.difference(shared, results[1]):
            notes.append(f"results differ: {reason}")
    else:
        notes.append("nothing to compare with")
    return BenchRow(kernel.name, call, where, times[0], times[1], config, "; ".join(notes))


def _times(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float | None]:
    samples: list[list[float]] = [[] for _ in runs]
    counts = [max(1, min(1000, round(_SHORTEST_S / max(_seconds(run, 1), 1e-9)))) for run in runs]
    for _ in range(rounds):
        for run, count, taken in zip(runs, counts, samples, strict=True):
            taken.append(_seconds(run, count))
    return [1e6 * statistics.median(taken) for taken in samples]


def _seconds(run: Callable[[], Any], count: int) -> float:
    torch.accelerator.synchronize()
    started = time.perf_counter()
    results = [run() for _ in range(count)]
    torch.accelerator.synchronize()
    del results  # kept until here: what nobody reads need not be computed
    return (time.perf_counter() - started) / count


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("tpu")
    if isinstance(value, list | tuple):
        return type(value)(_moved(item) for item in value)
    if isinstance(value, dict):
        return {name: _moved(item) for name, item in value.items()}
    return value
