"""What the estimate of a program tells: figures by kernel, and for the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_kernels.compiler.artifacts import Allocation
from tpu_kernels.compiler.cost.timeline import Timeline

PALLAS, XLA, COPIES = "pallas", "xla", "copies"
KINDS = {PALLAS: "Pallas kernels", XLA: "XLA", COPIES: "copies between them"}
"""Kinds of HLOs, and what people read for them."""

_NO_ROOFLINE = 0.01  # share from which it makes sense to speak of matrix operations and of bytes


@dataclass(frozen=True)
class KernelEstimate:
    """Estimated cost of one HLO: a Pallas kernel, or a fusion or copy of XLA's.

    Attributes:
        name: The HLO's name.
        count: How often the program runs it.
        us: Time of one run in µs.
        cycles: Simulated cycles of one run, before calibration.
        bundles: Bundles issued.
        static_bundles: Bundles in the code.
        mxu_busy: Cycles that the busiest matrix unit works.
        mxu_stall: Cycles by which it exceeds the bundles.
        dma_stall: Cycles spent in waiting for copies.
        hbm_bytes: Bytes moved to or from HBM.
        hbm_busy: Cycles that HBM moves them.
        copied: Bytes by direction.
        units: Instructions executed, by unit.
        utilization: Share of each unit's capacity that the hottest block uses.
        spills: Vector registers stored for want of registers.
        fills: Vector registers loaded back.
        vmem_bytes: Vector memory that it allocates, where the compiler tells.
        bound: ``"mxu"``, ``"hbm"``, ``"latency"`` (it waits for copies while HBM is mostly idle) or
            ``"issue"`` (instructions other than the matrix ones).
        roofline_us: Time that its matrix operations or its bytes need at least.
        warnings: What had to be guessed, counted.
        kind: One of `KINDS`: a Pallas kernel, what XLA made, or its copies between them; ``""``
            where the compiler does not tell.
        op_name: Where it comes from in the traced function, such as ``"jit(f)/tanh"``.
        allocations: What its vector memory is for.
        timeline: Copies and waits of its first and last steps.
    """

    name: str
    count: int
    us: float
    cycles: float
    bundles: int
    static_bundles: int
    mxu_busy: int
    mxu_stall: int
    dma_stall: float
    hbm_bytes: int
    hbm_busy: float
    copied: Mapping[str, int]
    units: Mapping[str, int]
    utilization: Mapping[str, float]
    spills: int
    fills: int
    vmem_bytes: int | None
    bound: str
    roofline_us: float
    warnings: Mapping[str, int] = field(default_factory=dict)
    kind: str = ""
    op_name: str = ""
    allocations: tuple[Allocation, ...] = ()
    timeline: Timeline | None = None

    @property
    def total_us(self) -> float:
        """Time of all runs in µs."""
        return self.us * self.count

    @property
    def efficiency(self) -> float:
        """Share of the roofline that it reaches, at most 1."""
        return min(self.roofline_us / self.us, 1.0) if self.us else 0.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelEstimate:
        """Make an estimate of what `dataclasses.asdict` returned."""
        fields = dict(data)
        fields["allocations"] = tuple(Allocation(**row) for row in data.get("allocations", ()))
        if data.get("timeline") is not None:
            fields["timeline"] = Timeline.from_dict(data["timeline"])
        return cls(**fields)


@dataclass(frozen=True)
class ModuleEstimate:
    """Estimated cost of a program.

    Attributes:
        us: Time in µs, None where there is no listing to tell it from.
        at_least_us: Lower bound in µs: what the matrix operations and the bytes moved need. Good
            for ranking where there is nothing better.
        kernels: Its HLOs.
        chip: The chip.
        confidence: ``"simulated"``; ``"approximate"`` where something had to be guessed or the chip
            has no calibration; ``"roofline"`` where only a lower bound is known; ``"none"``.
        calibration: Name of the calibration.
        libtpu_version: Version of the compiler that made the code.
        warnings: What to know before believing it.
        unknown: HLOs that the program runs and whose time is not known.
    """

    us: float | None
    at_least_us: float | None
    kernels: tuple[KernelEstimate, ...]
    chip: str
    confidence: str
    calibration: str
    libtpu_version: str | None
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        """The time in µs by kind of HLO: see `KINDS`; absent ones are left out."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            found[kernel.kind] = found.get(kernel.kind, 0.0) + kernel.total_us
        return found

    @property
    def guessed_us(self) -> float:
        """The part of the time, in µs, in which something had to be guessed."""
        return sum(kernel.total_us for kernel in self.kernels if kernel.warnings)

    @property
    def text(self) -> str:
        """The estimate for people, the dearest kernel first."""
        if self.us is None:
            notes = "".join(f"\n  note: {warning}" for warning in self.warnings)
            return f"no estimated time on {self.chip} ({self.confidence}){notes}"
        lines = [
            f"estimated {self.us:.1f} µs on {self.chip} ({self.confidence}, {self.calibration})"
        ]
        if len(self.parts) > 1 and self.us:
            shares = [
                f"{KINDS.get(kind, 'not told apart')} {us / self.us:.0%}"
                for kind, us in sorted(self.parts.items(), key=lambda part: -part[1])
            ]
            lines.append(f"  of that {', '.join(shares)}")
        for kernel in sorted(self.kernels, key=lambda kernel: -kernel.total_us):
            times = f" x {kernel.count}" if kernel.count != 1 else ""
            line = f"  {kernel.name}: {kernel.us:.1f} µs{times}, bound by {kernel.bound}"
            if kernel.roofline_us > _NO_ROOFLINE * kernel.us:
                line += f", {kernel.efficiency:.0%} of the roofline"
            lines.append(line)
        if self.unknown:
            lines.append(f"  of unknown time: {', '.join(self.unknown)}")
        lines.extend(f"  note: {warning}" for warning in self.warnings)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModuleEstimate:
        """Make an estimate of what `to_dict` returned."""
        fields = dict(data)
        fields["kernels"] = tuple(map(KernelEstimate.from_dict, data["kernels"]))
        fields["warnings"] = tuple(data["warnings"])
        fields["unknown"] = tuple(data.get("unknown", ()))
        return cls(**fields)

    def __str__(self) -> str:
        return self.text
