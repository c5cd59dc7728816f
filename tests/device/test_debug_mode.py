"""Debug mode: indices, the first NaN, kernels; each with the line of the program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl

import tpu_kernels as tk
import tpu_kernels.device
from tpu_kernels.errors import BoundsError, CheckError, NonFiniteError, NonFiniteWarning

tpu: Any = torch.tpu  # type: ignore[attr-defined]
DEBUG = tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


@pytest.fixture
def debugging() -> Iterator[None]:
    with tpu.set_eager_mode(DEBUG):
        yield


def here() -> str:
    """The line after the caller's."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + 2}"


def on_tpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).to("tpu")


@pytest.mark.usefixtures("debugging")
def test_the_first_nan_is_told_with_operator_and_line() -> None:
    x = on_tpu(-1.0, 4.0)
    line = here()
    with pytest.raises(NonFiniteError, match="aten::sqrt made 1 NaN") as caught:
        torch.sqrt(x)
    assert caught.value.where == line


@pytest.mark.usefixtures("debugging")
def test_values_that_were_not_finite_before_are_left_alone() -> None:
    x = on_tpu(float("nan"), float("inf"))
    assert torch.isnan((x - x) * 2).all()
    y = on_tpu(1.0, 2.0)
    y.masked_fill_(y > 1, float("-inf"))
    assert torch.softmax(y, 0).tolist() == [1, 0]
    assert torch.full((2,), float("inf"), device="tpu").isinf().all()
    y.add_(1)  # what it writes to was infinite


@pytest.mark.usefixtures("debugging")
def test_the_first_infinity_warns() -> None:
    x = on_tpu(0.0, 1.0)
    line = here()
    with pytest.warns(NonFiniteWarning, match="aten::log made 1 infinite") as caught:
        torch.log(x)
    assert str(caught[0].message).endswith(line)


@pytest.mark.usefixtures("debugging")
def test_a_nan_in_place_is_found() -> None:
    x = on_tpu(0.0)
    with pytest.raises(NonFiniteError, match=r"aten::div_\.Tensor"):
        x.div_(on_tpu(0.0))


def test_a_nan_of_the_backward_is_told_with_the_line_of_the_forward() -> None:
    with tpu.set_eager_mode(DEBUG):
        x = on_tpu(0.0).requires_grad_()
        line = here()
        zero = x * 1.0
        y = torch.sqrt(zero) * 0  # its derivative is 0 x infinity
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(NonFiniteError, match=r"in \w+Backward") as caught:
                y.backward()
    assert caught.value.where is not None
    file, _, number = caught.value.where.rpartition(":")
    assert file == __file__
    assert int(number) == int(line.rpartition(":")[2])
    assert not torch.is_anomaly_enabled()


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: F.embedding(i, torch.ones(3, 2, device="tpu")), "5 .* a table of 3 rows"),
        (lambda i: torch.ones(3, 2, device="tpu")[i], "5 .* dimension 0 of size 3"),
        (lambda i: torch.ones(2, 3, device="tpu")[:, i], "5 .* dimension 1 of size 3"),
        (lambda i: torch.ones(3, device="tpu").gather(0, i), "5 .* dimension 0"),
        (lambda i: torch.ones(3, device="tpu").index_select(0, i), "5 .* dimension 0"),
        (lambda i: torch.ones(3, device="tpu").scatter_(0, i, 1.0), "5 .* dimension 0"),
        (lambda i: torch.ones(3, device="tpu").take(i), "5 .* 3 elements"),
        (lambda i: F.cross_entropy(torch.ones(2, 3, device="tpu"), i), "5 .* 3 classes"),
    ],
)
def test_an_index_out_of_bounds_is_told_with_the_line(call: Any, message: str) -> None:
    index = torch.tensor([0, 5]).to("tpu")
    with pytest.raises(BoundsError, match=f"index {message}") as caught:
        call(index)
    assert caught.value.where is not None
    assert caught.value.where.startswith(__file__)


@pytest.mark.usefixtures("debugging")
def test_indices_that_are_allowed_pass() -> None:
    x = torch.arange(6.0, device="tpu").reshape(2, 3)
    last = torch.tensor([-1]).to("tpu")
    assert x[last].tolist() == [[3, 4, 5]]
    assert x[x > 4].tolist() == [5]
    target = torch.tensor([1, -100]).to("tpu")
    assert F.cross_entropy(x, target).isfinite()


@tk.tpu_kernel("test_debug::half_written")
def half_written(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[:4, :] = x_ref[:4, :]

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@tk.tpu_kernel("test_debug::fine")
def fine(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.maximum(x_ref[...], 0)

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.usefixtures("debugging")
def test_kernels_are_checked_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_kernels.verify import on_call

    calls = []
    check = on_call.check
    monkeypatch.setattr(on_call, "check", lambda *a, **k: calls.append(a) or check(*a, **k))
    x = torch.ones(8, 128, device="tpu")
    for _ in range(3):
        assert fine(x).sum().item() == 1024
    assert len(calls) == 1
    for _ in range(2):
        with pytest.raises(CheckError, match="memory that was never written") as caught:
            half_written(x)
        assert caught.value.where is not None
        assert caught.value.where.startswith(__file__)
    assert len(calls) == 2


def test_strict_mode_checks_nothing() -> None:
    assert torch.sqrt(on_tpu(-1.0)).isnan().all()
