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
    from tpu_kernels.tuning.pallas_model import PallasModel


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
    """The larger of matrix and memory time plus a cost per grid step, from the grid and blocks
    alone."""

    name = "roofline"
    unit = "cycles (roofline)"

    def figure(self, evidence: Evidence) -> float | None:
        """Sum the calls' cycles; None for a program without Pallas calls."""
        if not evidence.models:
            return None
        return sum(model.cycles(evidence.chip) for model in evidence.models)

    def lower_bound(self, evidence: Evidence) -> float | None:
        """The figure itself: it needs no report."""
        return self.figure(evidence)


class BundleCount:
    """Instruction bundles that the compiler emitted, times grid steps, at least the roofline.

    A bundle takes a cycle when nothing stalls; each call's bundles are taken to run once per grid
    step. Code that runs less often (first and last steps, `pl.when`) is counted as if it ran
    always, and inner loops as if they ran once, so figures of kernels with other loops are only
    good for ranking.
    """

    name = "compiler"
    unit = "cycles (bundles x steps)"

    def figure(self, evidence: Evidence) -> float | None:
        """Weigh the report's bundles by the calls' steps; without bundles, the code size does."""
        floor = Roofline().figure(evidence)
        report = evidence.report
        if report is None:
            return floor
        bundles = report.bundles
        if bundles is None and report.code_bytes is not None:
            bundles = report.code_bytes // _BYTES_PER_BUNDLE
        if bundles is None:
            return floor
        if not evidence.models:
            return float(bundles)
        share = bundles / len(evidence.models)
        counted = sum(share * model.steps * model.calls for model in evidence.models)
        return max(counted, floor or 0.0)

    def lower_bound(self, evidence: Evidence) -> float | None:
        """The roofline."""
        return Roofline().figure(evidence)


_BYTES_PER_BUNDLE = 64  # a VLIW instruction word of the TPU takes about this much of the code


def objective(name: str) -> Objective:
    """Return the objective of that name.

    Example:
        >>> objective("cost-model").unit
        'cycles (bundles x steps)'
    """
    return Roofline() if name == "roofline" else BundleCount()
