"""Sizes within bounds: few programs for many sizes, and no result that padding has reached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tpu_kernels as tk
import tpu_kernels.device
from tpu_kernels.backends import graphs
from tpu_kernels.backends.buckets import bucket
from tpu_kernels.errors import ArgumentError


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@given(high=st.integers(2, 5000), low=st.integers(2, 5000), data=st.data())
def test_buckets_hold_their_sizes_with_little_to_spare(
    high: int, low: int, data: st.DataObject
) -> None:
    low, high = sorted((low, high))
    size = data.draw(st.integers(low, high))
    found = bucket(size, low, high)
    assert size <= found <= high
    assert found == low or 2 * found <= 3 * size
    assert bucket(found, low, high) == found


def results(function: Callable[..., Any], sizes: tuple[int, ...], *more: torch.Tensor) -> list[str]:
    """Run compiled at some sizes, compare with eager; return the reasons not to pad."""
    step = torch.compile(function, backend="tpu", fullgraph=True)
    before = tk.compile_stats()
    for n in sizes:
        x = torch.linspace(-2, 2, n * 12).reshape(n, 3, 4)
        tk.mark_dynamic(x, 0, min=3, max=64)
        with torch.no_grad():
            found, expected = step(x, *more), function(x, *more)
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)),
                        strict=True):  # fmt: skip
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, equal_nan=True)
    after = tk.compile_stats()
    return [r for r, n in after.unpadded.items() if n > before.unpadded.get(r, 0)]


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    # Zeros, which padding is, have no logarithm: what is there must not see it.
    "rows": lambda x: ((x * x).log().softmax(-1), x.sum(1), x.amax((1, 2)), x.cumsum(2)),
    "views": lambda x: (
        x.view(-1, 4).exp().view(x.shape).transpose(0, 1).contiguous(),
        x.permute(1, 0, 2).reshape(3, -1),
        x.permute(1, 0, 2)[1:].unsqueeze(0).squeeze(0),
    ),
    "products": lambda x: (x @ x.mT, x.flatten(0, 1) @ torch.ones(4, 2), x + torch.ones(4)),
    "made": lambda x: (torch.arange(x.shape[0])[:, None] + x[:, 0], x.new_zeros(x.shape[0], 2)),
    "joined": lambda x: torch.cat([x, -x], 1),
    "norm": lambda x: (F.layer_norm(x, (4,)), F.gelu(x).mean(-1)),
}
LOST: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sum": (lambda x: x.sum(0), "sum"),
    "mean": (lambda x: x.mean(), "mean"),
    "softmax": (lambda x: x.softmax(0), "_softmax"),
    "product": (lambda x: x.flatten(1).t() @ x.flatten(1), "mm"),
    "number": (lambda x: x / x.shape[0], "number"),
    "number of another": (lambda x: (x * 2, torch.ones(2) * x.shape[0]), "number"),
    "number as index": (lambda x: (x * 2, torch.arange(70.0)[x.shape[0]] + 1), "number"),
    "flip": (lambda x: x.flip(0), "flip"),
    "join": (lambda x: torch.cat([x, x], 0), "cat"),
    "part": (lambda x: x[1:], "slice"),
    "last": (lambda x: x[-1] + 1, "select"),
    "random": (lambda x: F.dropout(x, 0.0, True) + torch.rand(x.shape) * 0, "outside"),
}


@pytest.mark.parametrize("name", KEPT)
def test_padding_where_rows_are_kept_apart(name: str) -> None:
    before = tk.compile_stats()
    assert results(KEPT[name], (5, 6, 7)) == []
    after = tk.compile_stats()
    assert after.padded - before.padded == 2  # 6 is a bucket of its own
    assert after.specialisations - before.specialisations == 2


@pytest.mark.parametrize("name", LOST)
def test_no_padding_where_it_would_reach_a_result(name: str) -> None:
    function, reason = LOST[name]
    before = tk.compile_stats().padded
    reasons = results(function, (5, 7))
    assert [r for r in reasons if reason in r], reasons
    assert tk.compile_stats().padded == before


def test_a_model_with_a_dynamic_batch(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 16), layer, nn.Linear(16, 3)).to("tpu")
    step = torch.compile(model.train(), backend="tpu", fullgraph=True)
    before = tk.compile_stats()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger=graphs.log.name):
        for n in (5, 6, 7, 8):
            tokens = torch.randint(0, 20, (n, 4), device="tpu")
            tk.mark_dynamic(tokens, 0, max=32)
            torch.testing.assert_close(step(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    after = tk.compile_stats()
    assert after.specialisations - before.specialisations == 2
    assert after.unpadded == before.unpadded
    assert not caplog.records


def test_bounds_that_cannot_be_are_refused() -> None:
    x = torch.ones(5, 3)
    for wrong in ({"dim": 2, "max": 9}, {"dim": 0, "max": 4}, {"dim": 0, "min": 1, "max": 9}):
        with pytest.raises(ArgumentError, match="mark_dynamic"):
            tk.mark_dynamic(x, **wrong)
