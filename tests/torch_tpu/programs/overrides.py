"""Overrides on TorchTPU: where they must sit to be reached in every mode, and that they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

import tpu_kernels as tk
from tests.torch_tpu.programs.kernels import MODES, compiled, device_module, raises
from tpu_kernels import _compat_torch

torch.manual_seed(0)
x, w, b = (torch.randn(*shape).to("tpu") for shape in ((16, 32), (8, 32), (8,)))
q, k, v = (torch.randn(2, 4, 16, 64).to("tpu") for _ in range(3))


@tk.tpu_kernel("tto::product")
def product(a: jax.Array, c: jax.Array) -> jax.Array:
    # A sine in the module tells that this, and not TorchTPU's own product, is in it.
    return jnp.matmul(a, c, precision="highest") + 0 * jnp.sin(a[:1, :1])


def batched(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.stack([product(a[i], c[i]) for i in range(a.shape[0])])


def close(actual: Any, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual.detach().cpu(), expected.detach(), atol=tolerance, rtol=tolerance
    )


def everywhere(handle: Any, fn: Callable[..., torch.Tensor], args: Sequence[torch.Tensor]) -> str:
    """Run with and without gradients, in each mode; check values and that it was used each time.

    Returns the StableHLO of the compiled forward. Values differ from the CPU's by the rounding of
    float32 sums (1e-5 of values below 100), gradients of squares by that times the values.
    """
    on_cpu = [a.cpu() for a in args]
    expected = fn(*on_cpu)
    used = []

    def run(call: Callable[..., Any], *arguments: torch.Tensor) -> torch.Tensor:
        before = handle.hits
        result = call(*arguments)
        used.append(handle.hits - before)
        return result  # type: ignore[no-any-return]

    with torch.no_grad():
        for mode in MODES:
            with device_module.set_eager_mode(mode):
                close(run(fn, *args), expected, 1e-3)
        told: list[Any] = []

        def in_graph(*arguments: torch.Tensor) -> torch.Tensor:
            result, reports = compiled(fn, *arguments)
            told.extend(reports)
            return result  # type: ignore[no-any-return]

        close(run(in_graph, *args), expected, 1e-3)
    with torch.inference_mode():
        close(run(fn, *(a.clone() for a in args)), expected, 1e-3)
    wanted = [a.clone().requires_grad_() for a in on_cpu]
    fn(*wanted).pow(2).sum().backward()
    for call in (fn, lambda *arguments: compiled(fn, *arguments)[0]):
        leaves = [a.clone().requires_grad_() for a in args]
        run(call, *leaves).pow(2).sum().backward()
        for leaf, reference in zip(leaves, wanted, strict=True):
            assert leaf.grad is not None
            assert reference.grad is not None
            close(leaf.grad, reference.grad, 1e-2)
    assert all(used), used
    (text,) = told[0].stablehlo_forward_text
    return str(text)


def check_mm_and_the_linear_without_bias() -> None:
    for fn, args in ((torch.mm, (x, w.t())), (F.linear, (x, w))):
        with tk.override("aten::mm", product) as handle:
            assert "stablehlo.sine" in everywhere(handle, fn, args)


def check_addmm_and_the_linear_with_bias() -> None:
    def impl(bias: torch.Tensor, a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return product(a, c) + bias

    with tk.override("aten::addmm", impl) as handle:
        assert "stablehlo.sine" in everywhere(handle, F.linear, (x, w, b))


def check_bmm_and_baddbmm() -> None:
    z = torch.randn(2, 16, 16).to("tpu")
    with tk.override("aten::bmm", batched) as handle:
        everywhere(handle, lambda a, c: torch.matmul(a, c.transpose(1, 2)), (z, z + 1))
    with tk.override("aten::baddbmm", lambda bias, a, c: bias + batched(a, c)) as handle:
        everywhere(handle, torch.baddbmm, (z, z, z + 1))


def check_linear_itself() -> None:
    def impl(a: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        out = product(a, weight.t())
        return out if bias is None else out + bias

    with tk.override("aten::linear", impl) as handle:
        assert "stablehlo.sine" in everywhere(handle, F.linear, (x, w, b))


def check_rms_norm_whole_and_fused() -> None:
    def fused(a: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        scale = torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + (eps or 1e-6))
        return a * scale if weight is None else a * scale * weight, scale

    def whole(a: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        return fused(a, shape, weight, eps)[0]

    for name, impl in (("aten::_fused_rms_norm", fused), ("aten::rms_norm", whole)):
        with tk.override(name, impl) as handle:
            everywhere(handle, lambda a, weight: F.rms_norm(a, (32,), weight, 1e-6), (x, w[0]))


def attention(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores + mask
    if causal:
        lower = torch.ones(scores.shape[-2:], device=scores.device).tril()
        scores = scores.masked_fill(lower == 0, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def nine(output: torch.Tensor, logsumexp: torch.Tensor) -> tuple[Any, ...]:
    """The results of torch's attention operators, of which most say nothing here."""
    length, seed = output.shape[-2], torch.zeros((), dtype=torch.int64, device=output.device)
    return output, logsumexp, None, None, length, length, seed, seed, None


def overrideable(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> Any:
    return nine(*attention(query, key, value, attn_bias, is_causal, scale))


def check_attention_by_the_operator_for_backends() -> None:
    name = "aten::_scaled_dot_product_fused_attention_overrideable"
    mask = torch.randn(2, 4, 16, 16).to("tpu")
    few_heads = (q, k[:, :2].contiguous(), v[:, :2].contiguous())

    def causal(*args: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)

    for fn, args in (
        (causal, few_heads),
        (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (q, k, v, mask)),
    ):
        with tk.override(name, overrideable) as handle:
            everywhere(handle, fn, args)


def check_attention_itself() -> None:
    def impl(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        return attention(query, key, value, attn_mask, is_causal, scale)[0]

    with tk.override("aten::scaled_dot_product_attention", impl) as handle:
        everywhere(handle, lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), (q, k, v))


def check_attention_by_the_operator_that_torch_tpu_prefers() -> None:
    """Its log-sum-exp needs a last axis of one, or TorchTPU's lowering ends the process."""

    def impl(
        query: Any,
        key: Any,
        value: Any,
        attn_bias: Any,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: Any = None,
    ) -> Any:
        return nine(*attention(query, key, value, attn_bias, is_causal, scale))

    def causal(*args: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*args, is_causal=True)

    expected = causal(q.cpu(), k.cpu(), v.cpu())
    torch.backends.cuda.enable_flash_sdp(True)
    try:
        with (
            torch.no_grad(),
            tk.override("aten::_scaled_dot_product_cudnn_attention", impl) as handle,
        ):
            close(causal(q, k, v), expected, 1e-3)
            close(compiled(causal, q, k, v)[0], expected, 1e-3)
            op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
            assert op(q, k, v, None, True)[1].shape == (2, 4, 16, 1)
            assert handle.hits == 3
    finally:
        torch.backends.cuda.enable_flash_sdp(False)


def check_kernels_follow_the_precision_of_torch_and_of_the_thread() -> None:
    @tk.tpu_kernel("tto::precise")
    def precise(a: jax.Array, c: jax.Array, *, precision: str | None = None) -> jax.Array:
        passes = {None: 0.0, "default": 1.0, "high": 3.0, "highest": 6.0}[precision]
        return jnp.full((a.shape[0], c.shape[1]), passes, a.dtype)

    def passes() -> float:
        return torch.mm(x, w.t())[0, 0].item()

    with tk.override("aten::mm", precise):
        assert passes() == 1
        torch.set_float32_matmul_precision("high")
        try:
            assert passes() == 3
            with device_module.precision(device_module.Precision.HIGHEST):
                assert passes() == 6
            assert passes() == 3
        finally:
            torch.set_float32_matmul_precision("medium")


def check_coming_and_going_is_noticed_by_graphs() -> None:
    """torch remembers how an operator dispatches when it was in a graph once."""
    op = torch.ops.aten.mm.default
    close(compiled(torch.mm, x, w.t())[0], x.cpu() @ w.cpu().t(), 1e-3)
    table = _compat_torch.dispatch_table(op)
    with tk.override("aten::mm", lambda a, c: product(a, c) + 1) as handle:
        close(compiled(torch.mm, x, w.t())[0], x.cpu() @ w.cpu().t() + 1, 1e-3)
        assert handle.hits == 1
    assert _compat_torch.dispatch_table(op) == table
    close(compiled(torch.mm, x, w.t())[0], x.cpu() @ w.cpu().t(), 1e-3)
    close(torch.mm(x, w.t()), x.cpu() @ w.cpu().t(), 1e-3)


def check_order_declines_and_the_original() -> None:
    def next_plus(amount: float) -> Callable[..., Any]:
        return lambda a, c, fallback: fallback(a, c) + amount

    expected = x.cpu() @ w.cpu().t()
    only_float32 = {"when": lambda a, c: a.dtype is torch.float32 or "not float32"}
    with (
        tk.override("aten::mm", next_plus(10), **only_float32) as late,
        tk.override("aten::mm", next_plus(100), priority=1) as first,
    ):
        close(torch.mm(x, w.t()), expected + 110, 1e-3)
        close(compiled(torch.mm, x, w.t())[0], expected + 110, 1e-3)
        close(torch.mm(x.bfloat16(), w.t().bfloat16()).float(), expected + 100, 0.5)
        assert (first.hits, late.hits, late.last_decline) == (3, 2, "not float32")
        assert [o.op for o in tk.overrides()] == ["aten::mm"] * 2  # nothing of our own is listed


def check_a_second_override_of_a_composite_sits_where_the_first_does() -> None:
    def lower(a: Any, weight: Any, bias: Any = None) -> Any:
        return product(a, weight.t()) + 1

    def upper(a: Any, weight: Any, bias: Any = None, *, fallback: Any) -> Any:
        return 2 * fallback(a, weight, bias)

    with tk.override("aten::linear", lower):
        second = tk.override("aten::linear", upper)
        assert "AutogradPrivateUse1" in {key for _, key in second.sites}
        with second:
            weight = w.clone().requires_grad_()
            out = F.linear(x, weight)
            close(out, 2 * (x.cpu() @ w.cpu().t() + 1), 1e-3)
            out.sum().backward()
            assert weight.grad is not None
            close(weight.grad, 2 * x.cpu().sum(0).expand(8, 32), 1e-3)


def check_errors_name_both() -> None:
    def impl(a: Any, c: Any) -> Any:
        raise ValueError("no such luck")

    with tk.override("aten::mm", impl), raises(tk.OverrideError, "aten::mm", "no such luck"):
        torch.mm(x, w.t())
