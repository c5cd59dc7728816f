"""From the compiler's dump to an estimate: the time of each kernel, and what bounds it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tpu_kernels.compiler import artifacts
from tpu_kernels.compiler.chips import Chip
from tpu_kernels.compiler.cost.calibration import Calibration, calibration, fitted_for
from tpu_kernels.compiler.cost.figures import COPIES, PALLAS, XLA, KernelEstimate, ModuleEstimate
from tpu_kernels.compiler.cost.listing import FormatError, Listing, parse
from tpu_kernels.compiler.cost.machine import UNKNOWN_LOOP, CallCost
from tpu_kernels.compiler.cost.scalars import KernelScalars, choose
from tpu_kernels.compiler.cost.simulate import Simulation, simulate

_STALLED = 0.15  # share of the time from which waiting for HBM is what bounds a kernel
_HBM_BUSY = 0.5  # below this, waiting is for the latency of copies and not for their bytes
_MXU_BUSY = 0.8
_LAUNCH_US = 100.0  # below this, what a launch costs on the host matters more than the kernel
_DEDUPLICATED = re.compile(r"equivalent_hlos\[size=(\d+)\]")
COPIES_NAME = "copies between kernels"
_MOSAIC = "tpu_custom_call"
_TIMELINE = 0.02  # share of the time from which a kernel's own is kept


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
            listings[name] = parse(_read(path))
        except FormatError as error:
            notes.append(f"{name}: {error}")
    if not listings or len(listings) < len(texts):
        bound = None if hbm_bytes is None else hbm_bytes / chip.hbm_bytes_per_s * 1e6
        confidence = "none" if bound is None else "roofline"
        return ModuleEstimate(
            None, bound, (), chip.name, confidence, fit.id, libtpu_version, tuple(notes)
        )
    run = _Runner(chip, fit, limit_s)
    waiting = list(scalars)
    runs = {name: run(listing, choose(listing, waiting)) for name, listing in listings.items()}
    sharing = _Sharing(files)
    top = _top_level(files, run, sharing, runs)
    counts = sharing.counts(top)
    about = _About(files)
    kernels = [about(run.kernel(name, counts.get(name, 1), each)) for name, each in runs.items()]
    if top is not None and top.dma_stall > 0:
        kernels.append(_copies(run, top))
    total = sum(kernel.total_us for kernel in kernels)
    kernels = [_shortened(kernel, total) for kernel in kernels]
    least = sum(kernel.roofline_us * kernel.count for kernel in kernels)
    unknown = () if top is None else _unknown(counts, listings)
    guessed = any(kernel.warnings for kernel in kernels)
    if not fit.fitted:
        notes.append(f"there are no published times for {chip.name} to calibrate with")
    if libtpu_version not in (None, fitted_for()):
        notes.append(f"calibrated with libtpu {fitted_for()}, compiled with {libtpu_version}")
    if total < _LAUNCH_US:
        notes.append("under 100 µs the launch, which is not included, may cost more")
    if unknown:
        notes.append("the time of what is unknown is not included")
    sure = fit.fitted and not guessed and not unknown
    return ModuleEstimate(
        us=total,
        at_least_us=least,
        kernels=tuple(kernels),
        chip=chip.name,
        confidence="simulated" if sure else "approximate",
        calibration=fit.id,
        libtpu_version=libtpu_version,
        warnings=tuple(notes),
        unknown=unknown,
    )


def _unknown(counts: Mapping[str, int], listings: Mapping[str, Listing]) -> tuple[str, ...]:
    """What the program calls and has left no listing, the start and end of every program aside."""
    missing = {name for name in counts if name not in listings}
    return tuple(sorted(missing - {"", *artifacts.RUNTIME}))


class _Runner:
    """Simulates listings for one chip with one calibration."""

    def __init__(self, chip: Chip, fit: Calibration, limit_s: float) -> None:
        self.chip, self.fit, self.limit_s = chip, fit, limit_s

    def __call__(
        self,
        listing: Listing,
        scalars: Mapping[int, np.ndarray] | None = None,
        calls: Mapping[str, CallCost] | None = None,
    ) -> Simulation:
        return simulate(
            listing,
            self.fit.speed(self.chip),
            delay_slots=(self.chip.branch_delay_slots, self.chip.most_delay_slots),
            vmatmul_cycles=self.chip.cycles_per_vmatmul,
            scalars=scalars,
            calls=calls,
            limit_s=self.limit_s,
        )

    def kernel(self, name: str, count: int, found: Simulation) -> KernelEstimate:
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
            vmem_bytes=None,
            bound=_bound(found),
            roofline_us=max(found.mxu_busy / clock, found.hbm_bytes / bandwidth) * 1e6,
            warnings=found.warnings,
            timeline=found.timeline,
        )

    def _utilization(self, found: Simulation) -> dict[str, float]:
        block = found.hottest
        shares = {"mxu": block.mxu_busy / block.cycles}
        for unit, per_cycle in self.chip.issue_per_cycle.items():
            shares[unit] = min(block.counts[unit] / (per_cycle * block.cycles), 1.0)
        return shares


def _bound(found: Simulation) -> str:
    if found.dma_stall > _STALLED * found.cycles:
        return "hbm" if found.hbm_busy > _HBM_BUSY * found.cycles else "latency"
    if found.mxu_excess > _STALLED * found.cycles or found.mxu_busy > _MXU_BUSY * found.cycles:
        return "mxu"
    return "issue"


class _Sharing:
    """Which HLOs share code, by libtpu's map of equal ones.

    Args:
        files: Dumped files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._shared: dict[str, int] = {}
        self._owner: dict[str, str] = {}
        for file in files:
            if not file.name.endswith("deduplication-map.txt"):
                continue
            key = ""
            for line in _read(file).splitlines():
                if line.startswith("key:"):
                    key = line.removeprefix("key:")
                elif match := _DEDUPLICATED.match(line):
                    self._shared[key] = max(int(match[1]), 1)
                elif line.startswith("  "):
                    self._owner[line.strip()] = key

    def owner(self, name: str) -> str:
        """The HLO whose code another one runs."""
        return self._owner.get(name, name)

    def names(self, owner: str) -> list[str]:
        """All HLOs that run the code of one."""
        return [owner, *(name for name, other in self._owner.items() if other == owner)]

    def counts(self, top: Simulation | None) -> dict[str, int]:
        """How often each HLO runs: as the top-level program calls it, else as code is shared."""
        if top is None:
            return self._shared
        calls: dict[str, int] = {}
        for name, times in top.calls.items():
            calls[self.owner(name)] = calls.get(self.owner(name), 0) + times
        return calls


def _top_level(
    files: Sequence[Path], run: _Runner, sharing: _Sharing, runs: Mapping[str, Simulation]
) -> Simulation | None:
    """Run the program that calls the HLOs, which copies while they run."""
    listing = next((file for file in files if artifacts.is_top_level(file)), None)
    if listing is None:
        return None
    costs = {
        name: CallCost(found.cycles, found.hbm_busy)
        for owner, found in runs.items()
        for name in sharing.names(owner)
    }
    try:
        top = run(parse(_read(listing)), calls=costs)
    except FormatError:
        return None  # the kernels' own listings count; only loops around them go unseen
    return None if UNKNOWN_LOOP in top.warnings or not top.calls else top


def _copies(run: _Runner, top: Simulation) -> KernelEstimate:
    """What the top-level program itself waits for: operands that XLA moves to VMEM and back."""
    return dataclasses.replace(
        run.kernel(COPIES_NAME, 1, top),
        us=run.fit.microseconds(top.dma_stall, run.chip),
        cycles=top.dma_stall,
        bound="hbm",
        roofline_us=top.hbm_bytes / run.chip.hbm_bytes_per_s * 1e6,
        warnings={},
        kind=COPIES,
        timeline=None,
    )


class _About:
    """What the compiler tells of an HLO besides its code.

    Args:
        files: Dumped files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._memory: dict[str, tuple[int, tuple[artifacts.Allocation, ...]]] = {}
        self._hlo: dict[str, artifacts.HloFacts] = {}
        for file in files:
            if file.name.endswith("vmem_report.html"):
                self._memory = artifacts.vmem_allocations(_read(file))
            elif file.name.endswith("TLP-hlo.txt"):
                self._hlo = artifacts.hlo_facts(_read(file))

    def __call__(self, kernel: KernelEstimate) -> KernelEstimate:
        """Add it to a kernel's figures."""
        total, allocations = self._memory.get(kernel.name, (None, ()))
        facts = self._hlo.get(kernel.name)
        kind = "" if facts is None else PALLAS if facts.target == _MOSAIC else XLA
        return dataclasses.replace(
            kernel,
            kind=kind,
            op_name="" if facts is None else facts.op_name,
            vmem_bytes=total,
            allocations=allocations,
        )


def _shortened(kernel: KernelEstimate, total_us: float) -> KernelEstimate:
    """Drop the timeline of what hardly counts: reports are kept on disk."""
    if kernel.total_us >= _TIMELINE * total_us:
        return kernel
    return dataclasses.replace(kernel, timeline=None)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
