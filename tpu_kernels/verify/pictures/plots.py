"""The same charts as PNG files, by matplotlib: an optional dependency."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpu_kernels.compiler.report import mib
from tpu_kernels.errors import MissingDependency
from tpu_kernels.verify.pictures import figures
from tpu_kernels.verify.pictures.page import Entry

_COLOURS = {
    "input": "#3a76c4",
    "output": "#1f9a84",
    "scratch": "#c98a1b",
    "spill": "#cc3d4a",
    "other": "#8a919c",
}
_BLUE, _GREEN, _GOLD, _GREY, _INK = "#3a76c4", "#1f9a84", "#c98a1b", "#eef0f3", "#1d2129"
_DPI = 150


def require() -> None:
    """Refuse early where matplotlib is absent.

    Raises:
        MissingDependency: If it is.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            "PNG files need matplotlib, which is not installed",
            hint="pip install 'tpu_kernels[plot]'; the HTML page needs nothing",
        )


def write(entry: Entry, folder: Path) -> list[Path]:
    """Write the charts of a kernel.

    Args:
        entry: The kernel, compiled.
        folder: Made if it does not exist.

    Returns:
        The files: ``NAME-roofline.png``, ``NAME-units.png``, ``NAME-memory.png`` and
        ``NAME-pipeline.png``, as far as there is something to draw.
    """
    # The object interface: pyplot would choose a backend and keep global state.
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", entry.name).strip("_") or "kernel"
    charts: dict[str, Callable[[Entry, Any], bool]] = {
        "roofline": _rooflines,
        "units": _units,
        "memory": _memory,
        "pipeline": _pipelines,
    }
    written = []
    for name, draw in charts.items():
        figure = Figure(layout="constrained")
        if draw(entry, figure):
            figure.suptitle(entry.name)
            path = folder / f"{stem}-{name}.png"
            figure.savefig(path, dpi=_DPI)
            written.append(path)
    return written


def _rooflines(entry: Entry, figure: Any) -> bool:
    rooflines = [figures.roofline(target, each) for target, each in entry.estimates.items()]
    if not rooflines:
        return False
    figure.set_size_inches(4.2 * len(rooflines), 3.6)
    for axes, roofline in zip(_axes(figure, len(rooflines)), rooflines, strict=True):
        ridge = roofline.matrix_ops_per_s / roofline.hbm_bytes_per_s
        knee = roofline.vector_ops_per_s / roofline.hbm_bytes_per_s
        finite = [p.intensity for p in roofline.points if math.isfinite(p.intensity)]
        low = min([0.1, *(0.5 * i for i in finite)])
        high = max([30 * ridge, *(3 * i for i in finite)])
        axes.loglog(
            [low, ridge, high],
            [low * roofline.hbm_bytes_per_s, *[roofline.matrix_ops_per_s] * 2],
            color=_INK,
            label="HBM, MXU (bf16)",
        )
        axes.loglog(
            [knee, high],
            [roofline.vector_ops_per_s] * 2,
            "--",
            color="#5c6470",
            label="vector unit",
        )
        for point in roofline.points:
            at = point.intensity if math.isfinite(point.intensity) else high
            axes.plot([at, at], [point.ops_per_s, point.ceiling], ":", color=_BLUE, linewidth=1)
            axes.plot(at, point.ops_per_s, "o", color=_BLUE)
            text = f"{point.name} {point.ops_per_s / point.ceiling:.0%}"
            axes.annotate(
                text,
                (at, point.ops_per_s),
                textcoords="offset points",
                xytext=(0, -12),
                fontsize=7,
                ha="center",
            )
        axes.set(title=roofline.target, xlabel="operations per byte of HBM", ylabel="op/s")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7, loc="lower right")
    return True


def _units(entry: Entry, figure: Any) -> bool:
    table = {unit: row for unit, row in figures.utilization(entry.estimates).items() if row}
    targets = list(entry.estimates)
    if not table:
        return False
    figure.set_size_inches(7.5, 0.3 * len(table) * len(targets) + 1.2)
    axes = figure.subplots()
    height = 0.8 / len(targets)
    for index, target in enumerate(targets):
        places = [row + (index - (len(targets) - 1) / 2) * height for row in range(len(table))]
        shares = [100 * row.get(target, 0.0) for row in table.values()]
        axes.barh(places, shares, height * 0.9, label=target)
    axes.set_yticks(range(len(table)), [figures.UNIT_NAMES[unit] for unit in table])
    axes.set(xlim=(0, 100), xlabel="% of capacity, hottest block")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    return True


def _memory(entry: Entry, figure: Any) -> bool:
    memories = entry.memories
    if not memories:
        return False
    figure.set_size_inches(8.5, 0.6 * len(memories) + 1.3)
    axes = figure.subplots()
    seen: set[str] = set()
    for row, each in enumerate(memories):
        axes.barh(row, each.limit / 2**20, 0.6, color=_GREY)
        at = 0.0
        for segment in each.segments:
            label = None if segment.role in seen else segment.role
            seen.add(segment.role)
            for buffer in range(segment.buffers):
                size = segment.bytes / segment.buffers / 2**20
                colour = _COLOURS[segment.role]
                label = label if buffer == 0 else None
                axes.barh(row, size, 0.6, left=at, color=colour, edgecolor="white", label=label)
                at += size
        axes.plot([each.limit / 2**20] * 2, [row - 0.38, row + 0.38], color=_INK, linewidth=2)
        least = "" if each.complete else "≥ "
        axes.text(at, row, f" {least}{mib(each.used)}", va="center", fontsize=8)
    axes.set_xlim(0, 1.12 * max(max(each.limit, each.used) for each in memories) / 2**20)
    axes.set_yticks(range(len(memories)), [each.target for each in memories])
    axes.invert_yaxis()
    axes.set(xlabel="MiB of VMEM; line: what the kernel may use")
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return True


def _pipelines(entry: Entry, figure: Any) -> bool:
    drawn = [figures.pipeline(target, each) for target, each in entry.estimates.items()]
    pipelines = [each for each in drawn if each is not None and each.panels]
    if not pipelines:
        return False
    columns = max(len(each.panels) for each in pipelines)
    figure.set_size_inches(5.0 * columns + 1.0, 1.7 * len(pipelines))
    grid = figure.subplots(len(pipelines), columns, squeeze=False)
    for row, pipeline in zip(grid, pipelines, strict=True):
        for axes, panel in zip(row, pipeline.panels, strict=False):
            _panel(axes, panel)
        for axes in row[len(pipeline.panels) :]:
            axes.set_axis_off()
        row[0].set_ylabel(pipeline.target)
        title = f"{pipeline.kernel}: {pipeline.total_steps} steps, {pipeline.waiting:.0%} waiting"
        row[0].set_title(title, fontsize=9, loc="left")
    return True


def _panel(axes: Any, panel: figures.Panel) -> None:
    axes.broken_barh([(a, b - a) for a, b in panel.compute], (0.7, 0.6), color=_BLUE)
    waits = [(a, b - a) for a, b in panel.waits]
    axes.broken_barh(waits, (0.7, 0.6), facecolor="#e7e3da", hatch="////", edgecolor="#9a917e")
    for copies, base, colour in ((panel.reads, 1.6, _GREEN), (panel.writes, -0.3, _GOLD)):
        for number, (_, begins, arrives) in enumerate(copies):
            axes.broken_barh(
                [(begins, arrives - begins)], (base + 0.15 * (number % 4), 0.12), color=colour
            )
    for number, start in panel.steps:
        axes.axvline(start, color="#dfe2e7", linewidth=0.8, zorder=0)
        axes.text(start, 2.35, str(number), fontsize=6, color="#5c6470")
    axes.set_yticks([0.0, 1.0, 1.9], ["out", "core", "in"], fontsize=8)
    axes.set(xlim=(panel.start, panel.end), ylim=(-0.4, 2.6))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("µs", fontsize=7)


def _axes(figure: Any, columns: int) -> Iterator[Any]:
    yield from figure.subplots(1, columns, squeeze=False)[0]
