"""`tpu::flex_attention` and `tpu::flex_attention_backward`: attention with scores and masks that a
program computes.

Algorithm. That of `tpu::attention`; a score_mod and a mask_mod are evaluated on whole tiles inside
the kernels (`flex_scores`), a BlockMask becomes a list of blocks that the grid walks
(`flex_blocks`), captured tensors become operands in blocks (`flex_operands`).

Source: Dong et al., Flex Attention (2024), for the interface; the kernels are this package's own.

Limits. First derivatives in reverse mode only. See docs/kernels/flex_attention.md.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.errors import ArgumentError
from tpu_kernels.ops.attention_plan import (
    CONFIGS,
    bucket,
    check_arrays,
    fits,
    known,
)
from tpu_kernels.ops.flex_backward import Saved, captured_gradients, context, gradients
from tpu_kernels.ops.flex_forward import forward
from tpu_kernels.ops.flex_operands import narrowed
from tpu_kernels.ops.flex_plan import FlexPlan, is_floating
from tpu_kernels.ops.flex_program import parse
from tpu_kernels.ops.precision import check_precision
from tpu_kernels.registry.decorator import tpu_kernel

Lists = list[jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, tensors: Lists, buffers: Lists, plan: FlexPlan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (*q.shape[:3], v.shape[3])
    if not known(q, k, v) or 0 in shape or 0 in k.shape:
        # Symbols: the registry derives the results' shapes. Zeros: there is nothing to attend to.
        nothing = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        return jnp.zeros(shape, q.dtype), nothing, nothing
    return forward(q, k, v, tensors, buffers, plan)


def _attend_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tensors: Lists, buffers: Lists, plan: FlexPlan
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Saved]:
    out, lse, most = _attend(q, k, v, tensors, buffers, plan)
    return (out, lse, most), Saved(q, k, v, tensors, buffers, out, lse)


def _attend_backward(
    plan: FlexPlan, saved: Saved, grads: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[Any, ...]:
    dq, dk, dv, captured = _gradients(saved, grads[0], grads[1], plan)
    return dq, dk, dv, None, captured


_attend.defvjp(_attend_forward, _attend_backward)


def _gradients(
    saved: Saved, grad: jax.Array, grad_lse: jax.Array | None, plan: FlexPlan
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array | None]]:
    q, k, v = saved.q, saved.k, saved.v
    if not known(q, k, v) or 0 in (*q.shape, *v.shape, *k.shape):
        none = [jnp.zeros_like(x) if is_floating(x) else None for x in saved.buffers]
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), none
    found = context(saved, grad, grad_lse, plan)
    dq, dk, dv = gradients(found)
    if k.shape[0] < q.shape[0]:
        dk, dv = (x.astype(jnp.float32).sum(0, keepdims=True) for x in (dk, dv))
    captured = captured_gradients(found, saved.buffers)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), captured


# Operators ----------------------------------------------------------------------------------------


def _check(
    kernel: str, q: Any, k: Any, v: Any, tensors: Lists, buffers: Lists, plan: FlexPlan
) -> None:
    shared = k.ndim == v.ndim == 4 and k.shape[0] == v.shape[0] == 1
    one = q[:1] if shared and q.ndim == 4 else q
    check_arrays(kernel, one, k, v, {})
    if len(tensors) not in (0, 2, 4):
        raise ArgumentError(
            f"kernel {kernel!r}: argument 'blocks' has {len(tensors)} tensors",
            hint="pass none, kv_num_blocks and kv_indices, or those and the same of full blocks",
        )
    wanted = sum(len(parse(text).ranks) for text in (plan.score_mod, plan.mask_mod) if text)
    if len(buffers) != wanted:
        raise ArgumentError(
            f"kernel {kernel!r}: {len(buffers)} captured tensors, the mods capture {wanted}"
        )


def _plan(
    kernel: str,
    q: Any,
    score_mod: str,
    mask_mod: str,
    sparse_block: tuple[int, int],
    scale: float | None,
    precision: str | None,
    blocks: tuple[int | None, ...],
    backward_blocks: tuple[int | None, ...],
    split_scale: bool | None,
    interpret: Any,
) -> FlexPlan:
    check_precision(precision, kernel)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    return FlexPlan(
        kernel,
        scale=float(scale),
        precision="high" if q.dtype == jnp.float16 else precision,
        blocks=blocks,
        backward_blocks=backward_blocks,
        split_scale=split_scale,
        interpret=interpret,
        score_mod=score_mod,
        mask_mod=mask_mod,
        sparse_block=(sparse_block[0], sparse_block[1]),
    )


def _widened(*arrays: jax.Array) -> list[jax.Array]:
    """float16 as float32, which Mosaic loads."""
    return [x.astype(jnp.float32) if x.dtype == jnp.float16 else x for x in arrays]


def _flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Two products over all pairs; what masks skip counts, as in torch's own formula."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])  # type: ignore[no-any-return]


_operator = functools.partial(
    tpu_kernel, configs=CONFIGS, constraints=fits, bucket=bucket, int64="narrow_checked"
)


@_operator("tpu::flex_attention", flops=_flops)
def flex_attention_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: list[jax.Array],
    buffers: list[jax.Array],
    score_mod: str = "",
    mask_mod: str = "",
    sparse_block: tuple[int, int] = (128, 128),
    scale: float | None = None,
    *,
    precision: str | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    part_q: int | None = None,
    part_kv: int | None = None,
    split_scale: bool | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention whose scores a program modifies and masks.

    `flex_attention` writes the programs; see there for the whole.

    Args:
        q: [batch, heads, q_len, head_dim]; bfloat16, float16 or float32.
        k: [batch or 1, kv_heads, kv_len, head_dim]; `heads` is a multiple of `kv_heads`.
        v: [batch or 1, kv_heads, kv_len, v_dim].
        blocks: Tensors of a BlockMask: none; kv_num_blocks [batch or 1, heads or 1, q_blocks] and
            kv_indices [batch or 1, heads or 1, q_blocks, kv_blocks]; or those, and
            full_kv_num_blocks and full_kv_indices.
        buffers: Tensors that the score_mod captures, then those of the mask_mod.
        score_mod: Text of a program; "" for none.
        mask_mod: Text of a program; "" for none.
        sparse_block: Queries and keys of a block of the BlockMask.
        scale: Factor on the products; ``1 / sqrt(head_dim)`` by default.
        precision: As in `attention`.
        block_q: As in `attention`.
        block_kv: As in `attention`.
        part_q: As in `attention`.
        part_kv: As in `attention`.
        split_scale: As in `attention`.
        interpret: Filled in by the toolkit.

    Returns:
        [batch, heads, q_len, v_dim] in the dtype of `q`, zero where a query sees nothing; the
        logarithm of the sum of exponentials, and the largest score, float32 [batch, heads, q_len],
        minus infinity there.

    Raises:
        ArgumentError: Shapes or options do not fit.
        DTypeError: An argument is not of a floating point type that the kernel takes.
        ConfigError: A block is no multiple of 128, or a part does not divide it.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 2, 3, 8)
        >>> [y.shape for y in flex_attention_kernel(x, x, x, [], [])]
        [torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 3]), torch.Size([1, 2, 3])]
    """
    name = "tpu::flex_attention"
    plan = _plan(
        name, q, score_mod, mask_mod, sparse_block, scale, precision,
        (block_q, block_kv, part_q, part_kv), (None,) * 4, split_scale, interpret,
    )  # fmt: skip
    buffers = narrowed(buffers)
    _check(name, q, k, v, blocks, buffers, plan)
    out, lse, most = _attend(*_widened(q, k, v), blocks, _widened(*buffers), plan)
    return out.astype(q.dtype), lse, most


@_operator("tpu::flex_attention_backward", backward=None)
def flex_attention_backward(
    grad: jax.Array,
    grad_lse: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    blocks: list[jax.Array],
    buffers: list[jax.Array],
    score_mod: str = "",
    mask_mod: str = "",
    sparse_block: tuple[int, int] = (128, 128),
    scale: float | None = None,
    captured: tuple[int, ...] = (),
    *,
    precision: str | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    part_q: int | None = None,
    part_kv: int | None = None,
    split_scale: bool | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """Gradients of `tpu::flex_attention` from its saved results.

    Args:
        grad: Gradient of the output, [batch, heads, q_len, v_dim].
        grad_lse: Gradient of `lse`, float32 [batch, heads, q_len], or None.
        q: As in `tpu::flex_attention`.
        k: As in `tpu::flex_attention`.
        v: As in `tpu::flex_attention`.
        out: The output.
        lse: The logarithms, float32 [batch, heads, q_len].
        blocks: As in `tpu::flex_attention`; the same for all further arguments.
        buffers: As in `tpu::flex_attention`.
        score_mod: As in `tpu::flex_attention`.
        mask_mod: As in `tpu::flex_attention`.
        sparse_block: As in `tpu::flex_attention`.
        scale: As in `tpu::flex_attention`.
        captured: Positions among `buffers` whose gradients are wanted.
        precision: As in `attention`.
        block_q: As in `attention`, for the backward.
        block_kv: As in `attention`, for the backward.
        part_q: As in `attention`, for the backward.
        part_kv: As in `attention`, for the backward.
        split_scale: As in `attention`.
        interpret: Filled in by the toolkit.

    Returns:
        Gradients of `q`, `k` and `v`, in their shapes and dtypes, and of the captured tensors.

    Raises:
        ArgumentError: Shapes or options do not fit.
        DTypeError: An argument is not of a floating point type that the kernel takes.
        ConfigError: A block is no multiple of 128, or a part does not divide it.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 2, 3, 8)
        >>> out, lse, _ = flex_attention_kernel(x, x, x, [], [])
        >>> dq, *_ = flex_attention_backward(out, None, x, x, x, out, lse, [], [])
        >>> dq.shape
        torch.Size([1, 2, 3, 8])
    """
    name = "tpu::flex_attention_backward"
    plan = _plan(
        name, q, score_mod, mask_mod, sparse_block, scale, precision,
        (None,) * 4, (block_q, block_kv, part_q, part_kv), split_scale, interpret,
    )  # fmt: skip
    kept = buffers
    buffers = narrowed(buffers)
    _check(name, q, k, v, blocks, buffers, plan)
    wq, wk, wv, wout, wgrad = _widened(q, k, v, out, grad)
    saved = Saved(wq, wk, wv, blocks, _widened(*buffers), wout, lse)
    dq, dk, dv, found = _gradients(saved, wgrad, grad_lse, plan)
    grads = []
    for n in captured:
        g = found[n]
        grads.append(jnp.zeros_like(kept[n]) if g is None else g.astype(kept[n].dtype))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), grads
