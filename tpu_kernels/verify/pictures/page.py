"""One self-contained HTML page on a kernel, or on several: no script, nothing to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpu_kernels.compiler import CompileReports, resolve
from tpu_kernels.compiler.cost.figures import KINDS, ModuleEstimate
from tpu_kernels.compiler.pallas_model import PallasModel
from tpu_kernels.verify.pictures import charts, figures, tables
from tpu_kernels.verify.pictures.notes import NOTES
from tpu_kernels.verify.pictures.style import CSS, HATCH
from tpu_kernels.verify.pictures.svg import si
from tpu_kernels.verify.pictures.tables import escape, microseconds


@dataclass(frozen=True)
class Entry:
    """One kernel with its arguments, compiled.

    Attributes:
        name: Name of the kernel.
        arguments: Its arguments in words.
        reports: The compiler's report by target.
        models: Demands of its Pallas calls by target, where they could be traced.
    """

    name: str
    arguments: str
    reports: CompileReports
    models: Mapping[str, Sequence[PallasModel]] = field(default_factory=dict)

    @property
    def estimates(self) -> dict[str, ModuleEstimate]:
        """Estimates with a time, by target."""
        return {
            target: report.estimate
            for target, report in self.reports.items()
            if report.estimate is not None and report.estimate.us is not None
        }

    @property
    def memories(self) -> list[figures.Memory]:
        """Use of VMEM of the targets on which it is known."""
        found = (
            figures.memory(target, resolve(target).chip, report, self.models.get(target, ()))
            for target, report in self.reports.items()
        )
        return [each for each in found if each is not None and each.segments]


def page(entries: Sequence[Entry], title: str) -> str:
    """Write the page.

    Args:
        entries: The kernels.
        title: Its title.

    Returns:
        The HTML document.
    """
    contents = ""
    if len(entries) > 1:
        items = "".join(
            f'<li><a href="#kernel-{number}">{escape(entry.name)}</a> '
            f'<span class="soft">{escape(entry.arguments)}</span> {_verdict(entry)}</li>'
            for number, entry in enumerate(entries)
        )
        contents = f'<nav aria-label="Kernels"><ul>{items}</ul></nav>'
    sections = "".join(_section(entry, number) for number, entry in enumerate(entries))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>{HATCH}<main>"
        f'<h1>{escape(title)}</h1><p class="soft">{_versions(entries)}</p>{contents}{sections}'
        f"{NOTES}</main></body></html>\n"
    )


def _versions(entries: Sequence[Entry]) -> str:
    reports = [report for entry in entries for report in entry.reports.values()]
    compilers = sorted({r.libtpu_version for r in reports if r.libtpu_version})
    fits = sorted({r.estimate.calibration for r in reports if r.estimate is not None})
    parts = ["Compiled ahead of time, without a TPU"]
    if compilers:
        parts.append(f"libtpu {', '.join(compilers)}")
    if fits:
        parts.append(f"calibration {', '.join(fits)}")
    return escape("; ".join(parts) + ".") + ' <a href="#notes">How to read this</a>'


def _verdict(entry: Entry) -> str:
    good = sum(report.ok for report in entry.reports.values())
    kind = "ok" if entry.reports.ok else "no"
    return f'<span class="{kind}">{good} of {len(entry.reports)}</span>'


def _section(entry: Entry, number: int) -> str:
    parts = [
        f'<section aria-labelledby="kernel-{number}">',
        f'<h2 id="kernel-{number}">{escape(entry.name)}</h2>',
        f'<p class="soft"><code>{escape(entry.arguments)}</code></p>',
        f"<p>{_summary(entry)}</p>",
        tables.targets_table(entry.reports),
        _warnings(entry),
        *(tables.failure(report) for report in entry.reports.values() if not report.ok),
    ]
    estimates = entry.estimates
    if estimates:
        parts += [_parts(estimates), _rooflines(estimates), _units(estimates)]
    memories = entry.memories
    if memories:
        parts.append(_memory(memories))
    parts += [_pipelines(estimates), "</section>"]
    return "".join(parts)


def _summary(entry: Entry) -> str:
    good = [target for target, report in entry.reports.items() if report.ok]
    total = len(entry.reports)
    text = f"Compiles for {'all' if len(good) == total else len(good)} of {total} targets"
    if total == 1:
        text = "Compiles" if good else "Does not compile"
    elif not good:
        text = f"Compiles for none of {total} targets"
    times = {target: estimate.us or 0.0 for target, estimate in entry.estimates.items()}
    if times:
        best = min(times, key=lambda target: times[target])
        text += f"; shortest estimated time {microseconds(times[best])}, on {best}"
    return escape(text + ".")


def _warnings(entry: Entry) -> str:
    notes: dict[str, list[str]] = {}
    for target, estimate in entry.estimates.items():
        for warning in estimate.warnings:
            notes.setdefault(warning, []).append(target)
        if estimate.us and estimate.guessed_us:
            share = f"{estimate.guessed_us / estimate.us:.0%} of the time is partly guessed"
            notes.setdefault(share, []).append(target)
    items = "".join(
        f"<li>{escape(', '.join(targets))}: {escape(note)}</li>" for note, targets in notes.items()
    )
    return f'<ul class="soft">{items}</ul>' if items else ""


def _parts(estimates: Mapping[str, ModuleEstimate]) -> str:
    if all(len(estimate.kernels) < 2 for estimate in estimates.values()):
        return ""
    parts = {target: estimate.parts for target, estimate in estimates.items()}
    kinds = {kind for times in parts.values() for kind in times}
    colours = {
        f"part-{kind or 'other'}": KINDS.get(kind, "not told apart") for kind in sorted(kinds)
    }
    return (
        "<h3>Where the time goes</h3>"
        + _figure(charts.parts_chart(parts), "Time by kind of work, for each target")
        + tables.legend(colours)
        + f"<details><summary>All parts</summary>{tables.hlos_table(estimates)}</details>"
    )


def _rooflines(estimates: Mapping[str, ModuleEstimate]) -> str:
    cards = []
    for target, estimate in estimates.items():
        roofline = figures.roofline(target, estimate)
        items = "".join(
            f"<li>{escape(p.name)}: {si(p.ops_per_s, 'op/s')}, {p.ops_per_s / p.ceiling:.0%} of "
            f"its ceiling, {p.share:.0%} of the time</li>"
            for p in roofline.points
        )
        below = f"<ol>{items}</ol>" if items else "<ol><li>no kernel with arithmetic</li></ol>"
        chart = charts.roofline_chart(roofline)
        cards.append(
            f'<div class="scroll" tabindex="0" role="region" '
            f'aria-label="Roofline of {escape(target)}"><div class="chart">{chart}</div>'
            f"{below}</div>"
        )
    return f'<h3>Roofline</h3><div class="grid">{"".join(cards)}</div>'


def _units(estimates: Mapping[str, ModuleEstimate]) -> str:
    shares = figures.utilization(estimates)
    names = {main.name for each in estimates.values() if (main := figures.main_kernel(each))}
    if not any(shares.values()):
        return ""
    which = f'<p class="soft">The hottest block of {escape(", ".join(sorted(names)))}.</p>'
    return f"<h3>Use of the units</h3>{which}{tables.units_table(shares, list(estimates))}"


def _memory(memories: Sequence[figures.Memory]) -> str:
    names = sorted({each.kernel for each in memories})
    return (
        "<h3>Vector memory</h3>"
        + _figure(
            charts.memory_chart(memories),
            f"VMEM of {', '.join(names)}; the grey track and the line are what it may use",
        )
        + tables.legend(tables.roles(memories))
        + f"<details><summary>All buffers</summary>{tables.buffers_table(memories)}</details>"
    )


def _pipelines(estimates: Mapping[str, ModuleEstimate]) -> str:
    drawn = [figures.pipeline(target, estimate) for target, estimate in estimates.items()]
    found = [each for each in drawn if each is not None and each.panels]
    if not found:
        return ""
    colours = {
        "swatch-compute": "computes",
        "swatch-wait": "waits for a copy",
        "output": "copy in",
        "scratch": "copy out",
    }
    pictures = "".join(
        _figure(
            charts.pipeline_chart(each),
            f"{each.target}: {each.kernel}, {each.total_steps} steps in {microseconds(each.us)}, "
            f"{each.waiting:.0%} of it waiting; dotted: in the queue",
        )
        for each in found
    )
    return f"<h3>Pipeline</h3>{tables.legend(colours)}{pictures}"


def _figure(chart: str, caption: str) -> str:
    return (
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<div class="chart">{chart}</div></div><figcaption>{escape(caption)}</figcaption></figure>'
    )
