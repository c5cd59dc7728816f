"""Pictures of a search."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tpu_kernels.tuning import plot
from tpu_kernels.tuning.report import TuneReport, TuneRow

MIB = 1 << 20


def report(times: list[float], target: str | None = "v6e") -> TuneReport:
    rows = [
        TuneRow({"block": 8 * n}, "ok", cost=us, figures={"vmem_bytes": n * MIB})
        for n, us in enumerate(times, 1)
    ]
    bad = TuneRow({"block": "<b>"}, "vmem", "needs 99 MiB & more")
    best = min(rows, key=lambda row: row.rank)
    return TuneReport("ns::f", target, "compiler", (*rows, bad), best, decision="2 times better")


@pytest.mark.parametrize("times", [[5.0], [5.0, 5.0], [900.0, 80.0, 7.0, 0.6, 12.0], [101.0, 99.5]])
def test_the_charts_are_sound_svg_and_show_every_candidate(times: list[float]) -> None:
    text = plot.page([report(times)])
    charts = re.findall(r"<svg.*?</svg>", text)
    assert len(charts) == (2 if len(times) > 1 else 1)
    root = ElementTree.fromstring(charts[0])
    assert len(root.findall("circle")) == len(times)
    for circle in root.findall("circle"):
        assert 0 < float(circle.attrib["cx"]) < plot._WIDTH
        assert 0 < float(circle.attrib["cy"]) < plot._HEIGHT
    assert len(root.findall("rect")) == 1  # the one that failed
    assert len({tick.text for tick in root.findall("text")}) >= 4
    assert "&lt;b&gt;" in text
    assert "99 MiB &amp; more" in text
    assert f"{min(times):.2f}" in text


def test_a_search_without_a_result_has_a_table_only() -> None:
    bad = TuneRow({"block": 1}, "invalid", "no")
    text = plot.page([TuneReport("ns::f", None, "wall", (bad,), None)])
    assert "<svg" not in text
    assert "invalid" in text


def test_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = plot.write([report([3.0, 2.0])], tmp_path / "sub" / "s.html", png=tmp_path / "png")
    page, image = made
    assert page.read_text().startswith("<!doctype html>")
    assert image.read_bytes().startswith(b"\x89PNG")
