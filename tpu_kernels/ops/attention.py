"""`tpu::attention` and `tpu::attention_backward`: exact attention in blocks, forward and backward.

Algorithm. FlashAttention's online softmax, transposed to suit the TPU (`attention_forward`), over
the blocks that a static mask leaves (`attention_blocks`); the backward computes weights again from
the saved logarithm of their sums (`attention_backward`).

Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023), for the algorithm; the
transposed dataflow, its schedule and the masks are this package's own.

Limits. First derivatives in reverse mode only. See docs/kernels/attention.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpu_kernels.errors import ArgumentError
from tpu_kernels.ops.attention_backward import Saved, backward
from tpu_kernels.ops.attention_forward import forward
from tpu_kernels.ops.attention_operands import Operands
from tpu_kernels.ops.attention_plan import (
    CONFIGS,
    Plan,
    bucket,
    check_arrays,
    fits,
    known,
    make_plan,
    shape_of,
)
from tpu_kernels.ops.attention_reference import reference
from tpu_kernels.registry.decorator import tpu_kernel

# The function and its derivative ------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    shape = shape_of(q, k, v)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    if not known(q, k, v):
        # Sizes are symbols only while the registry derives the results' shapes. Blocks cannot be
        # chosen for symbols, and any operation of that shape will do.
        return jnp.empty(out.shape, out.dtype), jnp.empty(lse.shape, lse.dtype)
    if 0 in out.shape or shape.keys == 0 or shape.depth == 0:
        return _degenerate(q, v, operands)
    return forward(q, k, v, operands, plan)


def _degenerate(q: jax.Array, v: jax.Array, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Results without a launch: nothing to attend to, or no results at all."""
    lse = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    if operands.sinks is not None:
        lse = jnp.broadcast_to(operands.sinks.astype(jnp.float32)[None, :, None], lse.shape)
    if v.shape[2] and not q.shape[3] and v.size:
        raise ArgumentError("kernel 'tpu::attention': head_dim is 0")
    return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), lse


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, plan: Plan
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    out, lse = _attend(q, k, v, operands, plan)
    return (out, lse), Saved(q, k, v, operands, out, lse)


def _attend_backward(
    plan: Plan, saved: Saved, grads: tuple[jax.Array, jax.Array]
) -> tuple[Any, ...]:
    return (*_gradients(saved, *grads, plan), _operand_gradients(saved, *grads, plan))


_attend.defvjp(_attend_forward, _attend_backward)


def _gradients(
    saved: Saved, grad: jax.Array, grad_lse: jax.Array | None, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = saved.q, saved.k, saved.v
    if not known(q, k, v) or 0 in (*q.shape, *v.shape):
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    return backward(saved, grad, grad_lse, plan)


def _operand_gradients(saved: Saved, grad: jax.Array, grad_lse: jax.Array, plan: Plan) -> Operands:
    """Gradients of an additive mask and of sinks, outside the kernels.

    XLA removes what nobody asks for. That of a mask is as large as the scores, so dense math costs
    no more memory than the result does (before it is summed over broadcast dimensions).
    """
    operands, mask, sinks = saved.operands, None, None
    weight = (saved.out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(axis=-1) - grad_lse
    if operands.sinks is not None:
        share = jnp.exp(operands.sinks.astype(jnp.float32)[None, :, None] - saved.lse)
        sinks = -(share * weight).sum(axis=(0, 2)).astype(operands.sinks.dtype)
    if operands.mask is not None and operands.mask.dtype != jnp.bool_:
        mask = _mask_gradient(saved, grad, weight, plan)
    return Operands(mask=mask, sinks=sinks)


def _mask_gradient(saved: Saved, grad: jax.Array, weight: jax.Array, plan: Plan) -> jax.Array:
    """Sum of the scores' gradients over the dimensions in which the mask is broadcast."""
    given = saved.operands.mask
    assert given is not None
    if not known(saved.q, saved.k, given) or 0 in (*saved.q.shape, *saved.v.shape):
        return jnp.zeros_like(given)
    shape = shape_of(saved.q, saved.k, saved.v)

    def grouped(x: jax.Array) -> jax.Array:
        """[batch, heads, ...] as [batch, kv_heads, group, ...] in float32."""
        x = x.astype(jnp.float32)
        return x.reshape(shape.batch, shape.kv_heads, shape.group, *x.shape[2:])

    scores = jnp.einsum(
        "bhgqd,bhkd->bhgqk", grouped(saved.q), saved.k.astype(jnp.float32), precision="highest"
    )
    scores = scores * plan.scale
    if plan.softcap:
        scores = plan.softcap * jnp.tanh(scores / plan.softcap)
    mask = jnp.broadcast_to(given, (shape.batch, shape.heads, shape.queries, shape.keys))
    scores = scores + grouped(mask)
    keep = _dense_band(saved.operands, shape.queries, shape.keys, plan)
    lse = grouped(jnp.where(jnp.isneginf(saved.lse), jnp.inf, saved.lse))
    weights = jnp.where(keep, jnp.exp(scores - lse[..., None]), 0.0)
    products = jnp.einsum(
        "bhgqd,bhkd->bhgqk", grouped(grad), saved.v.astype(jnp.float32), precision="highest"
    )
    if plan.dropout:
        raise ArgumentError(
            f"kernel {plan.kernel!r}: a mask that needs a gradient cannot go with dropout",
            hint="detach the mask, or drop out before the products",
        )
    found = weights * (products - grouped(weight)[..., None])
    found = found.reshape(mask.shape)
    axes = tuple(n for n in range(4) if given.shape[n] == 1 and mask.shape[n] > 1)
    return found.sum(axis=axes, keepdims=True).astype(given.dtype)


def _dense_band(operands: Operands, queries: int, keys: int, plan: Plan) -> jax.Array:
    """Which pairs the masks other than the additive one keep, broadcast to the grouped scores."""
    distance = jnp.arange(queries)[:, None] + plan.band.offset - jnp.arange(keys)
    keep = jnp.ones(distance.shape, bool)
    if plan.band.right is not None:
        keep &= distance >= -plan.band.right
    if plan.band.left is not None:
        keep &= distance <= plan.band.left
    if operands.q_segments is not None and operands.kv_segments is not None:
        same = operands.q_segments[:, :, None] == operands.kv_segments[:, None, :]
        return keep & same[:, None, None]
    return keep


def _widened(plan: Plan, *arrays: jax.Array) -> tuple[Plan, list[jax.Array]]:
    """float16 as float32, which Mosaic loads; "high" keeps every bit of it in the products."""
    if arrays[0].dtype != jnp.float16:
        return plan, list(arrays)
    plan = dataclasses.replace(plan, precision="high")
    return plan, [x.astype(jnp.float32) for x in arrays]


# Operators ----------------------------------------------------------------------------------------


def _operands(
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    seed: jax.Array | None,
    dropout: float,
) -> Operands:
    if kv_segment_ids is None:
        kv_segment_ids = q_segment_ids
    if q_segment_ids is None and kv_segment_ids is not None:
        raise ArgumentError(f"kernel {kernel!r}: 'kv_segment_ids' without 'q_segment_ids'")
    if dropout and seed is None:
        raise ArgumentError(
            f"kernel {kernel!r}: dropout needs a seed", hint="pass seed=torch.randint(2**31, (1,))"
        )
    shape = shape_of(q, k, v) if q.ndim == k.ndim == v.ndim == 4 else None
    wanted: dict[str, tuple[Any, Any]] = {}
    if shape is not None:
        wanted = {
            "mask": (mask, [shape.batch, shape.heads, shape.queries, shape.keys]),
            "q_segment_ids": (q_segment_ids, (shape.batch, shape.queries)),
            "kv_segment_ids": (kv_segment_ids, (shape.batch, shape.keys)),
            "sinks": (sinks, (shape.heads,)),
            "seed": (seed, (1,)),
        }
    check_arrays(kernel, q, k, v, wanted)
    if mask is not None and mask.dtype == jnp.float16:
        mask = mask.astype(jnp.float32)
    return Operands(mask, q_segment_ids, kv_segment_ids, sinks, seed if dropout else None)


def _flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Two products over all pairs; what masks skip counts, as in torch's own formula."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])  # type: ignore[no-any-return]


_operator = functools.partial(
    tpu_kernel, configs=CONFIGS, constraints=fits, bucket=bucket, int64="narrow_checked"
)


@_operator("tpu::attention", reference=reference, autocast=torch.bfloat16, flops=_flops)
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    seed: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    q_offset: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    *,
    precision: str | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    part_q: int | None = None,
    part_kv: int | None = None,
    split_scale: bool | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Scaled dot product attention.

    Args:
        q: [batch, heads, q_len, head_dim]; bfloat16, float16 or float32.
        k: [batch, kv_heads, kv_len, head_dim]; `heads` is a multiple of `kv_heads`. Nothing is
            expanded.
        v: [batch, kv_heads, kv_len, v_dim].
        mask: Broadcasts to [batch, heads, q_len, kv_len]: bool (True is seen), or floating and
            added to the scores, where values below -1e30 mask.
        q_segment_ids: int [batch, q_len]; tokens see those of their own segment only.
        kv_segment_ids: int [batch, kv_len]; `q_segment_ids` by default.
        sinks: [heads] scores of a key without a value, which takes a share of the weights.
        seed: int [1]; the weights to drop are a function of it.
        causal: No query sees a later key.
        window: How many keys back and ahead a query sees, -1 for any number.
        q_offset: Position of the first query among the keys: 0 aligns the first of both, as
            `torch.nn.functional.scaled_dot_product_attention` does; ``kv_len - q_len`` the last.
        scale: Factor on the scores; ``1 / sqrt(head_dim)`` by default.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for none.
        dropout: Probability to drop a weight.
        precision: For float32: None or "default" (one bfloat16 pass on the MXU), "high" (three
            passes), "highest" (six).
        block_q: Queries per grid step, a multiple of 128; None for the heuristic's choice.
        block_kv: Keys per grid step, a multiple of 128.
        part_q: Queries computed at a time, a divisor of `block_q`.
        part_kv: Keys computed at a time.
        split_scale: bfloat16: whether `scale` goes into the queries, as two numbers each, or onto
            the scores.
        interpret: Filled in by the toolkit.

    Returns:
        [batch, heads, q_len, v_dim] in the dtype of `q`, zero where a query sees nothing; and the
        logarithm of the sum of exponentials, float32 [batch, heads, q_len], minus infinity there.

    Raises:
        ArgumentError: Shapes or options do not fit.
        DTypeError: An argument is not of a floating point type that the kernel takes.
        ConfigError: A block is no multiple of 128, or a part does not divide it.

    Example:
        >>> x = torch.ones(1, 2, 3, 8)
        >>> out, lse = attention(x, x, x, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 3]))
    """
    name = "tpu::attention"
    operands = _operands(name, q, k, v, mask, q_segment_ids, kv_segment_ids, sinks, seed, dropout)
    plan = make_plan(
        name,
        q,
        causal=causal,
        window=window,
        q_offset=q_offset,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        precision=precision,
        blocks=(block_q, block_kv, part_q, part_kv),
        backward_blocks=(None,) * 4,
        split_scale=split_scale,
        interpret=interpret,
    )
    plan, wide = _widened(plan, q, k, v)
    out, lse = _attend(*wide, operands, plan)
    return out.astype(q.dtype), lse


@_operator("tpu::attention_backward", backward=None)
def attention_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    mask: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    seed: jax.Array | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    q_offset: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    *,
    precision: str | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    part_q: int | None = None,
    part_kv: int | None = None,
    split_scale: bool | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `attention` from its saved results, for those who keep them themselves.

    `attention` needs no help to be differentiated; this is for operators of ATen that come with a
    backward operator, and for a hand-written `torch.autograd.Function`.

    Args:
        grad: Gradient of the output, [batch, heads, q_len, v_dim].
        q: As in `attention`.
        k: As in `attention`.
        v: As in `attention`.
        out: The output.
        lse: The logarithms, float32 [batch, heads, q_len].
        mask: As in `attention`; the same for all further arguments.
        q_segment_ids: As in `attention`.
        kv_segment_ids: As in `attention`.
        seed: As in `attention`.
        causal: As in `attention`.
        window: As in `attention`.
        q_offset: As in `attention`.
        scale: As in `attention`.
        softcap: As in `attention`.
        dropout: As in `attention`.
        precision: As in `attention`.
        block_q: As in `attention`, for the backward.
        block_kv: As in `attention`, for the backward.
        part_q: As in `attention`, for the backward.
        part_kv: As in `attention`, for the backward.
        split_scale: As in `attention`.
        interpret: Filled in by the toolkit.

    Returns:
        Gradients of `q`, `k` and `v`, in their shapes and dtypes.

    Raises:
        ArgumentError: Shapes or options do not fit.
        DTypeError: An argument is not of a floating point type that the kernel takes.
        ConfigError: A block is no multiple of 128, or a part does not divide it.

    Example:
        >>> x = torch.ones(1, 2, 3, 8)
        >>> out, lse = attention(x, x, x)
        >>> [g.shape for g in attention_backward(out, x, x, x, out, lse)] == [x.shape] * 3
        True
    """
    name = "tpu::attention_backward"
    operands = _operands(name, q, k, v, mask, q_segment_ids, kv_segment_ids, None, seed, dropout)
    plan = make_plan(
        name,
        q,
        causal=causal,
        window=window,
        q_offset=q_offset,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        precision=precision,
        blocks=(None,) * 4,
        backward_blocks=(block_q, block_kv, part_q, part_kv),
        split_scale=split_scale,
        interpret=interpret,
    )
    plan, (wq, wk, wv, wout, wgrad) = _widened(plan, q, k, v, out, grad)
    saved = Saved(wq, wk, wv, operands, wout, lse)
    dq, dk, dv = _gradients(saved, wgrad, None, plan)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
