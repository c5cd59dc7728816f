"""The smallest failing call: found without help, reproducible, and failing in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpu_kernels as tk
from tests.verify import checked_kernels as kernels
from tpu_kernels.verify import shrink
from tpu_kernels.verify.calls import GivenCall, simple_tensors, snippet
from tpu_kernels.verify.check import check
from tpu_kernels.verify.report import CheckRow


def _reference(x: torch.Tensor, y: torch.Tensor, scale: float, axis: int) -> torch.Tensor:
    return x @ y * scale


@tk.tpu_kernel("shrink_test::product", reference=_reference)
def product(x: jax.Array, y: jax.Array, scale: float, axis: int) -> jax.Array:
    """Wrong from the 40th row on, where the axis is not 0."""
    wrong = jnp.arange(x.shape[0])[:, None] >= 40
    return x @ y * scale + jnp.where(wrong, float(axis), 0.0)


@tk.tpu_kernel("shrink_test::negative", reference=lambda x: x.abs())
def negative(x: jax.Array) -> jax.Array:
    """Wrong for negative numbers only."""
    return x


def smallest(kernel: Any, *args: Any, name: str = "numerics", **options: Any) -> str:
    """The text of the smallest failing call of one pass."""
    return check(kernel, args, passes=(name,), shrink_s=60.0, **options).row(name).smallest or ""


def test_sizes_of_several_arguments_shrink_together() -> None:
    x, y = torch.randn(64, 96), torch.randn(96, 200)
    found = smallest(product, x, y, 3.0, 7)
    assert "from tests.verify.test_shrink import product" in found
    # 48 rows are the half of 96 that still reaches the fortieth; nothing else matters.
    call = next(line for line in found.splitlines() if line.startswith("tk.check("))
    report: Any = eval(call, {"tk": tk, "torch": torch, "product": product})
    assert not report.ok
    assert "torch.zeros(" in call
    assert ", 0.0, 1)" in call


def test_the_search_is_deterministic() -> None:
    x, y = torch.randn(64, 96), torch.randn(96, 200)
    assert smallest(product, x, y, 3.0, 7) == smallest(product, x, y, 3.0, 7)


def test_values_that_matter_stay() -> None:
    found = smallest(negative, torch.tensor([[3.0, -2.5], [1.0, 4.0]]))
    assert "torch.tensor([[-2.5]" in found or "randn" in found


@pytest.mark.slow
def test_an_edge_shrinks_to_one_block_and_a_bit() -> None:
    found = smallest(kernels.row_sum, torch.ones(8, 200), name="edges", config={"mask": "none"})
    call = next(line for line in found.splitlines() if line.startswith("tk.check("))
    # Eight rows fill the block: with fewer, the rows would overhang as well, another failure.
    assert "(torch.zeros(8, 1),)" in call
    assert "config={'mask': 'none'}" in call


def test_nothing_is_searched_unless_asked_for() -> None:
    assert check(kernels.off, (torch.ones(8, 128),), passes=("numerics",)).rows[0].smallest is None
    row = check(kernels.triple, (torch.ones(8, 128),), passes=("numerics",), shrink_s=9).rows[0]
    assert (row.status, row.smallest) == ("ok", None)


def test_the_report_ends_with_the_call() -> None:
    row = CheckRow("edges", "failed", "what", hint="do", smallest="from k import f\ntk.check(f)")
    assert row.text.endswith(
        "smallest failing call found:\n      from k import f\n      tk.check(f)"
    )


def _judge(monkeypatch: pytest.MonkeyPatch, fails: Callable[[GivenCall], bool]) -> list[GivenCall]:
    """Replace the passes by a function of the call; the calls that it saw."""
    seen: list[GivenCall] = []

    def run(names: Any, call: Any) -> list[CheckRow]:
        seen.append(call)
        return [CheckRow("edges", "failed" if fails(call) else "ok", "wrong at 7")]

    monkeypatch.setattr(shrink.running, "run", run)
    return seen


def test_the_search_ends_after_a_number_of_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    call = GivenCall(tuple(torch.zeros(100 + i, 50 + i) for i in range(9)), {})
    seen = _judge(monkeypatch, lambda call: False)
    rows = [CheckRow("edges", "failed", "wrong at 7")]
    (row,) = shrink.with_smallest(rows, abs, call, lambda call: call, 60.0)  # type: ignore[arg-type, return-value]
    assert len(seen) == shrink.MOST_TRIES
    assert "args[8]" not in (row.smallest or "") or "zeros" in (row.smallest or "")


def test_integers_follow_the_size_that_they_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    call = GivenCall((torch.zeros(96, 4), 96), {"flag": True}, {"block": 32})
    _judge(monkeypatch, lambda call: call.args[0].shape[0] == call.args[1] >= 3)
    rows = [CheckRow("edges", "failed", "wrong at 7")]
    (row,) = shrink.with_smallest(rows, abs, call, lambda call: call, 60.0)  # type: ignore[arg-type, return-value]
    assert "(torch.zeros(3, 1), 3)" in (row.smallest or "")
    assert "flag=False" in (row.smallest or "")
    assert "config={'block': 0}" in (row.smallest or "")


def test_large_values_are_written_as_parts_of_the_authors_own() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    given = GivenCall(([x, None], 1.5), {"y": x})
    call = given.replaced({(0, 0): x[:8], ("y",): x[:, :8]})
    assert "([args[0][0][:8, :], None], 1.5), passes=('nan',), y=kwargs['y'][:, :8])" in snippet(
        kernels.triple, call, given, "nan"
    )


def test_simple_tensors_keep_dtype_and_gradient() -> None:
    like = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    found = list(simple_tensors(like))
    assert {(t.dtype, t.shape, t.requires_grad) for t in found} == {
        (torch.bfloat16, torch.Size((2, 3)), True)
    }
    assert len(list(simple_tensors(torch.zeros(2, dtype=torch.int8)))) == 3
