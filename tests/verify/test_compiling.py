"""`compile` for functions and kernels."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

from tpu_kernels.compiler import CompileReport, CompileReports, worker_pool
from tpu_kernels.errors import ArgumentError, ConfigError, DTypeError
from tpu_kernels.verify.compiling import compile

X = torch.zeros(64, 256)


def scale(x: jax.Array, factor: float = 2.0, *, rows: int = 8) -> jax.Array:
    def body(a, o):
        o[...] = a[...] * factor

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // rows,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


@pytest.fixture(scope="module", autouse=True)
def _warm_workers():
    with worker_pool():
        yield


@pytest.mark.libtpu
@pytest.mark.parametrize(
    "x",
    [
        X,
        X.numpy(),
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
        X.to("meta"),
        X.t().contiguous().t(),
    ],
    ids=["torch", "numpy", "aval", "meta", "transposed"],
)
def test_of_an_argument_only_shape_and_dtype_count(x: object) -> None:
    report = compile(scale, (x, 3.0), "v6e")
    assert isinstance(report, CompileReport)
    assert report.ok, report
    assert report.kernel == "scale"
    assert report.hbm_argument_bytes == 64 * 256 * 4


@pytest.mark.libtpu
def test_config_and_keywords_reach_the_function() -> None:
    report = compile(scale, (X,), "v6e", config={"rows": 12}, factor=1.5)
    assert report.status == "invalid"
    assert "(12, 256)" in report.text
    assert report.where is not None
    assert Path(__file__).name in report.where


@pytest.mark.libtpu
def test_several_targets_give_a_mapping() -> None:
    reports = compile(scale, (X.to(torch.float16),), ["v5e", "v6e:2x2"])
    assert isinstance(reports, CompileReports)
    assert list(reports) == ["v5e", "v6e"]
    assert not reports.ok
    assert all(report.status == "unsupported" for report in reports.values())
    assert json.loads(json.dumps(reports.to_dict()))["v5e"]["status"] == "unsupported"


@pytest.mark.libtpu
def test_each_of_several_targets_has_its_dump(tmp_path: Path) -> None:
    compile(scale, (X,), ["v5e", "v6e"], dump=tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {"v5e-2x2", "v6e-2x2"}


def test_a_function_that_raises_is_a_report_with_its_line() -> None:
    def broken(x: jax.Array) -> jax.Array:
        return x + undefined_name  # noqa: F821

    report = compile(broken, (X,), "v6e")
    assert not report.ok
    if report.status != "unavailable":
        assert "NameError" in report.text
        assert "undefined_name" in (report.source_line or "")


def test_wide_dtypes_are_refused_by_name() -> None:
    with pytest.raises(DTypeError, match="int64"):
        compile(jnp.sin, (torch.zeros(8, 128, dtype=torch.int64),), "v6e")


def test_unknown_and_missing_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="v6e"):
        compile(jnp.sin, (X,), "v3")
    with pytest.raises(ArgumentError, match="target"):
        compile(jnp.sin, (X,), [])


@pytest.mark.libtpu
def test_a_registered_kernel_is_compiled_with_the_targets_own_config() -> None:
    from tpu_kernels.registry.decorator import tpu_kernel

    kernel = tpu_kernel("test_compiling::scale")(scale)
    good = compile(kernel, (X,), "v6e", config={"rows": 16})
    assert good.ok, good
    assert good.kernel == "test_compiling::scale"
    bad = compile(kernel, (X,), "v6e", config={"rows": 12})
    assert bad.status == "invalid"
    assert Path(__file__).name in (bad.where or "")
