"""Compiling for all chips, results on disk, dumps, and machines without the compiler."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tpu_kernels.compiler import (
    CompileReport,
    CompileReports,
    Request,
    chips,
    compile_all,
    compile_function,
    resolve,
    versions,
)
from tpu_kernels.compiler import compile as compile_module
from tpu_kernels.compiler.result_cache import ResultCache
from tpu_kernels.errors import CacheCorruption, ConfigError

MATRIX = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
TILE = jax.ShapeDtypeStruct((8, 128), jnp.float32)
pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ResultCache:
    """A result cache of the test's own."""
    found = ResultCache(tmp_path / "results")
    monkeypatch.setattr(compile_module, "_cache", lambda: found)
    return found


def stored(cache: ResultCache) -> list[Path]:
    return sorted(cache.folder.rglob("*.json"))


@pytest.mark.libtpu
def test_a_matmul_compiles_for_every_chip(kernels: ModuleType, cache: ResultCache) -> None:
    requests = [
        Request(kernels.tiled_matmul, [MATRIX, MATRIX], resolve(chip), "matmul") for chip in chips()
    ]
    reports = {requests[index].target.name: report for index, report in compile_all(requests)}
    assert list(reports) != []
    for chip, report in reports.items():
        assert report.ok, report
        assert (report.target, report.kernel, report.cached) == (chip, "matmul", False)
        # v4 counts pointers among the arguments, hence the tolerance.
        assert report.hbm_argument_bytes == pytest.approx(2 * 1024 * 1024 * 2, rel=0.01)
        assert report.hbm_output_bytes == pytest.approx(1024 * 1024 * 4, rel=0.01)
        # Two buffers each for two bf16 blocks and the f32 output block, which is revisited.
        blocks = 512 * 512 * (2 * 2 + 2 * 2 + 4)
        assert report.vmem_bytes is not None
        assert blocks <= report.vmem_bytes <= chips()[chip].vmem_default_limit_bytes
        assert report.code_bytes
        assert report.seconds > 0
    # A 512-block takes 32 or 8 passes through the MXUs at least, and the same on the two of 128.
    bundles = {chip: report.bundles or 0 for chip, report in reports.items()}
    assert 300 < bundles["tpu7x"] < bundles["v6e"] < bundles["v5e"] < 5000


@pytest.mark.libtpu
def test_a_result_is_found_again_without_a_worker(
    kernels: ModuleType, cache: ResultCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_function(kernels.increment, [TILE], "v6e", name="first")
    assert len(stored(cache)) == 1
    monkeypatch.setattr(compile_module, "shared_pool", None)  # any use of it would raise
    again = compile_function(kernels.increment, [TILE], "v6e", name="again")
    assert (again.kernel, again.cached, first.cached) == ("again", True, False)
    assert (again.bundles, again.code_bytes) == (first.bundles, first.code_bytes)
    assert "from the cache" in again.text


@pytest.mark.libtpu
def test_target_options_and_program_are_part_of_the_key(
    kernels: ModuleType, cache: ResultCache
) -> None:
    limit = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
    compile_function(kernels.increment, [TILE], "v6e", name="k")
    compile_function(kernels.increment, [TILE], "v5e", name="k")
    compile_function(kernels.double, [TILE], "v6e", name="k")
    compile_function(kernels.increment, [TILE], "v6e", name="k", options=limit)
    assert len(stored(cache)) == 4


@pytest.mark.libtpu
@pytest.mark.parametrize("damage", ["", "{", '{"report": 3}', "[]", '{"report": {"status": "ok"}}'])
def test_a_damaged_entry_is_reported_and_written_anew(
    damage: str, kernels: ModuleType, cache: ResultCache
) -> None:
    compile_function(kernels.increment, [TILE], "v6e", name="k")
    (path,) = stored(cache)
    path.write_text(damage)
    with pytest.warns(CacheCorruption, match="damaged"):
        report = compile_function(kernels.increment, [TILE], "v6e", name="k")
    assert report.ok
    assert not report.cached
    assert json.loads(path.read_text())["report"]["status"] == "ok"


@pytest.mark.libtpu
def test_a_folder_that_cannot_be_written_costs_no_result(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr(compile_module, "_cache", lambda: ResultCache(blocked))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = compile_function(kernels.increment, [TILE], "v6e", name="k")
    assert report.ok
    assert {type(item.message) for item in caught} == {CacheCorruption}


@pytest.mark.libtpu
def test_a_stored_failure_counts_only_at_its_own_line(cache: ResultCache) -> None:
    source = (
        "import jax, jax.numpy as jnp\n"
        "from jax.experimental import pallas as pl\n"
        "def f(x):\n"
        "    def body(a, o):\n"
        "        o[...] = a[...] + 1\n"
        "    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)\n"
    )
    half = jax.ShapeDtypeStruct((8, 128), jnp.float16)
    places = []
    for text in (source, source, "\n\n" + source):
        scope: dict[str, object] = {}
        exec(compile(text, "author.py", "exec"), scope)
        report = compile_function(scope["f"], [half], "v6e", name="f")  # type: ignore[arg-type]
        places.append((report.where, report.cached))
    assert places == [("author.py:5", False), ("author.py:5", True), ("author.py:7", False)]


@pytest.mark.libtpu
def test_dumps_hold_every_form_of_the_program(kernels: ModuleType, tmp_path: Path) -> None:
    report = compile_function(kernels.increment, [TILE], "v6e", name="k", dump=tmp_path / "dump")
    assert report.ok
    files = {file.name: file.read_text() for file in (tmp_path / "dump").iterdir()}
    assert "tpu_custom_call" in files["program.stablehlo.mlir"]
    assert "vector.load" in files["00-body.mosaic.mlir"]
    bundles = [text for name, text in files.items() if name.endswith("-final_bundles.txt")]
    assert any("vadd.f32" in text for text in bundles)


@pytest.mark.libtpu
def test_a_candidate_that_hangs_aborts_or_raises_is_a_report(kernels: ModuleType) -> None:
    import time

    def candidate(kind: str, x: jax.Array) -> jax.Array:
        if kind == "hang":
            while True:
                time.sleep(0.01)
        if kind == "abort":
            os.abort()
        if kind == "raise":
            raise KeyError(kind)  # the author's
        return kernels.increment(x)

    expected = {"hang": "timeout", "abort": "crashed", "raise": "error", "fine": "ok"}
    requests = [
        Request(
            lambda x, kind=kind: candidate(kind, x),
            [TILE],
            resolve("v6e"),
            kind,
            # The good one must also start the compiler within the limit.
            timeout_s=1.0 if kind == "hang" else 60.0,
            isolate=True,
        )
        for kind in expected
    ]
    reports = {report.kernel: report for _, report in compile_all(requests)}
    assert {kind: report.status for kind, report in reports.items()} == expected
    assert reports["hang"].error == "timeout after 1 s"
    assert "SIGABRT" in reports["abort"].text
    assert "# the author's" in (reports["raise"].source_line or "")


@pytest.mark.libtpu
def test_an_isolated_function_shares_the_results_on_disk(
    kernels: ModuleType, cache: ResultCache
) -> None:
    direct = compile_function(kernels.double, [TILE], "v6e", name="k")
    isolated = compile_function(kernels.double, [TILE], "v6e", name="k", isolate=True)
    assert (direct.cached, isolated.cached, len(stored(cache))) == (False, True, 1)


def test_without_the_compiler_the_report_says_how_to_get_it(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "libtpu_version", lambda: None)
    report = compile_function(kernels.increment, [TILE], "v6e", name="k")
    assert (report.status, report.ok) == ("unavailable", False)
    assert 'pip install "tpu_kernels[aot]"' in report.text
    assert "not installed" in report.text


def test_on_another_platform_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "libtpu_version", lambda: None)
    monkeypatch.setattr(versions.platform, "machine", lambda: "arm64")
    report = compile_function(jnp.sin, [TILE], "v6e", name="k")
    assert report.status == "unavailable"
    assert "Linux x86-64 only" in report.text
    assert "arm64" in report.text


def test_an_unknown_target_raises_before_anything_is_done() -> None:
    with pytest.raises(ConfigError, match="v6e"):
        compile_function(jnp.sin, [TILE], "v3", name="k")


def test_reports_survive_json() -> None:
    report = CompileReport("vmem", "v5e", "k", error="e", where="f.py:1", vmem_bytes=1 << 25)
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "f.py:1" in report.text
    assert "32.0 MiB" in report.text


def test_reports_for_several_targets_are_ok_only_together() -> None:
    good, bad = CompileReport("ok", "v6e", "k"), CompileReport("invalid", "v4", "k", error="no")
    both = CompileReports({"v6e": good, "v4": bad})
    assert CompileReports({"v6e": good}).ok
    assert not both.ok
    assert both["v4"] is bad
    assert both.text.count("\n") == 2
    assert json.loads(json.dumps(both.to_dict()))["v4"]["status"] == "invalid"


def _endless(i: Any) -> Any:
    while True:
        time.sleep(0.01)


def _abort(i: Any) -> Any:
    os.abort()


def _leave(i: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("index_map", "status", "line"),
    [
        (_endless, "timeout", "time.sleep(0.01)"),
        (_abort, "crashed", "os.abort()"),
        (_leave, "error", "raise SystemExit(3)"),
    ],
)
def test_code_that_ends_or_stops_its_process_is_named(
    index_map: Any, status: str, line: str, kernels: ModuleType
) -> None:
    report = compile_function(
        lambda x: kernels.mapped(x, index_map),
        [TILE],
        "v6e",
        name="stuck",
        isolate=True,
        timeout_s=3.0 if status == "timeout" else 60.0,
    )
    assert report.status == status
    assert report.source_line == line
    assert "test_compile.py" in (report.where or "")


@pytest.mark.libtpu
def test_a_report_has_scalar_memory_and_the_units_of_the_hot_loop(kernels: ModuleType) -> None:
    indices = jax.ShapeDtypeStruct((1000,), jnp.int32)
    x = jax.ShapeDtypeStruct((32, 128), jnp.float32)
    report = compile_function(kernels.selected_rows, [indices, x], "v6e", name="rows")
    assert report.ok, report
    assert report.smem_bytes == 4000
    assert "SMEM: 3.9 KiB" in report.text
    assert compile_function(kernels.increment, [TILE], "v6e", name="plain").smem_bytes is None
    product = compile_function(
        lambda x: kernels.tiled_matmul(x, x), [MATRIX], "v6e", name="product"
    )
    (line,) = (line for line in product.text.splitlines() if "hot loop of" in line)
    for unit in ("MXU", "XLU", "VALU", "EUP", "loads", "stores"):
        assert unit in line
    assert line.index("MXU") < line.index("EUP")  # a matrix product keeps the matrix unit busy


@pytest.mark.libtpu
def test_out_of_vmem_lists_buffers_and_a_limit_that_suffices(kernels: ModuleType) -> None:
    x = jax.ShapeDtypeStruct((4096, 8192), jnp.float32)
    report = compile_function(lambda x: kernels.rows(x, 512), [x], "v6e", name="rows")
    assert report.status == "vmem"
    assert "input 0 of pallas_call: 2 buffers of float32[512, 8192]: 32.0 MiB" in report.text
    assert report.hint is not None
    limit = int(report.hint.partition("vmem_limit_bytes=")[2].partition(")")[0])
    raised = compile_function(lambda x: kernels.rows(x, 512, limit=limit), [x], "v6e", name="r")
    assert raised.ok, raised
