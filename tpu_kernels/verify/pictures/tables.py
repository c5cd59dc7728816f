"""Tables and lists of a page, as HTML; every text from outside is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from tpu_kernels.compiler import CompileReport
from tpu_kernels.compiler.cost.figures import KINDS, KernelEstimate, ModuleEstimate
from tpu_kernels.compiler.report import mib
from tpu_kernels.verify.pictures.figures import UNIT_NAMES, Memory, Segment, dearest

_BOUND = {"hbm": "HBM", "latency": "latency of copies", "mxu": "MXU", "issue": "instructions"}
_TEXT = ' class="text"'
_ABSENT = '<span class="soft">—</span>'


def escape(text: object) -> str:
    """Escape a text for HTML, attributes included."""
    return html.escape(str(text))


def table(
    label: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = ()
) -> str:
    """Write a table that scrolls on its own where the page is narrow.

    Args:
        label: What it holds, for those who do not see it.
        head: Headings, plain text.
        rows: Cells as HTML; the first of a row is its heading.
        text: Columns with words instead of figures.

    Returns:
        An HTML element.
    """
    heads = "".join(
        f'<th scope="col"{_TEXT if column in text else ""}>{escape(each)}</th>'
        for column, each in enumerate(head)
    )
    lines = []
    for first, *rest in rows:
        cells = "".join(
            f'<td class="text">{cell}</td>' if column in text else f"<td>{cell}</td>"
            for column, cell in enumerate(rest, 1)
        )
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def targets_table(reports: Mapping[str, CompileReport]) -> str:
    """Write one row for each target: verdict, time, bound, memory, confidence."""
    head = (
        "target",
        "verdict",
        "estimated time",
        "of the roofline",
        "bound by",
        "HBM moved",
        "VMEM",
        "spills",
        "confidence",
    )
    rows = [_target_row(target, report) for target, report in reports.items()]
    return table("Targets", head, rows, text=(1, 4, 8))


def _target_row(target: str, report: CompileReport) -> list[str]:
    kind = "ok" if report.ok else "no"
    verdict = f'<span class="{kind}">{escape(report.status)}</span>'
    estimate = report.estimate
    vmem = _ABSENT if report.vmem_bytes is None else mib(report.vmem_bytes)
    spills = _ABSENT if report.spills is None else str(report.spills)
    if estimate is None or estimate.us is None:
        confidence = _ABSENT if estimate is None else escape(estimate.confidence)
        return [escape(target), verdict, *[_ABSENT] * 4, vmem, spills, confidence]
    ranked = dearest(estimate)
    moved = sum(kernel.hbm_bytes * kernel.count for kernel in estimate.kernels)
    share = (estimate.at_least_us or 0.0) / estimate.us if estimate.us else 0.0
    return [
        escape(target),
        verdict,
        f"<b>{microseconds(estimate.us)}</b>",
        f"{min(share, 1.0):.0%}",
        escape(_BOUND.get(ranked[0].bound, ranked[0].bound)) if ranked else _ABSENT,
        mib(moved),
        vmem,
        spills,
        escape(estimate.confidence),
    ]


def units_table(shares: Mapping[str, Mapping[str, float]], targets: Sequence[str]) -> str:
    """Write the use of each unit, a bar for each target."""
    rows: list[list[str]] = []
    for unit, row in shares.items():
        if not row:
            continue
        rows.append([escape(UNIT_NAMES[unit]), *(_bar(row.get(target)) for target in targets)])
    return table("Use of units over the hottest block", ["unit", *targets], rows)


def _bar(share: float | None) -> str:
    if share is None:
        return _ABSENT
    return f'{share:.0%}<span class="bar"><i style="width:{share:.1%}"></i></span>'


def buffers_table(memories: Sequence[Memory]) -> str:
    """Write what VMEM is used for, by target."""
    rows: list[list[str]] = []
    for each in memories:
        for segment in each.segments:
            rows.append(
                [
                    escape(each.target),
                    escape(segment.name),
                    f"<code>{escape(segment.shape)}</code>" if segment.shape else _ABSENT,
                    str(segment.buffers),
                    mib(segment.bytes),
                    mib(segment.padding) if segment.padding else "0",
                ]
            )
    head = ("target", "used for", "buffer", "buffers", "size", "of that padding")
    return table("Buffers in vector memory", head, rows, text=(1, 2))


def hlos_table(estimates: Mapping[str, ModuleEstimate], most: int = 12) -> str:
    """Write the dearest parts of a program, by target."""
    rows: list[list[str]] = []
    for target, estimate in estimates.items():
        ranked = sorted(estimate.kernels, key=lambda kernel: -kernel.total_us)
        rows.extend(_hlo_row(target, kernel, estimate) for kernel in ranked[:most])
        if len(ranked) > most:
            rest = sum(kernel.total_us for kernel in ranked[most:])
            label = f"{len(ranked) - most} more"
            rows.append([escape(target), label, _ABSENT, "", microseconds(rest), "", "", ""])
        rows.extend(
            [escape(target), escape(name), _ABSENT, "", "unknown", "", "", ""]
            for name in estimate.unknown
        )
    head = ("target", "part", "kind", "runs", "time", "share", "bound by", "comes from")
    return table("Parts of the program", head, rows, text=(1, 2, 6, 7))


def _hlo_row(target: str, kernel: KernelEstimate, estimate: ModuleEstimate) -> list[str]:
    guessed = ", ".join(kernel.warnings)
    name = escape(kernel.name) + (
        f' <span class="no">guessed: {escape(guessed)}</span>' * bool(guessed)
    )
    return [
        escape(target),
        name,
        escape(KINDS.get(kernel.kind, "not told")),
        str(kernel.count),
        microseconds(kernel.total_us),
        f"{kernel.total_us / estimate.us:.0%}" if estimate.us else "",
        escape(_BOUND.get(kernel.bound, kernel.bound)),
        escape(_short(kernel.op_name)),
    ]


def _short(op_name: str, most: int = 60) -> str:
    return op_name if len(op_name) <= most else "…" + op_name[1 - most :]


def failure(report: CompileReport) -> str:
    """Write what a target refuses: the author's line, the explanation, the compiler's text."""
    parts = [f"<p><b>{escape(report.target)}: {escape(report.status)}</b></p>"]
    if report.error:
        parts.append(f"<p>{escape(report.error)}</p>")
    if report.where:
        parts.append(f"<p>at <code>{escape(report.where)}</code></p>")
    if report.source_line:
        parts.append(f"<pre>{escape(report.source_line)}</pre>")
    if report.hint:
        parts.append(f"<p>Hint: {escape(report.hint)}</p>")
    if report.compiler_text:
        text = escape(report.compiler_text)
        parts.append(
            f"<details><summary>The compiler's own words</summary><pre>{text}</pre></details>"
        )
    return f'<div class="failure">{"".join(parts)}</div>'


def legend(entries: Mapping[str, str]) -> str:
    """Write what the colours stand for.

    Args:
        entries: Text by class of the colour.
    """
    items = "".join(
        f'<li><i class="{kind}"></i>{escape(what)}</li>' for kind, what in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'


def roles(memories: Sequence[Memory]) -> dict[str, str]:
    """What the colours of the memory chart stand for, those that occur in it."""
    names = {
        "input": "input blocks",
        "output": "output blocks",
        "scratch": "scratch",
        "spill": "register spills",
        "other": "other",
    }
    found = {segment.role for each in memories for segment in _all(each)}
    return {role: name for role, name in names.items() if role in found}


def _all(each: Memory) -> tuple[Segment, ...]:
    return each.segments


def microseconds(us: float) -> str:
    """Write a time.

    Example:
        >>> microseconds(3.2), microseconds(412.0), microseconds(15400.0)
        ('3.2 µs', '412 µs', '15.4 ms')
    """
    if us >= 10_000:
        return f"{us / 1000:.3g} ms"
    return f"{us:.1f} µs" if us < 100 else f"{us:.0f} µs"
