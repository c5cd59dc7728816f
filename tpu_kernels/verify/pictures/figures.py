"""What the pictures show, as numbers: the same for a page and for PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpu_kernels.compiler import CompileReport
from tpu_kernels.compiler.artifacts import Allocation
from tpu_kernels.compiler.chips import Chip, chips
from tpu_kernels.compiler.cost.figures import PALLAS, KernelEstimate, ModuleEstimate
from tpu_kernels.compiler.cost.timeline import Timeline, step_ends
from tpu_kernels.compiler.pallas_model import PallasModel

LANES = 1024  # elements that one vector instruction works on: 8 sublanes of 128 lanes
UNIT_NAMES = {
    "mxu": "matrix (MXU)",
    "valu": "vector arithmetic (VALU)",
    "eup": "transcendental (EUP)",
    "xlu": "cross-lane (XLU)",
    "vld": "vector load",
    "vst": "vector store",
    "salu": "scalar",
}
"""Units whose use is shown, and what people read for them."""

_ROLES = ("input", "output", "scratch", "spill", "other")
_SHOWN_SHARE = 0.02  # of the time; smaller HLOs are not drawn
_MATRIX_SHARE = 0.01  # of a kernel's cycles on the MXU, from which it counts as a matrix kernel
_SHAPE = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Point:
    """A kernel in a roofline.

    Attributes:
        name: The kernel.
        share: Its share of the program's time.
        intensity: Operations per byte of HBM; infinite for one that moves none.
        ops_per_s: Operations per second attained.
        ceiling: The least of the ceilings at its intensity, in operations per second.
        matrix: Whether the operations are those of the MXU; else those of the vector unit.
    """

    name: str
    share: float
    intensity: float
    ops_per_s: float
    ceiling: float
    matrix: bool


@dataclass(frozen=True)
class Roofline:
    """Ceilings of a chip, and the kernels under them.

    Attributes:
        target: Name of the target.
        matrix_ops_per_s: Peak of the MXU with bf16 operands.
        vector_ops_per_s: Peak of the vector arithmetic unit.
        hbm_bytes_per_s: Nominal bandwidth of HBM.
        points: The kernels that compute anything.
    """

    target: str
    matrix_ops_per_s: float
    vector_ops_per_s: float
    hbm_bytes_per_s: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Segment:
    """A part of VMEM.

    Attributes:
        role: ``"input"``, ``"output"``, ``"scratch"``, ``"spill"`` or ``"other"``.
        name: What it is for.
        shape: Of one buffer; empty if not known.
        buffers: How many.
        bytes: All of them, padding included.
        padding: Bytes of that which hold no element.
    """

    role: str
    name: str
    shape: str
    buffers: int
    bytes: int
    padding: int


@dataclass(frozen=True)
class Memory:
    """How a kernel uses the vector memory of a target.

    Attributes:
        target: Name of the target.
        kernel: The kernel.
        segments: What it is used for.
        limit: What the kernel may use.
        capacity: What the chip has.
        complete: Whether these are the compiler's own figures; else they are a lower bound, of a
            kernel that did not compile.
    """

    target: str
    kernel: str
    segments: tuple[Segment, ...]
    limit: int
    capacity: int
    complete: bool

    @property
    def used(self) -> int:
        """Bytes in use."""
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class Panel:
    """Neighbouring steps of a pipeline, in µs from the kernel's start.

    Attributes:
        start: Where the panel begins.
        end: Where it ends.
        steps: Number and start of each step.
        compute: Spans in which the kernel computes.
        waits: Spans in which it waits for a copy.
        reads: Issue, begin and arrival of each copy from HBM.
        writes: The same of each copy to HBM.
    """

    start: float
    end: float
    steps: tuple[tuple[int, float], ...]
    compute: tuple[tuple[float, float], ...]
    waits: tuple[tuple[float, float], ...]
    reads: tuple[tuple[float, float, float], ...]
    writes: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Pipeline:
    """The first and last steps of a kernel on a target.

    Attributes:
        target: Name of the target.
        kernel: The kernel.
        panels: One, or two with what was left out between them.
        total_steps: Iterations of the whole run.
        us: Its length in µs.
        waiting: Share of the whole run that it waits for copies.
    """

    target: str
    kernel: str
    panels: tuple[Panel, ...]
    total_steps: int
    us: float
    waiting: float


def dearest(estimate: ModuleEstimate) -> list[KernelEstimate]:
    """Return the HLOs that count, the dearest first.

    Args:
        estimate: Estimate of a program.

    Returns:
        Those with at least a fiftieth of its time.
    """
    ranked = sorted(estimate.kernels, key=lambda kernel: -kernel.total_us)
    return [k for k in ranked if k.total_us >= _SHOWN_SHARE * (estimate.us or 0.0)]


def main_kernel(estimate: ModuleEstimate) -> KernelEstimate | None:
    """Return the HLO to show in detail: the dearest Pallas kernel, else the dearest of all."""
    ranked = dearest(estimate)
    return next((kernel for kernel in ranked if kernel.kind in (PALLAS, "")), None) or next(
        iter(ranked), None
    )


def roofline(target: str, estimate: ModuleEstimate) -> Roofline:
    """Place the kernels of a program under the ceilings of its chip.

    Args:
        target: Name of the target.
        estimate: The program's estimate.

    Returns:
        The roofline; kernels that only copy have no point.
    """
    chip = chips()[estimate.chip]
    matrix = chip.peak_ops_per_s["bf16"]
    vector = chip.issue_per_cycle["valu"] * LANES * chip.clock_hz
    points = []
    for kernel in dearest(estimate):
        point = _point(kernel, chip, matrix, vector, estimate.us or math.inf)
        if point is not None:
            points.append(point)
    return Roofline(target, matrix, vector, chip.hbm_bytes_per_s, tuple(points))


def _point(
    kernel: KernelEstimate, chip: Chip, matrix: float, vector: float, total_us: float
) -> Point | None:
    is_matrix = kernel.mxu_busy > _MATRIX_SHARE * kernel.cycles
    if is_matrix:
        peak, ops = matrix, kernel.mxu_busy / chip.clock_hz * matrix
    else:
        peak, ops = vector, float(kernel.units.get("valu", 0) * LANES)
    if not ops or not kernel.us:
        return None
    intensity = ops / kernel.hbm_bytes if kernel.hbm_bytes else math.inf
    ceiling = min(peak, intensity * chip.hbm_bytes_per_s)
    share = kernel.total_us / total_us
    return Point(kernel.name, share, intensity, ops / kernel.us * 1e6, ceiling, is_matrix)


def memory(
    target: str, chip: Chip, report: CompileReport, models: Sequence[PallasModel]
) -> Memory | None:
    """Tell how the main kernel uses VMEM.

    Args:
        target: Name of the target.
        chip: Its chip.
        report: The compiler's report.
        models: Demands of its Pallas calls, worked out before compilation.

    Returns:
        The compiler's figures; where it refused the program, what is known without it; None where
        nothing is.
    """
    kernel = main_kernel(report.estimate) if report.estimate is not None else None
    if kernel is not None:
        stem = kernel.name.rpartition(".")[0] or kernel.name
        ranked = sorted(kernel.allocations, key=lambda each: _ROLES.index(each.role))
        segments = tuple(map(_segment, ranked))
        limit = next((m.vmem_limit for m in models if m.name == stem), None)
        return Memory(
            target,
            kernel.name,
            segments,
            limit or chip.vmem_default_limit_bytes,
            chip.vmem_bytes,
            complete=True,
        )
    if report.ok or not models:
        return None
    model = max(models, key=lambda each: each.vmem_bytes)
    return Memory(
        target,
        model.name,
        tuple(_segments_of(model)),
        model.vmem_limit or chip.vmem_default_limit_bytes,
        chip.vmem_bytes,
        complete=False,
    )


def _segment(allocation: Allocation) -> Segment:
    filled = shape_bytes(allocation.shape)
    padding = 0 if filled is None else max(allocation.bytes - filled * allocation.buffers, 0)
    return Segment(
        allocation.role,
        allocation.name,
        allocation.shape,
        allocation.buffers,
        allocation.bytes,
        padding,
    )


def _segments_of(model: PallasModel) -> Iterator[Segment]:
    for window in model.windows:
        role = "output" if "out" in window.origin else "input"
        shape = f"{window.dtype}[{','.join(map(str, window.shape))}]"
        size = window.bytes * window.buffers
        yield Segment(role, window.origin, shape, window.buffers, size, 0)
    if model.scratch_bytes:
        yield Segment("scratch", "scratch", "", 1, model.scratch_bytes, 0)


def shape_bytes(shape: str) -> int | None:
    """Return the bytes of the elements of a shape as the compiler writes it.

    Args:
        shape: Such as ``"bf16[512,1024]"``.

    Returns:
        The bytes, None if the shape is not of that form.

    Example:
        >>> shape_bytes("bf16[512,1024]"), shape_bytes("pred[8]"), shape_bytes("f8e4m3fn[4,4]")
        (1048576, 8, 16)
    """
    found = _SHAPE.fullmatch(shape)
    if found is None:
        return None
    bits = int(found[2] or 8)
    return math.prod(int(size) for size in found[3].split(",") if size) * bits // 8


def pipeline(target: str, estimate: ModuleEstimate) -> Pipeline | None:
    """Lay out the first and last steps of the main kernel in time.

    Args:
        target: Name of the target.
        estimate: The program's estimate.

    Returns:
        The steps; None if the kernel does not loop.
    """
    kernel = main_kernel(estimate)
    if kernel is None or kernel.timeline is None or not kernel.cycles:
        return None
    timeline, scale = kernel.timeline, kernel.us / kernel.cycles
    panels = tuple(_panel(timeline, first, last, scale) for first, last in _runs(timeline))
    waiting = kernel.dma_stall / kernel.cycles
    return Pipeline(target, kernel.name, panels, timeline.total_steps, kernel.us, waiting)


def _runs(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Index of the first and the last of neighbouring steps."""
    ends = step_ends(timeline)
    first = 0
    for index, (number, _) in enumerate(timeline.steps):
        last = index + 1 == len(ends)
        if last or timeline.steps[index + 1][0] != number + 1:
            # Where the last step before a gap ends is not known: it is left out.
            until = index - 1 if math.isnan(ends[index]) else index
            if until >= first:
                yield first, until
            first = index + 1


def _panel(timeline: Timeline, first: int, last: int, scale: float) -> Panel:
    # The first step of a run includes what comes before the loop, the last what comes after it.
    start = 0.0 if first == 0 else timeline.steps[first][1]
    end = step_ends(timeline)[last]
    waits = tuple(_clipped(timeline.waits, start, end, scale))
    copies: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for copy in timeline.transfers:
        source, _, destination = copy.direction.partition("->")
        if "hbm" in (source, destination) and copy.issued < end and copy.arrives > start:
            times = (copy.issued, copy.begins, copy.arrives)
            a, b, c = (min(max(at, start), end) * scale for at in times)
            copies[source == "hbm"].append((a, b, c))
    return Panel(
        start * scale,
        end * scale,
        tuple((number, at * scale) for number, at in timeline.steps[first : last + 1]),
        tuple(_between(waits, start * scale, end * scale)),
        waits,
        tuple(copies[True]),
        tuple(copies[False]),
    )


def _clipped(
    spans: Sequence[tuple[float, float]], start: float, end: float, scale: float
) -> Iterator[tuple[float, float]]:
    for since, until in spans:
        if until > start and since < end:
            yield max(since, start) * scale, min(until, end) * scale


def _between(
    waits: Sequence[tuple[float, float]], start: float, end: float
) -> Iterator[tuple[float, float]]:
    at = start
    for since, until in waits:
        if since > at:
            yield at, since
        at = max(at, until)
    if end > at:
        yield at, end


def utilization(estimates: Mapping[str, ModuleEstimate]) -> dict[str, dict[str, float]]:
    """Return the share of each unit's capacity that the main kernel's hottest block uses.

    Args:
        estimates: Estimate by target.

    Returns:
        Share by target, by unit.
    """
    table: dict[str, dict[str, float]] = {unit: {} for unit in UNIT_NAMES}
    for target, estimate in estimates.items():
        kernel = main_kernel(estimate)
        if kernel is None:
            continue
        for unit, row in table.items():
            if unit in kernel.utilization:
                row[target] = kernel.utilization[unit]
    return table
