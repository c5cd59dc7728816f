"""What candidates are ranked by when there is no device: figures from the compiler and from the
grid.

`Objective` is the seam: a better model of time takes the same evidence and gives a better figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tpu_kernels.compiler.chips import Chip
from tpu_kernels.compiler.report import CompileReport

if TYPE_CHECKING:
    from tpu_kernels.compiler.pallas_model import PallasModel


@dataclass(frozen=True)
class Evidence:
    """What is known of a candidate that compiles.

    Attributes:
        chip: The TPU generation.
        models: The demands of its Pallas calls.
        report: The compiler's report; None before compiling, or without a compiler.
    """

    chip: Chip
    models: Sequence[PallasModel]
    report: CompileReport | None = None


class Objective(Protocol):
    """A figure to rank candidates by; smaller is better.

    Attributes:
        name: For reports and records.
        unit: What the figure counts.
    """

    name: str
    unit: str

    def figure(self, evidence: Evidence) -> float | None:
        """The figure of a candidate, None where the evidence gives none."""
        ...

    def lower_bound(self, evidence: Evidence) -> float | None:
        """What the figure cannot be below, from evidence without a report; None if unknown."""
        ...


class Roofline:
    """The larger of matrix and memory time plus a cost per step: grid and blocks alone."""

    name = "roofline"
    unit = "µs (roofline)"

    def figure(self, evidence: Evidence) -> float | None:
        """Sum the calls' times in µs; None for a program without Pallas calls."""
        if not evidence.models:
            return None
        cycles = sum(model.cycles(evidence.chip) for model in evidence.models)
        return 1e6 * cycles / evidence.chip.clock_hz

    def lower_bound(self, evidence: Evidence) -> float | None:
        """The figure itself: it needs no report."""
        return self.figure(evidence)


class CostModel:
    """The estimated time in µs: the compiler's instructions, simulated with its memory traffic.

    Where the compiler's listing gives no estimate, the instruction bundles times the grid steps
    stand in, at least the roofline: each call's bundles are taken to run once per step, a cycle
    each.
    """

    name = "compiler"
    unit = "µs (estimated)"

    def figure(self, evidence: Evidence) -> float | None:
        """Take the report's estimate, or weigh its bundles by the calls' steps."""
        report = evidence.report
        if report is not None and report.estimate is not None and report.estimate.us is not None:
            return report.estimate.us
        floor = Roofline().figure(evidence)
        if report is None or report.bundles is None:
            return floor
        if not evidence.models:
            return 1e6 * report.bundles / evidence.chip.clock_hz
        share = report.bundles / len(evidence.models)
        cycles = sum(share * model.steps * model.calls for model in evidence.models)
        return max(1e6 * cycles / evidence.chip.clock_hz, floor or 0.0)

    def lower_bound(self, evidence: Evidence) -> float | None:
        """Matrix and memory time at the chip's peaks, less a margin for the model's calibration."""
        if not evidence.models:
            return None
        seconds = sum(model.floor_s(evidence.chip) for model in evidence.models)
        return _MARGIN * 1e6 * seconds


_MARGIN = 0.95


def objective(name: str) -> Objective:
    """Return the objective of that name.

    Example:
        >>> objective("cost-model").unit
        'µs (estimated)'
    """
    return Roofline() if name == "roofline" else CostModel()
