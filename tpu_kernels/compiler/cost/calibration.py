"""The three numbers per chip that no compiler tells: latency and usable bandwidth of HBM, and one
scale.

They stand in ``calibration.json`` with what they were fitted on. A user with a TPU can make better
ones from two or three measured kernels by `Calibration.refit`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from tpu_kernels.compiler.chips import Chip
from tpu_kernels.compiler.cost.machine import Speed
from tpu_kernels.errors import ArgumentError


@dataclass(frozen=True)
class Calibration:
    """How simulated cycles of a chip relate to measured time.

    Attributes:
        id: Name of the fit.
        fitted: Whether it was fitted on measurements at all.
        hbm_bytes_per_s: Bandwidth of HBM for one TensorCore that the efficiency refers to.
        hbm_latency_cycles: Latency of a copy.
        hbm_efficiency: Usable share of the bandwidth.
        scale: Measured over simulated time.
        points: Number of measurements behind it.
        spread: Standard deviation of the logarithm of measured over predicted; about the relative
            error.
    """

    id: str
    fitted: bool
    hbm_bytes_per_s: float
    hbm_latency_cycles: float
    hbm_efficiency: float
    scale: float
    points: int
    spread: float | None

    def speed(self, chip: Chip) -> Speed:
        """Return the speed of copies in cycles of a chip's clock."""
        usable = self.hbm_bytes_per_s * self.hbm_efficiency
        return Speed(usable / chip.clock_hz, self.hbm_latency_cycles, chip.dma_granule_bytes)

    def microseconds(self, cycles: float, chip: Chip) -> float:
        """Return the time that simulated cycles stand for, in µs."""
        return cycles / chip.clock_hz * 1e6 * self.scale

    def refit(self, pairs: Sequence[tuple[float, float]], name: str) -> Calibration:
        """Fit the scale anew on measurements of one's own.

        Args:
            pairs: Measured and estimated time of each kernel, estimated with this calibration, in
                one unit.
            name: Name of the new fit.

        Returns:
            The calibration with the scale that makes the median of the ratios one.

        Raises:
            ArgumentError: If there is no pair, or a time is not positive.

        Example:
            >>> from tpu_kernels.compiler.chips import chips
            >>> mine = calibration(chips()["v5e"]).refit([(110.0, 100.0), (220.0, 200.0)], "mine")
            >>> round(mine.scale / calibration(chips()["v5e"]).scale, 3)
            1.1
        """
        if not pairs or min(min(pair) for pair in pairs) <= 0:
            raise ArgumentError("a calibration needs pairs of positive times")
        ratios = [math.log(measured / estimated) for measured, estimated in pairs]
        middle = statistics.median(ratios)
        spread = statistics.pstdev(ratios, middle) if len(ratios) > 1 else None
        return dataclasses.replace(
            self,
            id=name,
            fitted=True,
            scale=self.scale * math.exp(middle),
            points=len(pairs),
            spread=spread,
        )


@functools.cache
def _table() -> Mapping[str, Calibration]:
    text = resources.files(__package__).joinpath("calibration.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return {
        name: Calibration(id=data["id"], hbm_bytes_per_s=data["hbm_bytes_per_s"][name], **row)
        for name, row in data["chips"].items()
    }


def calibration(chip: Chip) -> Calibration:
    """Return the calibration that comes with the package.

    Args:
        chip: The chip.

    Returns:
        Its calibration; one that is not fitted for a chip without published times.
    """
    return _table()[chip.name]


@functools.cache
def calibration_digest() -> str:
    """Return a hash of the calibration: stored estimates are out of date when it changes."""
    data = resources.files(__package__).joinpath("calibration.json").read_bytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@functools.cache
def fitted_for() -> str:
    """Return the version of libtpu whose code the calibration was fitted on."""
    text = resources.files(__package__).joinpath("calibration.json").read_text(encoding="utf-8")
    return str(json.loads(text)["libtpu"])
