"""The page and the images that `report` draws: whole, escaped, and true to the estimate."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.compiler import CompileReport, CompileReports, chips, resolve
from tpu_kernels.compiler.cost.calibration import fitted_for
from tpu_kernels.compiler.cost.estimate import estimate
from tpu_kernels.compiler.pallas_model import PallasModel, Window
from tpu_kernels.errors import ArgumentError, ConfigError, MissingDependency
from tpu_kernels.verify.pictures import figures, plots, report
from tpu_kernels.verify.pictures.page import Entry, page
from tpu_kernels.verify.pictures.svg import LogScale, round_ticks

LISTINGS = Path(__file__).parents[1] / "compiler" / "cost" / "listings"
VOID = {"meta", "br", "img", "link", "input", "hr"}
EVIL = "ev<i>l\"&'</style><script>alert(1)</script>"


class Reader(HTMLParser):
    """Checks nesting and gathers what the tests look at."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompileReport]:
    """Reports of a matmul for three chips, of a whole function, and of a refusal."""
    found = {}
    for chip in ("v5e", "v6e", "tpu7x"):
        folder = tmp_path_factory.mktemp(chip)
        text = gzip.decompress((LISTINGS / f"matmul.{chip}.txt.gz").read_bytes()).decode()
        (folder / "1-matmul.1-01-final_bundles.txt").write_text(text)
        found[chip] = _ok(chip, sorted(folder.iterdir()))
    folder = tmp_path_factory.mktemp("program")
    texts = json.loads(gzip.decompress((LISTINGS / "program.v6e.json.gz").read_bytes()))
    for name, text in texts.items():
        (folder / name).write_text(text)
    found["program"] = _ok("v6e", sorted(folder.iterdir()))
    found["refused"] = CompileReport(
        "vmem",
        "v4",
        "f",
        error=EVIL,
        where="a.py:3",
        source_line=EVIL,
        hint=EVIL,
        compiler_text=EVIL,
        vmem_bytes=32 << 20,
    )
    return found


def _ok(chip: str, files: list[Path]) -> CompileReport:
    found = estimate(files, chips()[chip], libtpu_version=fitted_for())
    return CompileReport("ok", chip, "f", spills=3, vmem_bytes=1 << 20, estimate=found)


def _entry(reports: dict[str, CompileReport], *names: str, name: str = "tpu::f") -> Entry:
    chosen = {reports[each].target: reports[each] for each in names}
    return Entry(name, "bfloat16[2048,2048]", CompileReports(chosen))


def test_a_page_is_whole_and_loads_nothing(reports: dict[str, CompileReport]) -> None:
    text = page([_entry(reports, "v5e", "v6e", "tpu7x")], "Matmul")
    reader = read(text)
    tags = [tag for tag, _ in reader.tags]
    assert "script" not in tags
    assert "link" not in tags
    assert "img" not in tags
    assert not re.search(r"(src|href)=\"(?!#)|url\((?!#)|@import|https?://", text)
    assert "prefers-color-scheme:dark" in text
    assert any(a.get("name") == "viewport" for tag, a in reader.tags if tag == "meta")
    # A picture has words, and whatever scrolls can be reached by the keyboard.
    pictures = [a for tag, a in reader.tags if tag == "svg" and a.get("aria-hidden") is None]
    assert len(pictures) == 3 + 3  # a roofline and a pipeline for each chip; no VMEM report here
    assert all(a["role"] == "img" and a["aria-label"] for a in pictures)
    scrolling = [a for _, a in reader.tags if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["role"] == "region" for a in scrolling)
    assert all(a["scope"] in ("col", "row") for tag, a in reader.tags if tag == "th")
    identifiers = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    for tag, attributes in reader.tags:
        if tag == "a":
            assert str(attributes["href"]).removeprefix("#") in identifiers


def test_figures_on_the_page_are_those_of_the_estimate(
    reports: dict[str, CompileReport],
) -> None:
    words = " ".join(read(page([_entry(reports, "v5e", "v6e")], "x")).text)
    for name in ("v5e", "v6e"):
        found = reports[name].estimate
        assert found is not None
        assert found.us is not None
        assert f"{found.us:.0f} µs" in words
        assert f"{found.kernels[0].efficiency:.0%}" in words
        assert f"{found.kernels[0].timeline.total_steps} steps" in words  # type: ignore[union-attr]


def test_what_comes_from_outside_is_escaped(reports: dict[str, CompileReport]) -> None:
    found = reports["v6e"].estimate
    assert found is not None
    evil = dataclasses.replace(found.kernels[0], name=EVIL, op_name=EVIL, warnings={EVIL: 1})
    program = dataclasses.replace(
        found, kernels=(evil, found.kernels[0]), unknown=(EVIL,), warnings=(EVIL,)
    )
    worst = {**reports, "v6e": dataclasses.replace(reports["v6e"], estimate=program)}
    text = page([_entry(worst, "v6e", "refused", name=EVIL)] * 2, EVIL)
    assert "<script" not in text
    reader = read(text)
    assert {tag for tag, _ in reader.tags} & {"script", "i"} <= {"i"}
    assert "alert(1)" in "".join(reader.text)
    assert text.count("</style>") == 1


def test_a_refusal_shows_line_hint_and_the_buffers_that_do_not_fit(
    reports: dict[str, CompileReport],
) -> None:
    windows = (
        Window("args[0]", (2048, 1024), "float32", 8 << 20, 2, 8),
        Window("outputs[0]", (2048, 1024), "float32", 8 << 20, 2, 8),
    )
    model = PallasModel("big", "", 8, windows, 1 << 20, None, {})
    found = figures.memory("v4", chips()["v4"], reports["refused"], [model])
    assert found is not None
    assert (found.used, found.limit, found.complete) == (33 << 20, 16 << 20, False)
    assert [segment.role for segment in found.segments] == ["input", "output", "scratch"]
    entry = dataclasses.replace(_entry(reports, "refused"), models={"v4": [model]})
    words = " ".join(read(page([entry], "x")).text)
    assert "at least 33.0 MiB of 16.0 MiB (206%): does not fit" in words
    assert "Does not compile." in words
    assert "a.py:3" in words


@pytest.mark.parametrize("status", ["unavailable", "timeout"])
def test_pages_without_data_say_so(status: str) -> None:
    entry = Entry("f", "", CompileReports({"v6e": CompileReport(status, "v6e", "f")}))
    words = " ".join(read(page([entry], "x")).text)
    assert status in words
    assert "operations per byte" not in words
    bound = estimate([], chips()["v6e"], hbm_bytes=1)
    entry = Entry("f", "", CompileReports({"v6e": CompileReport("ok", "v6e", "f", estimate=bound)}))
    assert "none" in " ".join(read(page([entry], "x")).text)


def test_a_roofline_follows_from_the_estimate(reports: dict[str, CompileReport]) -> None:
    found = reports["v5e"].estimate
    assert found is not None
    roofline = figures.roofline("v5e", found)
    (point,) = roofline.points
    assert found.us is not None
    # 2 * 2048^3 operations, 80 MiB: the blocks of 512 are read four times, the result is float32.
    assert point.ops_per_s == pytest.approx(2 * 2048**3 / found.us * 1e6, rel=0.01)
    assert point.intensity == pytest.approx(2 * 2048**3 / (80 << 20), rel=0.01)
    assert point.matrix
    assert point.ceiling == pytest.approx(min(197e12, point.intensity * 820e9))
    assert point.ops_per_s / point.ceiling == pytest.approx(found.kernels[0].efficiency, rel=0.01)


def test_kernels_without_matrices_stand_under_the_vector_unit(
    reports: dict[str, CompileReport],
) -> None:
    found = reports["program"].estimate
    assert found is not None
    roofline = figures.roofline("v6e", found)
    names = {point.name: point for point in roofline.points}
    assert not names["scaled.3"].matrix
    # The loop's operands live in VMEM: nothing is read from HBM.
    assert math.isinf(names["scaled.3"].intensity)
    assert names["scaled.3"].ceiling == roofline.vector_ops_per_s
    assert names["scaled.3"].ops_per_s < roofline.vector_ops_per_s
    assert "Where the time goes" in page([_entry(reports, "program")], "x")


def test_panels_cover_their_steps_with_computing_and_waiting(
    reports: dict[str, CompileReport],
) -> None:
    found = reports["v5e"].estimate
    assert found is not None
    pipeline = figures.pipeline("v5e", found)
    assert pipeline is not None
    first, last = pipeline.panels
    assert first.start == 0
    assert last.end == pytest.approx(found.us)
    assert [number for number, _ in last.steps] == [62, 63, 64, 65]
    for panel in pipeline.panels:
        spans = sorted([*panel.compute, *panel.waits])
        assert spans[0][0] == pytest.approx(panel.start)
        assert spans[-1][1] == pytest.approx(panel.end)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end == pytest.approx(start)
        for copies in (panel.reads, panel.writes):
            for issued, begins, arrives in copies:
                assert panel.start <= issued <= begins <= arrives <= panel.end


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_are_few_and_inside(low: float, span: float, most: int) -> None:
    ticks = round_ticks(low, low + span, most)
    assert len(ticks) <= most + 1
    assert all(low - 1e-6 * span - 1e-8 <= t <= low + span + 1e-6 * span + 1e-8 for t in ticks)
    assert ticks == sorted(set(ticks))


def test_a_logarithmic_scale_keeps_what_lies_outside_at_its_ends() -> None:
    scale = LogScale(0.1, 1000.0, 0.0, 400.0)
    assert [scale(0.1), scale(1.0), scale(1000.0)] == pytest.approx([0.0, 100.0, 400.0])
    assert (scale(1e-9), scale(1e9)) == (0.0, 400.0)
    assert scale.decades() == [-1, 0, 1, 2, 3]


def test_images_are_written_where_there_is_something_to_draw(
    reports: dict[str, CompileReport], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    # XLA keeps this kernel's operands in VMEM: it has no buffers of its own.
    files = plots.write(_entry(reports, "program", name="tpu::f / g"), tmp_path / "new")
    assert [file.name for file in files] == [
        f"tpu_f_g-{name}.png" for name in ("roofline", "units", "pipeline")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert plots.write(Entry("f", "", CompileReports({"v4": reports["refused"]})), tmp_path) == []


def test_without_matplotlib_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = plots.importlib.util.find_spec  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(MissingDependency, match=r"tpu_kernels\[plot\]"):
        report(torch.nn.Identity(), (), png="folder")


def test_wrong_calls_are_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    def f(x: object) -> object:
        return x

    x = torch.zeros(8, 128)
    with pytest.raises(ConfigError, match="v9"):
        report(f, (x,), "v9", path=tmp_path / "x.html")
    with pytest.raises(ArgumentError, match="no target"):
        report(f, (x,), [], path=tmp_path / "x.html")
    with pytest.raises(ArgumentError, match="belong to one kernel"):
        report({"f": (f, (x,))}, (x,), path=tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.libtpu
def test_report_compiles_and_writes_a_page(tmp_path: Path, scaled: Callable[..., object]) -> None:
    x = torch.zeros(64, 100)
    path = tmp_path / "deep" / "page.html"
    found = report({"good": (scaled, (x,))}, target=["v5e", "v6e"], path=path)
    assert found.ok
    assert str(found).endswith("page.html: 2 of 2 compile")
    reader = read(found.path.read_text(encoding="utf-8"))
    words = " ".join(reader.text)
    assert "scaled_rows" in words
    # Rows of 100 float32 fill 128 lanes.
    memory = figures.memory("v6e", resolve("v6e").chip, found.reports["good"]["v6e"], [])
    assert memory is not None
    window = next(each for each in memory.segments if each.role == "input")
    assert window.shape == "f32[8,100]"
    assert window.padding == window.bytes - 2 * 8 * 100 * 4


@pytest.fixture
def scaled() -> Callable[..., object]:
    import jax
    from jax.experimental import pallas as pl

    def scaled_rows(x: jax.Array) -> jax.Array:
        def body(a, o):
            o[...] = a[...] * 2

        spec = pl.BlockSpec((8, 100), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(x.shape[0] // 8,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            name="scaled_rows",
        )(x)

    return scaled_rows


@pytest.mark.libtpu
def test_the_command_writes_a_page_and_tells_where(tmp_path: Path) -> None:
    arguments = ["report", "tpu::matmul", "bf16[256,256]", "bf16[256,256]", "--target", "v6e"]
    out = tmp_path / "m.html"
    done = subprocess.run(
        [sys.executable, "-m", "tpu_kernels", *arguments, "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    document = json.loads(done.stdout)
    assert (document["ok"], document["page"], document["images"]) == (True, str(out), [])
    assert read(out.read_text(encoding="utf-8")).tags
