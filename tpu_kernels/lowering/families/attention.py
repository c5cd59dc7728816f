"""Scaled dot product attention in the two forms in which it reaches graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.families.products import contract
from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import Array, cast, full, iota, torch_dtype

_HEADS = ((0, 1), (0, 1))  # batch and head run in parallel


class _Inputs:
    """Queries, keys and values in float32, as many heads of each, and the scores' bias."""

    def __init__(
        self, q: Array, k: Array, v: Array, mask: Array | None, causal: bool, scale: float | None
    ) -> None:
        self.groups = q.shape[1] // k.shape[1]
        inner = torch.float32 if torch_dtype(q).itemsize < 4 else torch_dtype(q)
        self.q = cast(q, inner)
        self.k, self.v = (jnp.repeat(cast(x, inner), self.groups, axis=1) for x in (k, v))
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        shape = (q.shape[-2], k.shape[-2])
        self.bias: Array | None = None
        if mask is not None:
            self.bias = cast(mask, inner)
            if torch_dtype(mask) is torch.bool:
                self.bias = jnp.where(mask, 0.0, -math.inf).astype(self.q.dtype)
        if causal:
            seen = iota(torch.int32, shape, 1) <= iota(torch.int32, shape, 0)
            hidden = jnp.where(seen, 0.0, -math.inf).astype(self.q.dtype)
            self.bias = hidden if self.bias is None else self.bias + hidden

    def scores(self) -> Array:
        """``[batch, heads, q_len, kv_len]``."""
        found = contract(self.q, self.k, ((3,), (3,)), _HEADS) * self.scale
        return found if self.bias is None else found + self.bias

    def ungrouped(self, grad: Array, like: Array) -> Array:
        """The gradient of keys or values, summed over the query heads that share them."""
        if self.groups > 1:
            shape = (*like.shape[:2], self.groups, *like.shape[2:])
            grad = jnp.sum(lax.reshape(grad, shape), axis=2)
        return cast(grad, torch_dtype(like))


def _forward(inputs: _Inputs) -> tuple[Array, Array]:
    scores = inputs.scores()
    largest = jnp.max(scores, axis=-1, keepdims=True)
    largest = jnp.where(largest == -math.inf, jnp.zeros_like(largest), largest)
    weights = lax.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # A row that sees nothing is zero, as in torch's kernels.
    safe = jnp.where(total == 0, jnp.ones_like(total), total)
    out = contract(weights / safe, inputs.v, ((3,), (2,)), _HEADS)
    return out, lax.squeeze(lax.log(total) + largest, [3])


def _backward(
    inputs: _Inputs, grad: Array, out: Array, lse: Array
) -> tuple[Array, Array, Array, Array]:
    inner = torch_dtype(inputs.q)
    grad, out = cast(grad, inner), cast(out, inner)
    lse = lax.expand_dims(cast(lse, inner), [3])
    weights = jnp.where(lse == -math.inf, 0.0, lax.exp(inputs.scores() - lse))
    of_v = contract(weights, grad, ((2,), (2,)), _HEADS)
    of_weights = contract(grad, inputs.v, ((3,), (3,)), _HEADS)
    row = jnp.sum(grad * out, axis=-1, keepdims=True)
    of_scores = weights * (of_weights - row)
    of_q = contract(of_scores, inputs.k, ((3,), (2,)), _HEADS) * inputs.scale
    of_k = contract(of_scores, inputs.q, ((2,), (2,)), _HEADS) * inputs.scale
    return of_q, of_k, of_v, of_scores


def _no_dropout(p: float) -> None:
    if p:
        raise Unlowered("dropout inside a fused attention")


@lowers("_scaled_dot_product_flash_attention_for_cpu")
def attention_cpu(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    _no_dropout(dropout_p)
    out, lse = _forward(_Inputs(q, k, v, attn_mask, is_causal, scale))
    return cast(out, torch_dtype(q)), lse


@lowers("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_cpu_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    _no_dropout(dropout_p)
    inputs = _Inputs(q, k, v, attn_mask, is_causal, scale)
    of_q, of_k, of_v, _ = _backward(inputs, grad, out, lse)
    return cast(of_q, torch_dtype(q)), inputs.ungrouped(of_k, k), inputs.ungrouped(of_v, v)


@lowers("_scaled_dot_product_fused_attention_overrideable")
def attention_overrideable(
    q: Array,
    k: Array,
    v: Array,
    attn_bias: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _no_dropout(dropout_p)
    out, lse = _forward(_Inputs(q, k, v, attn_bias, is_causal, scale))
    none = full((0,), 0, torch.int64)
    seed = full((), 0, torch.int64)
    sizes = q.shape[-2], k.shape[-2]
    return (
        cast(out, torch_dtype(q)),
        lse,
        none,
        none,
        *sizes,
        seed,
        seed,
        full((0,), 0, torch_dtype(q)),
    )


@lowers("_scaled_dot_product_fused_attention_overrideable_backward")
def attention_overrideable_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    attn_bias: Array | None,
    mask: Sequence[bool],
    out: Array,
    lse: Array,
    cum_q: Array,
    cum_k: Array,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Array,
    offset: Array,
    *,
    scale: float | None = None,
) -> tuple[Array | None, ...]:
    _no_dropout(dropout_p)
    inputs = _Inputs(q, k, v, attn_bias, is_causal, scale)
    of_q, of_k, of_v, of_scores = _backward(inputs, grad, out, lse)
    of_bias = None
    if mask[3] and attn_bias is not None:
        axes = [
            i for i, n in enumerate((1,) * (4 - attn_bias.ndim) + attn_bias.shape)
            if n == 1 and of_scores.shape[i] != 1
        ]  # fmt: skip
        summed = jnp.sum(of_scores, axis=tuple(axes), keepdims=True)
        of_bias = cast(lax.reshape(summed, attn_bias.shape), torch_dtype(attn_bias))
    grads = cast(of_q, torch_dtype(q)), inputs.ungrouped(of_k, k), inputs.ungrouped(of_v, v)
    return (*grads, of_bias)
