"""torch's operators with the MXU's products, on CPU tensors and on the simulated device.

They are overrides like a user's, at the CPU's dispatch keys, which the simulated device calls in
turn; so scopes, threads, backward passes and compiled graphs are dealt with. Any override of a
user's comes before them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.registry.engine import current_mode
from tpu_kernels.registry.numerics.mxu import product
from tpu_kernels.registry.overrides.chain import originals
from tpu_kernels.registry.overrides.handle import Override
from tpu_kernels.registry.overrides.targets import resolve

_LAST = -(2**62)  # priority: below every override of a user's

Tensor = torch.Tensor


def _wanted(*args: Any, **kwargs: Any) -> bool:
    first = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    return first.dtype is torch.float32 and current_mode().numerics == "tpu"


@functools.cache
def overrides() -> tuple[Override, ...]:
    """The overrides that make up ``numerics("tpu")``, in force or not."""
    return tuple(
        Override(
            resolve(f"aten::{name}"),
            implementation,
            when=_wanted,
            device="cpu",
            priority=_LAST,
            on_error="raise",
            backward="auto",
            debug=False,
            listed=False,
        )
        for name, implementation in _IMPLEMENTATIONS.items()
    )


def _product(x: Tensor, y: Tensor, fallback: Callable[..., Tensor]) -> Tensor:
    return product(fallback, x, y)


def _scaled_sum(add: Tensor, total: Tensor, beta: Any, alpha: Any) -> Tensor:
    scaled = total if alpha == 1 else total * alpha
    if beta == 0:  # NaN in `add` is to be ignored
        return scaled
    return scaled + (add if beta == 1 else add * beta)


def _adding(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """`addmm` and its like: a product, scaled, added to a tensor."""

    def implementation(
        input: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
    ) -> Tensor:
        with originals():
            return _scaled_sum(input, product(multiply, x, y), beta, alpha)

    return implementation


def _addmm_activation(
    input: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
) -> Tensor:
    with originals():
        total = _scaled_sum(input, product(torch.mm, x, y), beta, alpha)
        return torch.nn.functional.gelu(total, approximate="tanh") if use_gelu else total.relu()


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, fallback: Callable[..., Tensor]
) -> Tensor:
    total = product(lambda x, y: fallback(x, y, None, *rest), input, weight)
    if bias is None:
        return total
    return total.add_(bias.view(-1, *[1] * (total.dim() - 2 if input.dim() == total.dim() else 0)))


def _convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
    fallback: Callable[..., Any],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    where = (stride, padding, dilation, transposed, output_padding, groups)

    def one(index: int, grad: Tensor, x: Tensor, w: Tensor) -> Any:
        mask = [i == index for i in range(3)]
        return fallback(grad, x, w, bias_sizes, *where, mask)[index]

    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_input = product(lambda g, w: one(0, g, input, w), grad_output, weight)
    if output_mask[1]:
        grad_weight = product(lambda g, x: one(1, g, x, weight), grad_output, input)
    if output_mask[2]:
        grad_bias = one(2, grad_output, input, weight)  # a sum, no product
    return grad_input, grad_weight, grad_bias


# Attention ----------------------------------------------------------------------------------------
# [batch, heads, length, head_dim]. torch's kernel lays the output out as the query, everything else
# as [batch, length, heads, ...]; compiled graphs rely on that.


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    with originals():
        key, value = _for_each_head(key, query), _for_each_head(value, query)
        scores = _scores(query, key, is_causal, attn_mask, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        # A row that may look at nothing is zero, as torch's kernel has it.
        empty = lse == -math.inf
        weights = weights.masked_fill(empty.unsqueeze(-1), 0.0)
        out = torch.empty_like(query).copy_(product(torch.matmul, weights, value))
        return out, _length_first(lse)


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = _scale(query, scale)
    heads = key.shape[1]
    with originals():
        key, value = _for_each_head(key, query), _for_each_head(value, query)
        scores = _scores(query, key, is_causal, attn_mask, scale)
        empty = (logsumexp == -math.inf).unsqueeze(-1)
        weights = (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(empty, 0.0)
        grad_value = product(torch.matmul, weights.mT, grad_out)
        grad_weights = product(torch.matmul, grad_out, value.mT)
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta)
        grad_query = product(torch.matmul, grad_scores, key) * factor
        grad_key = product(torch.matmul, grad_scores.mT, query) * factor
        gradients = (grad_query, _per_group(grad_key, heads), _per_group(grad_value, heads))
        return tuple(_length_first(g) for g in gradients)  # type: ignore[return-value]


def _for_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as the query has."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _per_group(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `_for_each_head`."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    scores = product(torch.matmul, query, key.mT) * _scale(query, scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        added = attn_mask.dtype is not torch.bool
        scores = scores + attn_mask if added else scores.masked_fill(~attn_mask, -math.inf)
    return scores


def _length_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "mm": _product,
    "bmm": _product,
    "mv": _product,
    "dot": _product,
    "addmm": _adding(torch.mm),
    "baddbmm": _adding(torch.bmm),
    "addmv": _adding(torch.mv),
    "addbmm": _adding(lambda x, y: torch.bmm(x, y).sum(0)),
    "_addmm_activation": _addmm_activation,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
