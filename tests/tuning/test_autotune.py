"""`autotune` from end to end: statuses, the choice, the cache, interruption, isolation."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

from tpu_kernels import tpu_kernel
from tpu_kernels.compiler.pool import worker_pool
from tpu_kernels.errors import ArgumentError, ConfigError, TuningError
from tpu_kernels.registry import reference
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import (
    Progress,
    SimulatedTime,
    TuningCache,
    TuningFallback,
    autotune,
    lookup,
)
from tpu_kernels.tuning.report import TuneReport

WIDE = torch.ones(512, 512)


def matmul_kernel(name: str, **options: Any) -> Kernel:
    @tpu_kernel(name, **options)
    def mm(
        x: jax.Array, y: jax.Array, *, block: tuple[int, int] = (128, 128), unused: int = 0
    ) -> jax.Array:
        bm, bn = block
        if bm == 13:
            raise NotImplementedError("thirteen")
        if bm == 14:
            raise RuntimeError("fourteen")

        def body(a, b, o):
            o[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        (m, k), n = x.shape, y.shape[1]
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
            grid=(pl.cdiv(m, bm), pl.cdiv(n, bn)),
            in_specs=[
                pl.BlockSpec((bm, k), lambda i, j: (i, 0)),
                pl.BlockSpec((k, bn), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        )(x, y)

    return mm


def blocks(*values: Any) -> list[dict[str, Any]]:
    return [{"block": value} for value in values]


def by_block(report: TuneReport) -> dict[Any, str]:
    return {row.config["block"]: row.status for row in report.results}


@pytest.fixture(scope="module", autouse=True)
def warm_workers() -> Iterator[None]:
    """Workers that outlive one search: starting them takes longer than the tests."""
    with worker_pool():
        yield


@pytest.fixture
def fresh_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned configs of one test must not reach kernels of another."""
    monkeypatch.setattr(lookup, "_source", lookup.TunedConfigs())
    monkeypatch.setattr(lookup.config_table, "_sources", [])


@pytest.mark.usefixtures("fresh_lookup")
def test_failures_are_rows_and_the_next_call_uses_the_best(tmp_path: Path) -> None:
    mm = matmul_kernel("tune::rows")
    large = torch.ones(8192, 8192)
    configs = blocks((128, 128), (100, 128), (13, 128), (14, 128), (2048, 2048), (256, 256))
    seen: list[Progress] = []
    report = autotune(
        mm,
        (large, large),
        configs=configs,
        constraints=lambda block: block[0] != 256 or "no 256",
        target="v6e",
        measure="roofline",
        cache=tmp_path,
        progress=seen.append,
    )
    assert by_block(report) == {
        (128, 128): "ok",
        (100, 128): "invalid",
        (13, 128): "unsupported",
        (14, 128): "error",
        (2048, 2048): "vmem",
        (256, 256): "invalid",
    }
    reasons = {row.config["block"]: row.reason for row in report.results}
    assert "multiples of 8 and 128" in reasons[100, 128]
    assert "fourteen" in reasons[14, 128]
    assert "test_autotune.py" in reasons[14, 128]
    assert "MiB" in reasons[2048, 2048]
    assert reasons[256, 256] == "no 256"
    assert [p.done for p in seen] == [1, 2, 3, 4, 5, 6]
    assert report.best is not None
    assert report.best.config == {"block": (128, 128)}
    assert report.stored
    assert "1 of 6 configs work" in report.text
    assert report.to_dict()["best"]["config"] == {"block": [128, 128]}


@pytest.mark.usefixtures("fresh_lookup")
def test_the_next_call_uses_what_was_tuned_for_it(tmp_path: Path) -> None:
    mm = matmul_kernel("tune::next", bucket=lambda x, y: x.shape[0] // 1000)
    assert mm.config_for(WIDE, WIDE).config == {}
    options: dict[str, Any] = {"target": "v6e", "measure": "roofline", "cache": tmp_path}
    report = autotune(mm, (WIDE, WIDE), configs=blocks((8, 128), (256, 256)), **options)
    assert report.best is not None
    assert report.best.config == {"block": (256, 256)}
    choice = mm.config_for(WIDE, WIDE)
    assert (choice.config, choice.provenance) == ({"block": (256, 256)}, "tuned")
    torch.testing.assert_close(mm(WIDE, WIDE), WIDE @ WIDE)
    assert mm.config_for(WIDE[:300], WIDE).provenance == "bucket"
    assert mm.config_for(WIDE.bfloat16(), WIDE).provenance == "default"
    assert mm.config_for(WIDE, WIDE, target="v5e").provenance == "default"
    autotune(mm, (WIDE, WIDE), configs=blocks((8, 128)), **options)
    assert mm.config_for(WIDE, WIDE).config == {"block": (8, 128)}
    report = autotune(mm, (WIDE, WIDE), configs=blocks((16, 128)), store=False, **options)
    assert not report.stored
    assert mm.config_for(WIDE, WIDE).config == {"block": (8, 128)}


def test_identical_programs_share_one_fate(tmp_path: Path) -> None:
    mm = matmul_kernel("tune::same")
    configs = {"block": [(128, 128)], "unused": [0, 1, 2]}
    report = autotune(
        mm, (WIDE, WIDE), configs=configs, target="v6e", measure="roofline", store=False
    )
    first, *copies = report.results
    assert first.same_as is None
    assert [copy.same_as for copy in copies] == [0, 0]
    assert {row.cost for row in report.results} == {first.cost}
    assert report.best is first


def test_strict_raises_with_all_reasons_and_otherwise_the_reference_is_left() -> None:
    mm = matmul_kernel("tune::none")
    large = torch.ones(8192, 8192)
    options: dict[str, Any] = {
        "configs": blocks((100, 128), (2048, 2048)),
        "target": "v6e",
        "measure": "roofline",
    }
    with pytest.raises(TuningError, match="none of 2 configs works for v6e") as caught:
        autotune(mm, (large, large), strict=True, **options)
    assert "(100, 128)" in str(caught.value)
    assert "vmem" in str(caught.value)
    with pytest.warns(TuningFallback, match="its reference is what is left"):
        report = autotune(mm, (large, large), reference=torch.matmul, **options)
    assert (report.best, report.fallback, report.ok) == (None, "reference", False)
    with pytest.warns(TuningFallback):
        assert autotune(mm, (large, large), **options).fallback is None


@pytest.mark.usefixtures("fresh_lookup")
def test_ctrl_c_stops_at_once_and_keeps_the_best_so_far(tmp_path: Path) -> None:
    mm = matmul_kernel("tune::interrupted")
    done = 0

    def interrupt(progress: Progress) -> None:
        nonlocal done
        done = progress.done
        if progress.row.ok:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        autotune(
            mm,
            (WIDE, WIDE),
            configs=blocks((100, 128), (128, 128), (256, 128)),
            target="v6e",
            measure="roofline",
            cache=tmp_path,
            progress=interrupt,
        )
    assert done == 2
    (record,) = TuningCache(tmp_path)
    assert record.config == {"block": [128, 128]}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"configs": {"blok": [1]}}, ConfigError, "'blok'"),
        ({"configs": None}, ConfigError, "no configs to try"),
        ({"measure": "guess"}, ArgumentError, "'guess'"),
        ({"measure": "wall", "target": "v6e"}, ArgumentError, "cannot tell the time"),
        ({"measure": "device"}, SimulatedTime, "nothing about a TPU"),  # warnings are errors here
        ({"measure": "roofline", "target": None}, ArgumentError, "needs a target"),
        ({"target": "v99"}, ConfigError, "v99"),
    ],
)
def test_mistakes_of_the_caller_are_told_before_anything_runs(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    mm = matmul_kernel("tune::mistakes", replace=True)
    with pytest.raises(error, match=message):
        autotune(mm, (WIDE, WIDE), **{"configs": blocks((128, 128)), **options})


def test_only_kernels_can_be_tuned() -> None:
    function: Any = lambda x: x  # noqa: E731
    with pytest.raises(ArgumentError, match="takes a kernel"):
        autotune(function, (WIDE,), configs=[{}])


def children() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(os.getpid()):
                found.add(entry.name)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_lookup")
def test_on_the_cpu_broken_candidates_are_rows_and_no_process_is_left(tmp_path: Path) -> None:
    @tpu_kernel("tune::kinds")
    def kinds(x: jax.Array, *, kind: str = "good") -> jax.Array:
        if kind == "hang":
            while True:
                time.sleep(0.1)
        if kind == "abort":
            os.abort()
        if kind == "raise":
            raise ValueError("not this one")
        if kind == "slow":
            return jax.lax.fori_loop(0, 20, lambda i, y: jnp.tanh(y @ x), x) * 0 + x + 1
        return x + (2 if kind == "wrong" else 1)

    before = children()
    names = ["hang", "abort", "raise", "wrong", "slow", "good"]
    report = autotune(
        kinds,
        (torch.zeros(256, 256),),
        configs={"kind": names},
        reference=lambda x: x + 1,
        timeout_s=5,
        cache=tmp_path,
    )
    assert children() <= before
    rows = {row.config["kind"]: row for row in report.results}
    assert {name: row.status for name, row in rows.items()} == {
        "hang": "timeout",
        "abort": "crashed",
        "raise": "invalid",
        "wrong": "wrong",
        "slow": "ok",
        "good": "ok",
    }
    assert rows["hang"].reason == "timeout after 5 s"
    assert "SIGABRT" in rows["abort"].reason
    assert "not this one" in rows["raise"].reason
    assert "largest error 1" in rows["wrong"].reason
    assert report.best is rows["good"]
    assert rows["good"].time_us is not None
    assert rows["slow"].time_us > rows["good"].time_us
    (record,) = TuningCache(tmp_path)
    assert record.key["target"] == lookup.CPU
    choice = kinds.config_for(torch.zeros(256, 256))
    assert "says nothing about a TPU" in choice.reason


@pytest.mark.libtpu
@pytest.mark.usefixtures("fresh_lookup")
def test_the_tpu_compiler_judges_and_ranks(tmp_path: Path) -> None:
    mm = matmul_kernel("tune::compiled")
    report = autotune(
        mm, (WIDE, WIDE), configs=blocks((8, 128), (256, 256)), target="v6e", cache=tmp_path
    )
    assert by_block(report) == {(8, 128): "ok", (256, 256): "ok"}
    assert report.best is not None
    assert report.best.config == {"block": (256, 256)}
    assert report.best.figures["bundles"] > 0
    assert report.best.cost_unit == "µs (estimated)"
    (record,) = TuningCache(tmp_path)
    assert record.provenance["versions"]["libtpu"]
    assert record.provenance["objective"] == "compiler"


def test_a_spent_budget_skips_what_is_left() -> None:
    mm = matmul_kernel("tune::budget")
    with pytest.warns(TuningFallback):
        report = autotune(mm, (WIDE, WIDE), configs=blocks((128, 128)), budget_s=0.0)
    assert [row.status for row in report.results] == ["skipped"]
    assert "time budget" in report.results[0].reason


def test_kernels_of_modules_travel_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel_with_rules.py").write_text(
        "import jax, threading\n"
        "import tpu_kernels as tk\n"
        "lock = threading.Lock()\n"
        "@jax.custom_vjp\n"
        "def inner(x): return x + 1\n"
        "inner.defvjp(lambda x: (inner(x), None), lambda _, g: (g,))\n"
        "@tk.tpu_kernel('tune::by_name')\n"
        "def by_name(x: jax.Array, *, n: int = 1) -> jax.Array:\n"
        "    with lock:\n"
        "        return inner(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import kernel_with_rules  # type: ignore[import-not-found]

    report = autotune(
        kernel_with_rules.by_name,
        (WIDE,),
        configs={"n": [1]},
        target="v6e",
        measure="roofline",
        store=False,
    )
    assert [row.status for row in report.results] == ["ok"], report.text


def test_results_of_another_dtype_and_wrong_writes_are_wrong(tmp_path: Path) -> None:
    @tpu_kernel("tune::writes", mutates_args=("total",))
    def writes(total: jax.Array, x: jax.Array, *, block: int = 1) -> jax.Array:
        total = total + x * (2 if block == 3 else 1)
        return x.astype(jnp.bfloat16) if block == 2 else x * 1, {"total": total}

    total, x = torch.zeros(4), torch.ones(4)
    report = autotune(
        writes,
        (total, x),
        configs=blocks(1, 2, 3),
        reference=lambda total, x: (x * 1, {"total": total + x}),
        cache=tmp_path,
    )
    assert by_block(report) == {1: "ok", 2: "wrong", 3: "wrong"}
    assert "bfloat16[4], the config in force gives float32[4]" in report.text
    assert total.sum() == 0  # the caller's tensors are as they were


def test_a_reference_may_write_and_return_what_it_wrote_to() -> None:
    @tpu_kernel("tune::adds", mutates_args=("total",))
    def adds(total: jax.Array, x: jax.Array):
        return {"total": total + x}

    values = {"total": torch.zeros(2), "x": torch.ones(2)}
    for function in (
        lambda total, x: total.add_(x),
        lambda total, x: {"total": total + x},
        lambda total, x: (None, {"total": total + x}),
    ):
        given = {name: value.clone() for name, value in values.items()}
        spec = dataclasses.replace(adds.spec, reference=function)
        outputs, written = reference.results(spec, given)
        assert outputs is None
        assert torch.equal(written["total"], torch.ones(2))


def test_a_kernel_that_needs_its_config_has_no_usual_outputs() -> None:
    @tpu_kernel("tune::needs_config")
    def needs_config(x: jax.Array, *, kind: str) -> jax.Array:
        return x + 1

    with pytest.warns(TuningFallback):  # nothing runs: the budget is spent
        report = autotune(needs_config, WIDE, configs={"kind": ["a"]}, budget_s=0.0, store=False)
    assert [row.status for row in report.results] == ["skipped"]
