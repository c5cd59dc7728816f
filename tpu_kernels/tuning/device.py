"""Candidates on the device that TorchTPU owns in this process: run, compare, time.

A TPU can be opened by one process at a time, so candidates run in the one that tunes: what hangs
there hangs it. The journal of the search knows which candidate was running when a process died, and
the next start leaves that one out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpu_kernels import _compat_torch_tpu
from tpu_kernels.backends.torch_tpu import cpu_plugin, detection
from tpu_kernels.compiler.chips import chips
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import compare
from tpu_kernels.tuning.candidates import Candidate, error_row
from tpu_kernels.tuning.report import TuneRow

CLOSE = 1.10
"""Candidates within this factor of the best estimate are measured by ``measure="auto"``."""

_SAMPLE_S = 5e-3  # a sample takes at least this long, so that dispatch of one call does not count
_MOST_CALLS = 50
_ROUGH_SAMPLES = 3
_TOLERANCE = 3e-2  # a TPU multiplies float32 in bfloat16 passes, unless told otherwise


@dataclass(frozen=True)
class Device:
    """The device of TorchTPU in this process.

    Attributes:
        name: What it is.
        chip: The TPU generation; None where it is a CPU in a TPU's place, whose times say nothing.
    """

    name: str
    chip: str | None


def current() -> Device | None:
    """Return the device that TorchTPU owns in this process, None if it owns none.

    Example:
        >>> current() is None
        True
    """
    if not detection.owns_device():
        return None
    if cpu_plugin.active() is not None:
        return Device("TorchTPU on the CPU, by a plug-in", None)
    name = _compat_torch_tpu.device_name()
    return Device(name, _chip_named(name))


def _chip_named(name: str) -> str | None:
    """The chip that a device's name means.

    Example:
        >>> _chip_named("TPU v6e"), _chip_named("TPU v5 lite"), _chip_named("TPU v99")
        ('v6e', 'v5e', None)
    """
    plain = name.strip().lower()
    short = plain.removeprefix("tpu").strip()
    for chip in chips().values():
        if plain == chip.device_kind.lower() or short in (chip.name, *chip.aliases):
            return chip.name
    return None


class DeviceSearch:
    """Candidates of one call on TorchTPU's device.

    The caller's tensors are copied to the device; in-place arguments are restored before results
    are compared, and the caller's own are never written to.

    Args:
        kernel: The kernel.
        arguments: The arguments by name.
        wanted: The reference's outputs, None to compare nothing.
        tolerance: See `compare.difference`.
    """

    def __init__(
        self,
        kernel: Kernel,
        arguments: Mapping[str, Any],
        wanted: Sequence[torch.Tensor] | None,
        tolerance: float | None,
    ) -> None:
        self._kernel = kernel
        self._given = {name: _copied(value) for name, value in arguments.items()}
        self._wanted = wanted
        self._tolerance = tolerance if tolerance is not None else _TOLERANCE
        self._calls: dict[int, int] = {}

    def trial(self, candidate: Candidate) -> TuneRow:
        """Run a candidate once, compare its result, and time it roughly."""
        started = time.monotonic()
        try:
            row = self._judged(candidate)
        except Exception as error:  # whatever a candidate raises is its row
            row = error_row(candidate.config, error, None)
        return replace(row, seconds=time.monotonic() - started)

    def sample(self, candidate: Candidate) -> float:
        """Time a candidate once.

        Returns:
            µs per call: the device's time, or the time of the host to hand a call over where that
            is longer.
        """
        calls = self._calls.get(candidate.index)
        if calls is None:
            once = min(self._time(candidate, 1) for _ in range(2))
            calls = min(_MOST_CALLS, max(1, round(_SAMPLE_S / max(once, 1e-9))))
            self._calls[candidate.index] = calls
        return 1e6 * self._time(candidate, calls)

    def _judged(self, candidate: Candidate) -> TuneRow:
        values = self._fresh()
        with torch.no_grad():
            got = compare.leaves(self._kernel(**{**values, **candidate.config}))
        got += compare.leaves([values[name] for name in self._kernel.spec.mutates_args])
        got = [tensor.cpu() for tensor in got]
        if self._wanted is not None and (
            reason := compare.difference(got, self._wanted, self._tolerance)
        ):
            return TuneRow(candidate.config, "wrong", reason)
        times = [self.sample(candidate) for _ in range(_ROUGH_SAMPLES)]
        return TuneRow(candidate.config, "ok", time_us=statistics.median(times))

    def _time(self, candidate: Candidate, calls: int) -> float:
        values = self._fresh()
        results = []
        torch.accelerator.synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            for _ in range(calls):
                # Kept until the end: what nobody reads need not be computed.
                results.append(self._kernel(**{**values, **candidate.config}))
        torch.accelerator.synchronize()
        return (time.perf_counter() - started) / calls

    def _fresh(self) -> dict[str, Any]:
        """The arguments, with copies of those that a call writes to or takes away."""
        spec = self._kernel.spec
        spent = {*spec.mutates_args, *spec.donate_args}
        return {n: _copied(v) if n in spent else v for n, v in self._given.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(detection.DEVICE, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
