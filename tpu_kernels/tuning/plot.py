"""Pictures of a search: times in the order tried, times over VMEM, the table of configs.

One HTML page that needs nothing else, and PNG files by matplotlib (extra ``plot``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tpu_kernels.compiler.report import mib
from tpu_kernels.tuning.report import TuneReport, TuneRow, config_text
from tpu_kernels.verify.pictures import plots
from tpu_kernels.verify.pictures.style import CSS
from tpu_kernels.verify.pictures.svg import Drawing, LogScale, round_ticks

_WIDTH, _HEIGHT = 640.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 34.0, 44.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Point:
    """A candidate that works.

    Attributes:
        place: When it was tried, from 1.
        us: Its time in µs.
        vmem: Bytes of VMEM, None where they are not known.
        name: Its config.
        best: Whether it was chosen.
    """

    place: int
    us: float
    vmem: int | None
    name: str
    best: bool


def points(report: TuneReport) -> list[Point]:
    """Return the candidates that have a time, in the order tried.

    Example:
        >>> rows = (TuneRow({"b": 8}, "vmem"), TuneRow({"b": 4}, "ok", cost=2.0))
        >>> points(TuneReport("ns::f", "v6e", "compiler", rows, rows[1]))
        [Point(place=2, us=2.0, vmem=None, name='b=4', best=True)]
    """
    found = []
    for place, row in enumerate(report.results, 1):
        if row.ok and 0 < row.rank < float("inf"):
            vmem = row.figures.get("vmem_bytes")
            name = config_text(row.config)
            found.append(Point(place, row.rank, vmem, name, row is report.best))
    return found


def pareto(found: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both time and VMEM, by growing VMEM.

    Example:
        >>> made = [Point(i, us, vmem, "", False) for i, (us, vmem) in
        ...         enumerate([(3.0, 10), (2.0, 20), (2.5, 30), (1.0, 40)])]
        >>> [p.vmem for p in pareto(made)]
        [10, 20, 40]
    """
    front: list[Point] = []
    for point in sorted(found, key=lambda p: (p.vmem or 0, p.us)):
        if point.vmem is not None and (not front or point.us < front[-1].us):
            front.append(point)
    return front


def write(
    reports: Sequence[TuneReport], path: str | Path, *, png: str | Path | None = None
) -> list[Path]:
    """Write the pictures of searches.

    Args:
        reports: The searches.
        path: The HTML page.
        png: Folder for PNG files, too.

    Returns:
        The files.

    Raises:
        MissingDependency: PNG files are wanted and matplotlib is absent.
    """
    if png is not None:
        plots.require()
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(reports), encoding="utf-8")
    files = [file]
    if png is not None:
        folder = Path(png)
        folder.mkdir(parents=True, exist_ok=True)
        for number, report in enumerate(reports):
            files += _write_png(report, folder, number)
    return files


def page(reports: Sequence[TuneReport]) -> str:
    """Return the page as HTML.

    Args:
        reports: The searches.
    """
    sections = "".join(map(_section, reports))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Search of configurations</title><style>{CSS}</style></head><body><main>"
        f"<h1>Search of configurations</h1>{sections}</main></body></html>\n"
    )


def _section(report: TuneReport) -> str:
    found = points(report)
    target = f" for {report.target}" if report.target else ""
    parts = [f"<h2>{escape(report.kernel + target)}</h2><p>{escape(report.text.splitlines()[0])}"]
    parts.append(f"<br>{escape(report.decision)}</p>" if report.decision else "</p>")
    if found:
        failed = len(report.results) - len(found)
        caption = f"Times in the order tried; the line is the best so far; {failed} without a time"
        parts.append(_figure(_order_chart(report, found), caption))
    if len([p for p in found if p.vmem is not None]) > 1:
        caption = "Time over VMEM; the line joins what nothing beats in both"
        parts.append(_figure(_vmem_chart(report, found), caption))
    parts.append(_table(report))
    return "".join(parts)


def _order_chart(report: TuneReport, found: Sequence[Point]) -> str:
    drawing, y = _frame(report, found, "Times in the order tried", "candidate")
    total = max(len(report.results), 2)

    def x(place: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place - 0.5) / total

    for tick in round_ticks(1, total):
        drawing.text(x(tick), _HEIGHT - _BOTTOM + 15, f"{tick:.0f}", "tick", "middle")
    for place, row in enumerate(report.results, 1):
        if not row.ok:
            title = f"{config_text(row.config)}: {row.status}: {row.reason}"
            drawing.rect(x(place) - 2, _HEIGHT - _BOTTOM - 7, 4, 7, "spill", title)
    best, steps = found[0].us, [(x(found[0].place), y(found[0].us))]
    for point in found[1:]:
        if point.us < best:
            steps += [(x(point.place), y(best)), (x(point.place), y(point.us))]
            best = point.us
    drawing.line([*steps, (x(total), y(best))], "roof")
    _dots(drawing, found, lambda p: (x(p.place), y(p.us)))
    return str(drawing)


def _vmem_chart(report: TuneReport, found: Sequence[Point]) -> str:
    known = [point for point in found if point.vmem is not None]
    drawing, y = _frame(report, found, "Time over VMEM", "VMEM, MiB")
    most = max(point.vmem or 0 for point in known) / _MIB * 1.05

    def x(vmem: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * vmem / _MIB / max(most, 1e-9)

    for tick in round_ticks(0, most):
        at = x(tick * _MIB)
        drawing.line([(at, _TOP), (at, _HEIGHT - _BOTTOM)], "grid")
        drawing.text(at, _HEIGHT - _BOTTOM + 15, f"{tick:g}", "tick", "middle")
    front = pareto(known)
    drawing.line([(x(p.vmem or 0), y(p.us)) for p in front], "gap")
    _dots(drawing, known, lambda p: (x(p.vmem or 0), y(p.us)))
    return str(drawing)


def _frame(
    report: TuneReport, found: Sequence[Point], title: str, across: str
) -> tuple[Drawing, LogScale]:
    low, high = min(p.us for p in found), max(p.us for p in found)
    chosen = next((p for p in found if p.best), found[0])
    text = f"{len(found)} configs from {low:.4g} to {high:.4g} µs, chosen {chosen.name}"
    drawing = Drawing(_WIDTH, _HEIGHT, f"{title}: {report.kernel}", text)
    y = LogScale(low / 1.1, high * 1.1, _HEIGHT - _BOTTOM, _TOP)
    for tick in _log_ticks(low / 1.1, high * 1.1):
        drawing.line([(_LEFT, y(tick)), (_WIDTH - _RIGHT, y(tick))], "grid")
        drawing.text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "tick", "end")
    drawing.text(8, 18, "µs", "tick")
    drawing.text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, across, "", "middle")
    return drawing, y


def _log_ticks(low: float, high: float) -> list[float]:
    """Round values: by decades of 1, 2, 5 where the span is wide, evenly where it is not."""
    if high / low < 8:
        return [tick for tick in round_ticks(low, high) if tick > 0]
    ticks = [f * 10.0**p for p in range(-3, 10) for f in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside if len(inside) <= 8 else [t for t in inside if f"{t:e}"[0] == "1"]


def _dots(drawing: Drawing, found: Sequence[Point], place: Any) -> None:
    for point in sorted(found, key=lambda p: p.best):  # the chosen one on top
        at_x, at_y = place(point)
        vmem = f", {mib(point.vmem)} VMEM" if point.vmem is not None else ""
        title = f"{point.name}: {point.us:.4g} µs{vmem}"
        drawing.circle(
            at_x, at_y, 7 if point.best else 4, "point free" if point.best else "point", title
        )
        if point.best:
            # Towards the middle, where there is room for the name.
            right = at_x > _WIDTH / 2
            anchor, shift = ("end", -11) if right else ("start", 11)
            drawing.text(at_x + shift, at_y - 8, f"{point.us:.4g} µs", "strong", anchor)


def _table(report: TuneReport) -> str:
    failed = [row for row in report.results if not row.ok]
    rows = "".join(_row(row, row is report.best) for row in [*report.ranking, *failed])
    return (
        '<details open><summary>All candidates, best first</summary><div class="scroll"><table>'
        "<thead><tr><th>config</th><th>status</th><th>µs</th><th>VMEM</th>"
        f'<th class="text">reason</th></tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _row(row: TuneRow, best: bool) -> str:
    time = f"{row.rank:.2f}" if row.ok and row.rank < float("inf") else ""
    vmem = row.figures.get("vmem_bytes")
    kind = "ok" if row.ok else "no"
    name = escape(config_text(row.config))
    return (
        f"<tr><th>{f'<strong>{name}</strong> (chosen)' if best else name}</th>"
        f'<td class="{kind}">{row.status}</td><td>{time}</td>'
        f"<td>{mib(vmem) if vmem is not None else ''}</td>"
        f'<td class="long">{escape(row.reason)}</td></tr>'
    )


def _figure(chart: str, caption: str) -> str:
    return (
        f'<figure><div class="scroll"><div class="chart">{chart}</div></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _write_png(report: TuneReport, folder: Path, number: int) -> list[Path]:
    # The object interface: pyplot would choose a backend and keep global state.
    from matplotlib.figure import Figure

    found = points(report)
    if not found:
        return []
    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    order, memory = figure.subplots(1, 2)
    order.semilogy([p.place for p in found], [p.us for p in found], "o")
    best = [min(p.us for p in found[: n + 1]) for n in range(len(found))]
    order.step([p.place for p in found], best, where="post", color="black")
    order.set(xlabel="candidate, in the order tried", ylabel="µs")
    known = [p for p in found if p.vmem is not None]
    memory.semilogy([(p.vmem or 0) / _MIB for p in known], [p.us for p in known], "o")
    front = pareto(known)
    memory.plot([(p.vmem or 0) / _MIB for p in front], [p.us for p in front], "--", color="black")
    memory.set(xlabel="VMEM, MiB", ylabel="µs")
    figure.suptitle(f"{report.kernel}{f' for {report.target}' if report.target else ''}")
    name = report.kernel.replace("::", ".")
    file = folder / f"{number}-{name}-{report.target or 'cpu'}-search.png"
    figure.savefig(file, dpi=130)
    return [file]
