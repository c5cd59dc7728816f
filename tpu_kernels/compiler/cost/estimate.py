"""From the compiler's dump to an estimate: the time of each kernel, and what bounds it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tpu_kernels.compiler import artifacts
from tpu_kernels.compiler.chips import Chip
from tpu_kernels.compiler.cost.calibration import Calibration, calibration, fitted_for
from tpu_kernels.compiler.cost.listing import FormatError, Listing, parse
from tpu_kernels.compiler.cost.machine import UNKNOWN_LOOP
from tpu_kernels.compiler.cost.scalars import KernelScalars, choose
from tpu_kernels.compiler.cost.simulate import Simulation, simulate

_STALLED = 0.15  # share of the time from which waiting for HBM is what bounds a kernel
_MXU_BUSY = 0.8
_LAUNCH_US = 100.0  # below this, what a launch costs on the host matters more than the kernel
_DEDUPLICATED = re.compile(r"equivalent_hlos\[size=(\d+)\]")
COPIES = "copies between kernels"


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
        bound: ``"mxu"``, ``"hbm"`` or ``"issue"`` (instructions other than the matrix ones).
        roofline_us: Time that its matrix operations or its bytes need at least.
        warnings: What had to be guessed, counted.
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

    @property
    def efficiency(self) -> float:
        """Share of the roofline that it reaches, at most 1."""
        return min(self.roofline_us / self.us, 1.0) if self.us else 0.0


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
    """

    us: float | None
    at_least_us: float | None
    kernels: tuple[KernelEstimate, ...]
    chip: str
    confidence: str
    calibration: str
    libtpu_version: str | None
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The estimate for people, the dearest kernel first."""
        if self.us is None:
            notes = "".join(f"\n  note: {warning}" for warning in self.warnings)
            return f"no estimated time on {self.chip} ({self.confidence}){notes}"
        lines = [
            f"estimated {self.us:.1f} µs on {self.chip} ({self.confidence}, {self.calibration})"
        ]
        for kernel in sorted(self.kernels, key=lambda kernel: -kernel.us * kernel.count):
            times = f" x {kernel.count}" if kernel.count != 1 else ""
            lines.append(
                f"  {kernel.name}: {kernel.us:.1f} µs{times}, bound by {kernel.bound}, "
                f"{kernel.efficiency:.0%} of the roofline"
            )
        lines.extend(f"  note: {warning}" for warning in self.warnings)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModuleEstimate:
        """Make an estimate of what `to_dict` returned."""
        fields = dict(data)
        fields["kernels"] = tuple(KernelEstimate(**kernel) for kernel in data["kernels"])
        fields["warnings"] = tuple(data["warnings"])
        return cls(**fields)

    def __str__(self) -> str:
        return self.text


def estimate(
    files: Sequence[Path],
    chip: Chip,
    *,
    scalars: Sequence[KernelScalars] = (),
    libtpu_version: str | None = None,
    fit: Calibration | None = None,
    limit_s: float = 60.0,
    hbm_bytes: int | None = None,
) -> ModuleEstimate:
    """Estimate a program from the files that its compilation left.

    Args:
        files: Dumped files of one compilation.
        chip: What it was compiled for.
        scalars: Integer operands of its Pallas kernels, where they steer them.
        libtpu_version: Version of the compiler.
        fit: Calibration to use instead of the package's own.
        limit_s: Seconds that the simulation of one HLO may take.
        hbm_bytes: Arguments and outputs of the program, for a lower bound where the dump has no
            listing of a known form; the confidence is ``"roofline"`` then.

    Returns:
        The estimate; ``us`` is None and the confidence ``"none"`` if the dump has no listing of a
        known form.
    """
    fit = fit or calibration(chip)
    listings: dict[str, Listing] = {}
    notes: list[str] = []
    texts = artifacts.bundle_texts(files)
    for name, path in texts.items():
        try:
            listings[name] = parse(path.read_text(encoding="utf-8", errors="replace"))
        except FormatError as error:
            notes.append(f"{name}: {error}")
    if not listings or len(listings) < len(texts):
        bound = None if hbm_bytes is None else hbm_bytes / chip.hbm_bytes_per_s * 1e6
        confidence = "none" if bound is None else "roofline"
        return ModuleEstimate(
            None, bound, (), chip.name, confidence, fit.id, libtpu_version, tuple(notes)
        )
    run = _Runner(chip, fit, limit_s)
    counts, top = _counts(files, run)
    memory = _vmem(files)
    waiting = list(scalars)
    kernels = []
    for name, listing in listings.items():
        found = run(listing, choose(listing, waiting))
        kernels.append(run.kernel(name, counts.get(name, 1), found, memory.get(name)))
    if top is not None and top.dma_stall > 0:
        kernels.append(_copies(run, top))
    total = sum(kernel.us * kernel.count for kernel in kernels)
    least = sum(kernel.roofline_us * kernel.count for kernel in kernels)
    guessed = any(kernel.warnings for kernel in kernels)
    if not fit.fitted:
        notes.append(f"there are no published times for {chip.name} to calibrate with")
    if libtpu_version not in (None, fitted_for()):
        notes.append(f"calibrated with libtpu {fitted_for()}, compiled with {libtpu_version}")
    if total < _LAUNCH_US:
        notes.append("under 100 µs the launch, which is not included, may cost more")
    confidence = "approximate" if guessed or not fit.fitted else "simulated"
    return ModuleEstimate(
        total, least, tuple(kernels), chip.name, confidence, fit.id, libtpu_version, tuple(notes)
    )


class _Runner:
    """Simulates listings for one chip with one calibration."""

    def __init__(self, chip: Chip, fit: Calibration, limit_s: float) -> None:
        self.chip, self.fit, self.limit_s = chip, fit, limit_s

    def __call__(
        self, listing: Listing, scalars: Mapping[int, np.ndarray] | None = None
    ) -> Simulation:
        return simulate(
            listing,
            self.fit.speed(self.chip),
            delay_slots=self.chip.branch_delay_slots,
            vmatmul_cycles=self.chip.cycles_per_vmatmul,
            scalars=scalars,
            limit_s=self.limit_s,
        )

    def kernel(
        self, name: str, count: int, found: Simulation, vmem_bytes: int | None
    ) -> KernelEstimate:
        clock, bandwidth = self.chip.clock_hz, self.chip.hbm_bytes_per_s
        return KernelEstimate(
            name=name,
            count=count,
            us=self.fit.microseconds(found.cycles, self.chip),
            cycles=found.cycles,
            bundles=found.bundles,
            static_bundles=found.static_bundles,
            mxu_busy=found.mxu_busy,
            mxu_stall=found.mxu_excess,
            dma_stall=found.dma_stall,
            hbm_bytes=found.hbm_bytes,
            hbm_busy=found.hbm_busy,
            copied=found.copied,
            units=found.counts,
            utilization=self._utilization(found),
            spills=found.counts.get("spill", 0),
            fills=found.counts.get("fill", 0),
            vmem_bytes=vmem_bytes,
            bound=_bound(found),
            roofline_us=max(found.mxu_busy / clock, found.hbm_bytes / bandwidth) * 1e6,
            warnings=found.warnings,
        )

    def _utilization(self, found: Simulation) -> dict[str, float]:
        block = found.hottest
        shares = {"mxu": block.mxu_busy / block.cycles}
        for unit, per_cycle in self.chip.issue_per_cycle.items():
            shares[unit] = min(block.counts[unit] / (per_cycle * block.cycles), 1.0)
        return shares


def _bound(found: Simulation) -> str:
    if found.dma_stall > _STALLED * found.cycles:
        return "hbm"
    if found.mxu_excess > _STALLED * found.cycles or found.mxu_busy > _MXU_BUSY * found.cycles:
        return "mxu"
    return "issue"


def _counts(files: Sequence[Path], run: _Runner) -> tuple[dict[str, int], Simulation | None]:
    """How often each HLO runs: as the top-level program calls it, else as code is shared."""
    shared: dict[str, int] = {}
    representative: dict[str, str] = {}
    top = None
    for file in files:
        if file.name.endswith("deduplication-map.txt"):
            key = ""
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("key:"):
                    key = line.removeprefix("key:")
                elif match := _DEDUPLICATED.match(line):
                    shared[key] = max(int(match[1]), 1)
                elif line.startswith("  "):
                    representative[line.strip()] = key
        elif artifacts.is_top_level(file):
            try:
                top = run(parse(file.read_text(encoding="utf-8", errors="replace")))
            except FormatError:
                top = None  # the kernels' own listings count; only loops around them go unseen
    if top is None or UNKNOWN_LOOP in top.warnings or not top.calls:
        return shared, None
    calls: dict[str, int] = {}
    for name, times in top.calls.items():
        owner = representative.get(name, name)
        calls[owner] = calls.get(owner, 0) + times
    return {**shared, **calls}, top


def _copies(run: _Runner, top: Simulation) -> KernelEstimate:
    """What the top-level program itself waits for: operands that XLA moves to VMEM and back."""
    return dataclasses.replace(
        run.kernel(COPIES, 1, top, None),
        us=run.fit.microseconds(top.dma_stall, run.chip),
        cycles=top.dma_stall,
        bound="hbm",
        roofline_us=top.hbm_bytes / run.chip.hbm_bytes_per_s * 1e6,
        warnings={},
    )


def _vmem(files: Sequence[Path]) -> dict[str, int]:
    for file in files:
        if file.name.endswith("vmem_report.html"):
            return artifacts.vmem_by_kernel(file.read_text(encoding="utf-8", errors="replace"))
    return {}
