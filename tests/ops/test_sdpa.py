"""`torch.nn.functional.scaled_dot_product_attention` by `tpu::attention`, on the device "tpu"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tpu_kernels.device  # noqa: F401
from tpu_kernels.errors import OverrideError
from tpu_kernels.ops import use_attention
from tpu_kernels.ops.sdpa import suits

FUSED = torch.ops.aten._scaled_dot_product_fused_attention_overrideable


def qkv(heads: int = 4, kv_heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, n, 24, 16) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=generator) for size in sizes]


def with_gradients(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.device)
    return [out.detach().cpu()] + [
        g.cpu() for g in torch.autograd.grad((out * weights).sum(), leaves)
    ]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_eager_calls_and_their_gradients_are_answered_by_the_kernel() -> None:
    inputs = qkv(4, 2)
    wanted = with_gradients(causal, inputs)
    with use_attention() as overrides:
        got = with_gradients(causal, [x.to("tpu") for x in inputs])
    assert_same(got, wanted)
    assert overrides.hits == 1
    assert overrides.last_decline is None


@pytest.mark.parametrize("backend", ["aot_eager", "tpu"])
def test_compiled_graphs_contain_the_kernel(backend: str) -> None:
    inputs = qkv(4, 2)
    wanted = with_gradients(causal, inputs)
    torch._dynamo.reset()
    with use_attention() as overrides:
        got = with_gradients(torch.compile(causal, backend=backend), [x.to("tpu") for x in inputs])
    assert_same(got, wanted)
    assert overrides.hits > 0


def test_the_fused_operators_of_aten_are_answered_too() -> None:
    inputs = qkv()
    mask = torch.rand(2, 1, 24, 24) > 0.3
    wanted = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), inputs
    )
    on_device = mask.to("tpu")
    with use_attention() as overrides:
        got = with_gradients(
            lambda q, k, v: FUSED(q, k, v, on_device)[0], [x.to("tpu") for x in inputs]
        )
    assert_same(got, wanted)
    hits = {name: member.hits for name, member in overrides.members.items()}
    assert list(hits.values()) == [0, 1, 1]


def test_dropout_follows_the_generator_and_its_backward_drops_the_same() -> None:
    q, k, _ = (x.to("tpu") for x in qkv())
    # With the identity as values the output is the weights themselves: what was dropped is seen.
    v = torch.eye(24).expand(2, 4, 24, 24).to("tpu").requires_grad_()
    with use_attention() as overrides:
        torch.manual_seed(3)
        first = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        torch.manual_seed(3)
        again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        other = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        (grad,) = torch.autograd.grad(first.sum(), v)
    assert overrides.hits == 3
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    dropped = (first == 0).float().mean()
    assert 0.3 < dropped < 0.5
    # The gradient of the sum with respect to a value is the sum of the weights that it got.
    torch.testing.assert_close(grad[..., 0], first.detach().sum(dim=2))


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_dimensions_work_as_in_torch(rank: int) -> None:
    q, k, v = (x[0, 0] if rank == 2 else x[0] for x in qkv())
    wanted = F.scaled_dot_product_attention(q, k, v)
    with use_attention(device="cpu") as overrides:
        got = F.scaled_dot_product_attention(q, k, v)
    assert overrides.hits == 1
    torch.testing.assert_close(got, wanted)


X = torch.ones(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([X.double()] * 3, "float64"),
        ([X, X[:, :2], X[:, :2]], "4, 2 and 2 heads"),
        ([X, X[:1], X[:1]], "batches"),
        ([X, X[:, :, :0], X[:, :, :0]], "empty"),
        ([X, X, X, torch.ones(8, 8), 0.0, True], "beside is_causal"),
        ([X, X, X, torch.ones(8, 8, requires_grad=True), 0.5], "with dropout"),
    ],
)
def test_what_the_kernel_does_not_compute_is_declined_with_the_reason(
    arguments: list[Any], words: str
) -> None:
    assert words in str(suits(*arguments))


def test_a_declined_call_is_torchs_own() -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64, device="tpu")
    wanted = F.scaled_dot_product_attention(q, q, q)
    with use_attention() as overrides:
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), wanted)
    assert overrides.hits == 0
    assert "float64" in str(overrides.last_decline)


def test_the_switch_holds_until_it_is_undone() -> None:
    q = torch.randn(1, 2, 8, 4, device="tpu")
    overrides = use_attention().enable()
    F.scaled_dot_product_attention(q, q, q)
    overrides.disable()
    F.scaled_dot_product_attention(q, q, q)
    assert overrides.hits == 1
    overrides.remove()
    with pytest.raises(OverrideError, match="removed"):
        overrides.enable()
