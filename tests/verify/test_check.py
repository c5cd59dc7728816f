"""`check`: every pass accepts a sound kernel and names the mistake of an unsound one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

import tpu_kernels as tk
from tests.verify import checked_kernels as kernels
from tpu_kernels.compiler import worker_pool
from tpu_kernels.verify.check import DEFAULT_PASSES, check
from tpu_kernels.verify.passes import isolated
from tpu_kernels.verify.passes.tolerance import tolerance
from tpu_kernels.verify.report import CheckReport, CheckReports, CheckRow

HERE = Path(kernels.__file__).name
X = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _warm_workers() -> Iterator[None]:
    with worker_pool():
        yield


def row_of(name: str, kernel: Any, x: torch.Tensor = X, **config: Any) -> CheckRow:
    """The row of one pass."""
    return check(kernel, (x,), passes=(name,), config=config or None).row(name)


def test_a_sound_kernel_passes_everything(capfd: pytest.CaptureFixture[str]) -> None:
    before = jax.config.jax_platforms
    x = torch.randn(20, 128)
    report = check(kernels.triple, (x,), passes=(*DEFAULT_PASSES, "edges", "determinism"))
    assert {row.name: row.status for row in report.rows} == dict.fromkeys(
        (*DEFAULT_PASSES, "edges", "determinism"), "ok"
    ), report.text
    assert report.ok
    assert "with gradients" in report.row("op").what
    assert "4 left over" in report.row("edges").what
    assert capfd.readouterr() == ("", "")
    assert jax.config.jax_platforms == before


def test_a_wrong_result_names_the_element_and_the_tolerance() -> None:
    row = row_of("numerics", kernels.off)
    assert row.status == "failed"
    assert "output 0" in row.what
    assert "accepted 2.4e-06 for float32" in row.what
    assert HERE in (row.where or "")


def test_a_wrong_gradient_names_the_input() -> None:
    assert row_of("numerics", kernels.bad_gradient).status == "ok"
    row = row_of("grad", kernels.bad_gradient)
    assert row.status == "failed"
    assert "gradient of 'x'" in row.what


def test_a_fake_kernel_that_disagrees_fails_opcheck() -> None:
    row = row_of("op", kernels.wrong_fake)
    assert row.status == "failed"
    assert "torch.float32 and torch.float64" in row.what


@pytest.mark.parametrize("name", ["numerics", "grad"])
def test_without_a_reference_there_is_nothing_to_compare(name: str) -> None:
    row = row_of(name, kernels.row_sum)
    assert (row.status, "no reference" in row.what) == ("skipped", True)


def test_the_grid_pass_finds_a_block_that_is_visited_twice() -> None:
    x = torch.ones(16, 256)
    assert row_of("grid", kernels.column_sum, x).status == "ok"
    row = row_of("grid", kernels.column_sum, x, order="first")
    assert "output 0, block (0, 0) is revisited at grid point (1, 0) after (0, 1)" in row.what
    assert "reduction axis (0)" in (row.hint or "")
    assert HERE in (row.where or "")


def test_the_grid_pass_finds_an_axis_wrongly_declared_parallel() -> None:
    row = row_of("grid", kernels.column_sum, torch.ones(16, 256), parallel="yes")
    assert row.status == "failed"
    assert "axis 1 is parallel but output 0 does not depend on it" in row.what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(("mask", "status"), [("none", "failed"), ("select", "ok")])
def test_unmasked_edges_are_found(dtype: torch.dtype, mask: str, status: str) -> None:
    row = row_of("edges", kernels.row_sum, torch.ones(8, 200, dtype=dtype), mask=mask)
    assert row.status == status
    assert "argument 'x'" in row.what
    assert "72 left over, 56 outside" in row.what


def test_a_mask_that_multiplies_is_no_mask() -> None:
    row = row_of("edges", kernels.row_sum, torch.ones(8, 200), mask="multiply")
    assert row.status == "failed"
    assert row_of("edges", kernels.row_sum, torch.ones(8, 256), mask="none").status == "ok"


def test_a_block_outside_its_array_is_found_without_a_run() -> None:
    def shifted(x: jax.Array) -> jax.Array:
        def body(a: Any, o: Any) -> None:
            o[...] = a[...]

        outside = pl.BlockSpec((8, 128), lambda i: (i + 2, 0))  # line of the mistake
        inside = pl.BlockSpec((8, 128), lambda i: (i, 0))
        call = pl.pallas_call(body, out_shape=x, grid=(2,), in_specs=[outside], out_specs=inside)
        return call(x)  # type: ignore[no-any-return]

    row = check(shifted, (torch.ones(16, 128),), passes=("grid",)).row("grid")
    assert row.status == "failed"
    assert "block (2, 0) at grid point (0,) lies outside the array" in row.what
    assert "# line of the mistake" in (row.source_line or "")


def test_reads_out_of_bounds_are_found() -> None:
    report = check(kernels.out_of_bounds, (torch.ones(16, 128),), passes=("races", "bounds", "nan"))
    row = report.row("bounds")
    assert row.status == "failed"
    assert "buffer has shape (16, 128)" in row.what
    assert row.source_line == "o[...] = a[pl.ds(pl.program_id(0) * 8, 8), :]"
    assert report.row("races").status == "skipped"


def test_uninitialised_memory_is_found() -> None:
    report = check(kernels.uninitialised, (X,), passes=("races", "bounds", "nan"))
    assert [row.status for row in report.rows] == ["ok", "ok", "failed"]
    assert "never written" in report.row("nan").what


def test_a_race_names_both_accesses() -> None:
    assert row_of("races", kernels.race).status == "ok"
    row = row_of("races", kernels.race, early="yes")
    assert row.status == "failed"
    assert row.what.count(HERE) == 2
    assert row.source_line == "copy.start()"


def test_a_semaphore_that_stays_signalled_is_found() -> None:
    assert "semaphore leak" in row_of("races", kernels.leak).what


def test_a_kernel_that_does_not_end_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_START_S", 5.0)
    started = time.monotonic()
    report = check(kernels.hang, (torch.ones(12, 128),), passes=("edges",), timeout_s=5.0)
    assert report.row("edges").status == "failed"
    assert "timeout" in report.row("edges").what
    assert time.monotonic() - started < 60


def test_a_copy_that_is_never_waited_for_is_found() -> None:
    row = row_of("races", kernels.race, early="never")
    assert row.status == "failed"
    assert "never waited for" in row.what
    assert row.source_line == "copy.start()"


def test_what_would_hang_this_process_is_not_run_in_it() -> None:
    passes = ("op", "numerics", "races")
    report = check(kernels.deadlock, (X,), passes=passes, timeout_s=2.0)
    assert [row.status for row in report.rows] == ["skipped", "skipped", "failed"]
    assert "timeout after 2 s" in report.row("races").what
    assert "pl.pallas_call" in (report.row("races").source_line or "")


@pytest.mark.parametrize("target", [None, ["v6e", "v5e"]])
def test_an_index_map_that_does_not_end_is_named(target: Any) -> None:
    report = check(kernels.endless_map, (X,), target=target, passes=("grid",), timeout_s=0.5)
    assert not report.ok
    text = report.text
    assert "tracing the kernel: it did not end within 0.5 s" in text
    assert "checked_kernels.py" in text
    assert "while True:" in text or "pass" in text
    assert "ok" not in text


def test_a_mistake_in_the_body_is_told_once_with_its_line() -> None:
    report = check(kernels.transposed, (X,))
    assert [row.status for row in report.rows][:2] == ["failed", "skipped"]
    assert report.rows[0].source_line == "o[...] = a[...].T"


def test_tensors_without_values_cannot_be_run() -> None:
    report = check(kernels.triple, (torch.empty(8, 128, device="meta"),), passes=("numerics",))
    assert report.row("numerics").status == "unavailable"
    assert not report.ok


def test_plain_functions_are_checked_as_far_as_that_goes() -> None:
    report = check(jnp.tanh, (torch.ones(8, 128),))
    assert report.ok
    assert {row.status for row in report.rows} == {"skipped"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"passes": ("speed",)}, tk.ArgumentError, "unknown pass 'speed'"),
        ({"passes": ("compile",)}, tk.ArgumentError, "needs a target"),
        ({"target": []}, tk.ArgumentError, "no target"),
        ({"target": "v9"}, tk.ConfigError, "unknown target"),
    ],
)
def test_a_wrong_call_is_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check(kernels.triple, (X,), **options)


@pytest.mark.libtpu
def test_targets_are_compiled_for() -> None:
    reports = check(kernels.triple, (X,), target=["v5e", "v6e"])
    assert isinstance(reports, CheckReports)
    assert list(reports) == ["v5e", "v6e"]
    assert reports.ok
    assert reports["v6e"].compiled is not None
    assert json.loads(json.dumps(reports.to_dict()))["v5e"]["ok"]
    assert "others" in reports.text  # what was not run is told


@pytest.mark.libtpu
def test_a_kernel_that_cannot_fit_is_refused_at_once() -> None:
    x = torch.empty(4096, 8192, device="meta")
    between = check(kernels.copy_blocks, (x,), config={"rows": 512}, target="v6e")
    assert between.ok
    assert "vmem_limit_bytes" in (between.row("vmem").hint or "")
    started = time.monotonic()
    report = check(kernels.copy_blocks, (x,), config={"rows": 1024}, target="v6e")
    assert time.monotonic() - started < 10  # the compiler takes longer, and nothing was compiled
    assert report.row("compile").status == "skipped"
    assert "128.0 MiB" in report.row("vmem").what
    assert "rows=512 fits" in (report.row("vmem").hint or "")


@pytest.mark.libtpu
def test_a_refused_block_names_the_argument() -> None:
    report = check(kernels.copy_blocks, (torch.ones(64, 200),), config={"rows": 4}, target="v6e")
    assert not report.ok
    assert "argument 'x' (input 0 of pallas_call)" in report.row("compile").what


@pytest.mark.libtpu
def test_a_refusal_while_tracing_is_told_even_where_it_speaks_of_an_input() -> None:
    def ranks(x: jax.Array) -> jax.Array:
        def body(a: Any, o: Any) -> None:
            o[...] = a[...]

        spec = pl.BlockSpec((8,), lambda i: (i,))
        call = pl.pallas_call(body, out_shape=x, grid=(1,), in_specs=[spec], out_specs=spec)
        return call(x)  # type: ignore[no-any-return]

    row = check(ranks, (X,), passes=("grid",), target="v6e").row("compile")
    assert row.status == "failed"
    assert "different numbers of dimensions" in row.what


def test_the_tolerance_grows_with_coarse_dtypes_and_long_sums() -> None:
    fine, coarse = (tolerance([dtype], 1) for dtype in (torch.float32, torch.bfloat16))
    assert fine < 1e-5 < coarse < 0.05
    assert tolerance([torch.float32], 4096) == pytest.approx(
        4 * 2**-23 + 16 * 2**-23 * 64, rel=1e-9
    )
    assert tolerance([torch.int32], 4096) == 0


def test_a_report_is_ok_only_if_everything_was_checked() -> None:
    rows = [CheckRow("grid", "ok"), CheckRow("grad", "skipped", "no reference")]
    assert CheckReport("f", None, tuple(rows)).ok
    assert not CheckReport("f", None, (*rows, CheckRow("nan", "unavailable"))).ok
    assert "failed (nan)" in CheckReport("f", None, (*rows, CheckRow("nan", "failed"))).text
