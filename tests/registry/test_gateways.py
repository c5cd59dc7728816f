"""Parts of operators that a backend runs in one piece, told on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpu_kernels as tk
from tpu_kernels import _compat_torch
from tpu_kernels.registry.overrides import gateways
from tpu_kernels.registry.overrides.gateways import Gateway, ResultRule

WHOLE, PART = "aten::native_layer_norm", "aten::mul.Tensor"
x = torch.randn(4, 8)


@pytest.fixture
def one_piece(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A backend that runs a norm in one piece; what ran in its place."""
    ran: list[str] = []

    def express(a: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        ran.append("parts")
        mean = a.mean(-1, keepdim=True)
        scale = ((a - mean).pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return (a - mean) * scale, mean, scale

    monkeypatch.setattr(gateways, "_gateways", {})
    monkeypatch.setattr(gateways, "_rules", {})
    gateways.add_gateway(
        Gateway(WHOLE, frozenset({PART}), express, lambda *args: args[4] < 1, device="cpu")
    )
    return ran


def norm(eps: float = 1e-5) -> torch.Tensor:
    return torch.native_layer_norm(x, [8], None, None, eps)[0]


def plus_one(a: Any, b: Any, fallback: Any) -> Any:
    return fallback(a, b) + 1


def test_the_whole_is_expressed_as_long_as_a_part_is_overridden(one_piece: list[str]) -> None:
    plain = norm()
    handle = tk.override(PART, plus_one, device="cpu")
    table = _compat_torch.dispatch_table(torch.ops.aten.native_layer_norm.default)
    assert norm().equal(plain)
    for _ in range(2):
        with handle:
            changed = norm()
        torch.testing.assert_close(changed, plain + 1)
        assert norm().equal(plain)
    handle.enable()
    changed = norm()
    handle.disable()
    torch.testing.assert_close(changed, plain + 1)
    assert norm().equal(plain)
    assert one_piece == ["parts"] * 3
    assert handle.hits == 3
    assert _compat_torch.dispatch_table(torch.ops.aten.native_layer_norm.default) == table


def test_calls_that_cannot_be_expressed_stay_whole(one_piece: list[str]) -> None:
    plain = norm(2.0)
    with tk.override(PART, plus_one, device="cpu") as handle:
        assert norm(2.0).equal(plain)
    assert (one_piece, handle.hits) == ([], 0)


def test_an_override_of_the_whole_comes_first(one_piece: list[str]) -> None:
    def whole(a: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        return a + 7, a, a

    with (
        tk.override(WHOLE, whole, device="cpu"),
        tk.override(PART, plus_one, device="cpu", priority=5),
    ):
        assert norm().equal(x + 7)
        listed = {record.op for record in tk.overrides() if record.scope != "off"}
    assert one_piece == []
    assert listed == {WHOLE, "aten::mul.Tensor"}


def test_other_overrides_need_no_gateway(one_piece: list[str]) -> None:
    with tk.override("aten::exp", lambda a: a, device="cpu"):
        norm()
    assert one_piece == []


def test_removing_the_override_removes_what_it_brought(one_piece: list[str]) -> None:
    with tk.override(PART, plus_one, device="cpu") as handle:
        handle.remove()
        norm()
    norm()
    assert one_piece == []


def test_results_are_as_the_backend_wants_them(one_piece: list[str]) -> None:
    gateways.add_result_rule(ResultRule(PART, torch.zeros_like, "cpu"))
    with tk.override(PART, plus_one, device="cpu"):
        assert torch.mul(x, x).eq(0).all()
