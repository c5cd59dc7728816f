"""The charts of a page: roofline, vector memory, pipeline, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tpu_kernels.compiler.cost.figures import KINDS
from tpu_kernels.compiler.report import mib
from tpu_kernels.verify.pictures.figures import Memory, Panel, Pipeline, Roofline
from tpu_kernels.verify.pictures.svg import Drawing, LogScale, round_ticks, si

_MIB = 1 << 20
_SPAN = tuple[float, float, float]


def roofline_chart(roofline: Roofline) -> str:
    """Draw the ceilings of one chip and the kernels under them.

    Args:
        roofline: What to draw.

    Returns:
        An SVG element.
    """
    width, height, left, right, top, bottom = 380.0, 270.0, 52.0, 12.0, 30.0, 42.0
    ridge = roofline.matrix_ops_per_s / roofline.hbm_bytes_per_s
    finite = [p.intensity for p in roofline.points if math.isfinite(p.intensity)]
    x = LogScale(
        min([0.1, *(0.5 * i for i in finite)]),
        max([ridge * 30, *(3 * i for i in finite)]),
        left,
        width - right,
    )
    lowest = min([roofline.vector_ops_per_s / 100, *(p.ops_per_s / 3 for p in roofline.points)])
    y = LogScale(lowest, roofline.matrix_ops_per_s * 1.6, height - bottom, top)
    drawing = Drawing(
        width,
        height,
        f"Roofline of {roofline.target}",
        "; ".join(
            f"{p.name}: {si(p.ops_per_s, 'op/s')}, {p.ops_per_s / p.ceiling:.0%} of its ceiling"
            for p in roofline.points
        )
        or "No kernel with arithmetic",
    )
    drawing.text(left, 18, roofline.target, "strong")
    for power in x.decades():
        drawing.line([(x(10.0**power), top), (x(10.0**power), height - bottom)], "grid")
        drawing.text(x(10.0**power), height - bottom + 15, _power(power), "tick", "middle")
    for power in y.decades():
        at = y(10.0**power)
        drawing.line([(left, at), (width - right, at)], "grid")
        drawing.text(left - 5, at + 4, si(10.0**power, ""), "tick", "end")
    drawing.text((left + width - right) / 2, height - 6, "operations per byte of HBM", "", "middle")
    drawing.text(left - 46, 18, "op/s", "tick")
    x_low, x_high = x.limits
    matrix, vector = roofline.matrix_ops_per_s, roofline.vector_ops_per_s
    bandwidth = roofline.hbm_bytes_per_s
    drawing.line([(x(ridge), y(matrix)), (x(x_high), y(matrix))], "roof")
    drawing.text(x(ridge) - 8, y(matrix) + 4, f"MXU, bf16 {si(matrix, 'op/s')}", "note", "end")
    drawing.line([(x(vector / bandwidth), y(vector)), (x(x_high), y(vector))], "roof thin")
    drawing.text(width - right, y(vector) - 5, f"vector unit {si(vector, 'op/s')}", "note", "end")
    start = max(x_low, lowest / bandwidth)
    drawing.line([(x(start), y(start * bandwidth)), (x(ridge), y(matrix))], "roof")
    middle = (vector / bandwidth * ridge) ** 0.5
    drawing.text(
        x(middle) - 8, y(middle * bandwidth) + 2, f"HBM {si(bandwidth, 'B/s')}", "note", "end"
    )
    for number, point in enumerate(roofline.points, 1):
        px = x(point.intensity) if math.isfinite(point.intensity) else width - right - 8
        py, ceiling = y(point.ops_per_s), y(point.ceiling)
        drawing.line([(px, py), (px, ceiling)], "gap")
        radius = 5 + 4 * point.share
        kind = "point" if math.isfinite(point.intensity) else "point free"
        title = f"{point.name}: {si(point.ops_per_s, 'op/s')}, ceiling {si(point.ceiling, 'op/s')}"
        drawing.circle(px, py, radius, kind, title)
        if len(roofline.points) > 1:
            drawing.text(px + radius + 3, py + 4, str(number), "note")
    return str(drawing)


def memory_chart(memories: Sequence[Memory]) -> str:
    """Draw what the vector memory of each target is used for.

    Args:
        memories: One for each target.

    Returns:
        An SVG element.
    """
    width, left, right, row, bar = 760.0, 8.0, 16.0, 58.0, 24.0
    height = row * len(memories) + 30
    most = max(max(each.limit, each.used) for each in memories)
    scale = (width - left - right) / most
    words = "; ".join(f"{m.target}: {mib(m.used)} of {mib(m.limit)}" for m in memories)
    drawing = Drawing(width, height, "Vector memory by target", words)
    bottom = row * len(memories)
    for tick in round_ticks(0.0, most / _MIB, 8):
        at = left + tick * _MIB * scale
        drawing.line([(at, 8), (at, bottom)], "grid")
        drawing.text(at, bottom + 16, f"{tick:g} MiB", "tick", "start" if tick == 0 else "middle")
    for index, each in enumerate(memories):
        y = index * row + 24
        least = "" if each.complete else "at least "
        drawing.text(left, y - 6, each.target, "strong")
        share = f"{least}{mib(each.used)} of {mib(each.limit)} ({each.used / each.limit:.0%})"
        over = each.used > each.limit
        drawing.text(left + 62, y - 6, f"{share}: does not fit" if over else share, "note")
        drawing.rect(left, y, each.limit * scale, bar, "track")
        at = left
        for segment in each.segments:
            for buffer in range(segment.buffers):
                size = segment.bytes / segment.buffers * scale
                part = f", buffer {buffer + 1} of {segment.buffers}" if segment.buffers > 1 else ""
                title = f"{segment.name} {segment.shape}{part}: {mib(segment.bytes)}"
                drawing.rect(at, y, size - 1, bar, f"seg {segment.role}", title)
                if segment.padding:
                    padding = segment.padding / segment.buffers * scale
                    drawing.rect(at + size - padding, y, padding - 1, bar, "hatch", "padding")
                at += size
        limit = left + each.limit * scale
        drawing.line([(limit, y - 4), (limit, y + bar + 4)], "limit")
    return str(drawing)


def pipeline_chart(pipeline: Pipeline) -> str:
    """Draw the first and last steps of a kernel: copies in, computing, copies out.

    Args:
        pipeline: What to draw.

    Returns:
        An SVG element.
    """
    width, left, right, gap, thin = 860.0, 84.0, 12.0, 34.0, 9.0
    reads = [_rows(panel.reads) for panel in pipeline.panels]
    writes = [_rows(panel.writes) for panel in pipeline.panels]
    read_rows = max((len(rows) for rows in reads), default=1) or 1
    write_rows = max((len(rows) for rows in writes), default=1) or 1
    top = 34.0
    core = top + read_rows * thin + 10
    below = core + 30 + 10
    bottom = below + write_rows * thin + 6
    drawing = Drawing(
        width,
        bottom + 34,
        f"Pipeline of {pipeline.kernel} on {pipeline.target}",
        f"{pipeline.total_steps} steps in {pipeline.us:.1f} µs, waiting for copies "
        f"{pipeline.waiting:.0%} of the time",
    )
    for label, y in (
        ("copies in", top + read_rows * thin / 2),
        ("core", core + 15),
        ("copies out", below + write_rows * thin / 2),
    ):
        drawing.text(left - 10, y + 4, label, "note", "end")
    room = width - left - right - gap * (len(pipeline.panels) - 1)
    total = sum(panel.end - panel.start for panel in pipeline.panels)
    at = left
    for number, panel in enumerate(pipeline.panels):
        size = room * (panel.end - panel.start) / total
        _draw_panel(drawing, panel, at, size, (top, core, below, bottom))
        _draw_copies(drawing, reads[number], panel, at, size, top, thin, "read")
        _draw_copies(drawing, writes[number], panel, at, size, below, thin, "write")
        if number:
            drawing.text(at - gap / 2, core + 20, "…", "strong", "middle")
        at += size + gap
    return str(drawing)


def _draw_panel(
    drawing: Drawing,
    panel: Panel,
    left: float,
    size: float,
    rows: tuple[float, float, float, float],
) -> None:
    top, core, _, bottom = rows
    scale = size / (panel.end - panel.start)
    last_label = -math.inf
    for number, start in panel.steps:
        x = left + (start - panel.start) * scale
        drawing.line([(x, top - 8), (x, bottom)], "grid")
        if x - last_label > 24:
            drawing.text(x, top - 12, str(number), "tick", "middle")
            last_label = x
    for since, until in panel.compute:
        x = left + (since - panel.start) * scale
        drawing.rect(x, core, (until - since) * scale, 30, "compute", f"{until - since:.2f} µs")
    for since, until in panel.waits:
        x, wide = left + (since - panel.start) * scale, (until - since) * scale
        drawing.rect(x, core, wide, 30, "wait", f"waits {until - since:.2f} µs")
        drawing.rect(x, core, wide, 30, "hatch")
    drawing.line([(left, bottom), (left + size, bottom)], "axis")
    for tick in round_ticks(panel.start, panel.end, max(2, int(size / 80))):
        x = left + (tick - panel.start) * scale
        drawing.line([(x, bottom), (x, bottom + 4)], "axis")
        drawing.text(x, bottom + 17, f"{tick:g} µs", "tick", "middle")


def _draw_copies(
    drawing: Drawing,
    rows: Sequence[Sequence[_SPAN]],
    panel: Panel,
    left: float,
    size: float,
    top: float,
    thin: float,
    kind: str,
) -> None:
    scale = size / (panel.end - panel.start)
    for row, copies in enumerate(rows):
        y = top + row * thin
        for issued, begins, arrives in copies:
            x = left + (begins - panel.start) * scale
            queue = left + (issued - panel.start) * scale
            drawing.line([(queue, y + thin / 2 - 1), (x, y + thin / 2 - 1)], f"queue {kind}")
            title = f"{arrives - begins:.2f} µs after {begins - issued:.2f} µs in the queue"
            drawing.rect(x, y, (arrives - begins) * scale, thin - 2, f"copy {kind}", title)


def _rows(copies: Sequence[_SPAN], most: int = 8) -> list[list[_SPAN]]:
    """Spread copies over rows so that those of one row do not overlap."""
    rows: list[list[_SPAN]] = []
    for copy in copies:
        for row in rows:
            if row[-1][2] <= copy[0]:
                row.append(copy)
                break
        else:
            if len(rows) < most:
                rows.append([copy])
            else:
                rows[-1].append(copy)
    return rows


def parts_chart(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Draw which part of the time is spent where, for each target.

    Args:
        parts: Time in µs by kind of HLO, by target.

    Returns:
        An SVG element.
    """
    width, left, right, row = 760.0, 62.0, 90.0, 32.0
    drawing = Drawing(
        width,
        row * len(parts) + 4,
        "Where the time goes",
        "; ".join(
            f"{target}: " + ", ".join(f"{KINDS.get(k, 'other')} {us:.1f} µs" for k, us in p.items())
            for target, p in parts.items()
        ),
    )
    most = max((sum(times.values()) for times in parts.values()), default=1.0) or 1.0
    scale = (width - left - right) / most
    for index, (target, times) in enumerate(parts.items()):
        y = index * row + 4
        drawing.text(0, y + 16, target, "strong")
        at = left
        for kind, us in sorted(times.items(), key=lambda part: -part[1]):
            title = f"{KINDS.get(kind, 'other')}: {us:.1f} µs"
            drawing.rect(at, y, us * scale - 1, 22, f"seg part-{kind or 'other'}", title)
            at += us * scale
        drawing.text(at + 8, y + 16, f"{sum(times.values()):.1f} µs", "note")
    return str(drawing)


def _power(power: int) -> str:
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return {0: "1", 1: "10", 2: "100", -1: "0.1"}.get(power, f"10{raised}")
