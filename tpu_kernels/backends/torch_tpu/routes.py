"""What TorchTPU runs in one piece, and how an override of a part is reached all the same.

Eager ``linear`` is lowered as it is, without ``mm`` or ``addmm``; ``rms_norm`` has an autograd
kernel of its own that does not call ``_fused_rms_norm``; attention goes to
``_scaled_dot_product_cudnn_attention`` by default, whichever other form is overridden. Inside
graphs AOTAutograd takes the first two apart, which is why an override of a part would hold in
compiled code and not in eager.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_kernels.registry.overrides.gateways import (
    Gateway,
    ResultRule,
    add_gateway,
    add_result_rule,
)

_CUDNN = "aten::_scaled_dot_product_cudnn_attention"
_OVERRIDEABLE = "aten::_scaled_dot_product_fused_attention_overrideable"


def linear_by_products(input: Any, weight: Any, bias: Any = None) -> Any:
    """``linear`` as torch decomposes it: ``addmm``, or ``mm`` and an addition."""
    return torch.ops.aten.linear.default.decompose(input, weight, bias)


def rms_norm_by_fused(
    input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    """``rms_norm`` by the operator that torch's GPU code uses, which has a gradient formula."""
    return torch.ops.aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


def attention_by_overrideable(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by the operator that torch keeps for backends to fill in.

    Fewer key and value heads than query heads are passed on as they are, as torch does.
    """
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(attn_mask.logical_not(), float("-inf"))
    results = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default(
        query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale
    )
    return results[0]


def with_column_of_logsumexp(results: Any) -> Any:
    """Give the log-sum-exp the layout that TorchTPU's backward reads.

    The backward ends the process at [batch, heads, q_len] and wants [batch, heads, q_len, 1].
    """
    output, logsumexp, *rest = results
    if isinstance(logsumexp, torch.Tensor) and logsumexp.dim() == output.dim() - 1:
        logsumexp = logsumexp.unsqueeze(-1)
    return (output, logsumexp, *rest)


def attention_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    wanted: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of attention from its inputs alone.

    What TorchTPU's forward returns as log-sum-exp is the sum of the exponentials above the row's
    maximum, and its backward reads that. An override returns a log-sum-exp; so while the forward
    is overridden, the backward must not look at it.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[-3] // key.shape[-3]
    q, g = query.float(), grad.float()
    k, v = (t.float().repeat_interleave(groups, -3) for t in (key, value))
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(lower.logical_not(), float("-inf"))
    weights = scores.softmax(-1)
    inner = g @ v.transpose(-1, -2)
    flow = weights * (inner - (inner * weights).sum(-1, keepdim=True))

    def ungrouped(t: Any) -> Any:
        return t.unflatten(-3, (-1, groups)).sum(-3) if groups > 1 else t

    return (
        (flow @ k * scale).to(query.dtype) if wanted[0] else None,
        ungrouped(flow.transpose(-1, -2) @ q * scale).to(key.dtype) if wanted[1] else None,
        ungrouped(weights.transpose(-1, -2) @ g).to(value.dtype) if wanted[2] else None,
        flow.sum_to_size(bias.shape).to(bias.dtype) if wanted[3] and bias is not None else None,
    )


def without_dropout(*args: Any, **kwargs: Any) -> Any:
    """Predicate of `attention_backward`: which elements were dropped, the inputs do not say."""
    return args[12] == 0 or "the forward dropped elements at random"


def register() -> None:
    """State all this to the overrides."""
    products = frozenset({"aten::mm", "aten::addmm", "aten::matmul", "aten::bmm"})
    add_gateway(Gateway("aten::linear", products, linear_by_products))
    fused = frozenset({"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"})
    add_gateway(Gateway("aten::rms_norm", fused, rms_norm_by_fused))
    attention = frozenset({_OVERRIDEABLE, f"{_OVERRIDEABLE}_backward"})
    add_gateway(Gateway("aten::scaled_dot_product_attention", attention, attention_by_overrideable))
    add_gateway(
        Gateway(
            f"{_OVERRIDEABLE}_backward",
            frozenset({_OVERRIDEABLE}),
            attention_backward,
            when=without_dropout,
        )
    )
    add_result_rule(ResultRule(_CUDNN, with_column_of_logsumexp))
