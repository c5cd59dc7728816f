"""`tpu::matmul` and `tpu::bmm`: blocked matrix products with float32 accumulation.

Algorithm. The output is cut into ``block_m x block_n`` tiles. For each of them the grid walks the
contracted dimension innermost, ``block_k`` at a time, and adds the partial products into a float32
scratch tile that stays in VMEM; the result is rounded to the output's dtype once, at the last step.
One body serves both operators, either operand transposed, and the backward: a batch is one more
grid axis in front, a transposed operand another index map and another contracted dimension, so
nothing is ever transposed or copied in HBM.

Source: the textbook blocked product of the Pallas documentation, written anew.

Limits. Floating point only. Reverse mode only: forward-mode differentiation is not defined. XLA's
own product is as fast for large plain shapes; this one is for what XLA does not fuse, and the
pattern for the families after it. See docs/kernels/matmul.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.matmul_plan import (
    CONFIGS,
    Plan,
    bucket,
    choose_blocks,
    fits,
    make_plan,
    vmem_need,
)
from tpu_kernels.ops.precision import Contraction, dot
from tpu_kernels.ops.tiles import vmem_limit
from tpu_kernels.registry.decorator import tpu_kernel

# Reference ----------------------------------------------------------------------------------------


def reference(
    x: torch.Tensor, y: torch.Tensor, transpose_x: bool = False, transpose_y: bool = False
) -> torch.Tensor:
    """The product by PyTorch, accumulated in float32.

    Args:
        x: [..., M, K], or [..., K, M] with `transpose_x`.
        y: [..., K, N], or [..., N, K] with `transpose_y`.
        transpose_x: `x` is stored transposed.
        transpose_y: `y` is stored transposed.

    Returns:
        [..., M, N] in the promoted dtype of `x` and `y`.

    Example:
        >>> reference(torch.ones(2, 3), torch.ones(4, 3), transpose_y=True).shape
        torch.Size([2, 4])
    """
    left = x.mT if transpose_x else x
    right = y.mT if transpose_y else y
    return torch.matmul(left.float(), right.float()).to(torch.promote_types(x.dtype, y.dtype))


# Kernel body --------------------------------------------------------------------------------------


def _body(
    x_ref: Any,  # [block_m, block_k], or [block_k, block_m] when transposed
    y_ref: Any,  # [block_k, block_n], or [block_n, block_k]
    out_ref: Any,  # [block_m, block_n]
    *scratch: Any,  # float32 [block_m, block_n]; absent when one step does it all
    axis: int,  # grid axis of the contracted dimension
    steps: int,  # its length
    tail: int,  # elements of K in the last step, 0 if that block is full
    contract: Contraction,
    precision: str | None,
) -> None:
    def product(masked: bool) -> jax.Array:
        # Mixed dtypes meet here, a tile at a time; promoting a whole operand costs HBM traffic.
        dtype = jnp.promote_types(x_ref.dtype, y_ref.dtype)
        x, y = x_ref[...].astype(dtype), y_ref[...].astype(dtype)
        if masked:
            x, y = _keep(x, contract[0][0], tail), _keep(y, contract[1][0], tail)
        return dot(x, y, contract, precision)

    if steps == 1:
        out_ref[...] = product(masked=False).astype(out_ref.dtype)
        return

    (total_ref,) = scratch
    step = pl.program_id(axis)
    is_last = step == steps - 1

    @pl.when(step == 0)
    def _start() -> None:
        total_ref[...] = jnp.zeros_like(total_ref)

    if tail:
        # Two branches instead of a mask in every step: the steps that decide the speed have none.
        @pl.when(jnp.logical_not(is_last))
        def _full() -> None:
            total_ref[...] += product(masked=False)

        @pl.when(is_last)
        def _ragged() -> None:
            total_ref[...] += product(masked=True)

    else:
        total_ref[...] += product(masked=False)

    @pl.when(is_last)
    def _store() -> None:
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def _keep(tile: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros beyond `size` along `axis`.

    Both operands need it, and by select: what lies outside an array is anything, and 0 x NaN is
    NaN. The edges of M and N need no mask, for what they spoil is outside the output.
    """
    inside = jax.lax.broadcasted_iota(jnp.int32, tile.shape, axis) < size
    return jnp.where(inside, tile, jnp.zeros_like(tile))


# Launcher -----------------------------------------------------------------------------------------


def _launch(x: jax.Array, y: jax.Array, plan: Plan) -> jax.Array:
    """One `pallas_call` for `x` and `y` with equal leading (batch) dimensions."""
    m, n, k = plan.sizes(x, y)
    batch = x.shape[:-2]
    out = jax.ShapeDtypeStruct((*batch, m, n), plan.out_dtype)
    if 0 in out.shape or k == 0:  # a grid cannot be empty, and a sum over nothing is zero
        return jnp.zeros(out.shape, out.dtype)
    if not all(isinstance(size, int) for size in (*out.shape, k)):
        # Sizes are symbols only while the registry derives the result's shape. Blocks cannot be
        # chosen for symbols, and any operation of that shape will do.
        return jnp.empty(out.shape, out.dtype)
    blocks = choose_blocks(x, y, plan)
    steps = pl.cdiv(k, blocks.k)

    def spec(shape: tuple[int, int], place: Any) -> pl.BlockSpec:
        """Blocks of `shape` at `place(row, column, step)` in the matrices of a batch."""
        return pl.BlockSpec(
            (*[None] * len(batch), *shape), lambda *at: (*at[:-3], *place(*at[-3:]))
        )

    if plan.transpose_x:
        x_spec = spec((blocks.k, blocks.m), lambda row, column, step: (step, row))
    else:
        x_spec = spec((blocks.m, blocks.k), lambda row, column, step: (row, step))
    if plan.transpose_y:
        y_spec = spec((blocks.n, blocks.k), lambda row, column, step: (column, step))
    else:
        y_spec = spec((blocks.k, blocks.n), lambda row, column, step: (step, column))

    body = functools.partial(
        _body,
        axis=len(batch) + 2,
        steps=steps,
        tail=k % blocks.k,
        contract=((0 if plan.transpose_x else 1,), (1 if plan.transpose_y else 0,)),
        precision=plan.precision,
    )
    # x is read once per column of blocks, y once per row of blocks
    bytes_moved = (
        x.size * x.dtype.itemsize * pl.cdiv(n, blocks.n)
        + y.size * y.dtype.itemsize * pl.cdiv(m, blocks.m)
        + out.size * out.dtype.itemsize
    )
    product = pl.pallas_call(
        body,
        out_shape=out,
        grid=(*batch, pl.cdiv(m, blocks.m), pl.cdiv(n, blocks.n), steps),
        in_specs=[x_spec, y_spec],
        out_specs=spec((blocks.m, blocks.n), lambda row, column, step: (row, column)),
        scratch_shapes=[] if steps == 1 else [pltpu.VMEM((blocks.m, blocks.n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            # Parallel: a chip with two cores shares the output. K revisits it, so in order.
            dimension_semantics=[*[pltpu.PARALLEL] * (len(batch) + 2), pltpu.ARBITRARY],
            vmem_limit_bytes=vmem_limit(vmem_need(x, y, plan, blocks)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * math.prod(batch) * m * n * k, bytes_accessed=bytes_moved, transcendentals=0
        ),
        interpret=plan.interpret,
        name=plan.kernel.replace("::", "_"),
    )
    result: jax.Array = product(x, y)
    return result


# Backward -----------------------------------------------------------------------------------------
#
# A custom_vjp inside the JAX function rather than a backward registered on the operator: then
# `jax.vjp` of the function is right wherever it is called (in a user's jax.jit, under jax.grad, in
# a kernel built on this one), and the torch autograd, which the registry derives from that same
# `jax.vjp`, cannot disagree with it. The backward calls `_product` again, so it has derivatives of
# any order. The four orientations are closed under differentiation: each gradient is one more
# product with other `transpose_*` flags.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, y: jax.Array, plan: Plan) -> jax.Array:
    if jnp.float16 in (x.dtype, y.dtype):
        # Mosaic loads float16 on no chip. A float16 is exactly two bfloat16, so "high" loses none
        # of it, where one pass would lose three bits.
        wide = dataclasses.replace(plan, out_dtype=jnp.float32, precision="high")
        total = _launch(x.astype(jnp.float32), y.astype(jnp.float32), wide)
        return total.astype(plan.out_dtype)
    return _launch(x, y, plan)


def _product_forward(
    x: jax.Array, y: jax.Array, plan: Plan
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, y, plan), (x, y)


def _product_backward(
    plan: Plan, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y = saved

    def product(a: jax.Array, b: jax.Array, ta: bool, tb: bool, out_dtype: Any) -> jax.Array:
        # The gradients have other shapes, so they get blocks of their own, not the forward's.
        return _product(
            a,
            b,
            dataclasses.replace(
                plan,
                transpose_x=ta,
                transpose_y=tb,
                out_dtype=out_dtype,
                blocks=(None, None, None),
            ),
        )

    if plan.transpose_x:  # the gradient of the stored [K, M]
        grad_x = product(y, grad, plan.transpose_y, True, x.dtype)
    else:
        grad_x = product(grad, y, False, not plan.transpose_y, x.dtype)
    if plan.transpose_y:  # the gradient of the stored [N, K]
        grad_y = product(grad, x, True, plan.transpose_x, y.dtype)
    else:
        grad_y = product(x, grad, not plan.transpose_x, False, y.dtype)
    return grad_x, grad_y


_product.defvjp(_product_forward, _product_backward)


# Operators ----------------------------------------------------------------------------------------

_operator = functools.partial(
    tpu_kernel,
    configs=CONFIGS,
    constraints=fits,
    bucket=bucket,
    reference=reference,
    autocast=torch.bfloat16,
)


@_operator("tpu::matmul")
def matmul(
    x: jax.Array,
    y: jax.Array,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
    precision: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply two matrices.

    Args:
        x: [M, K], or [K, M] with `transpose_x`; bfloat16, float16 or float32.
        y: [K, N], or [N, K] with `transpose_y`; may differ from `x` in dtype.
        transpose_x: `x` is stored transposed. Nothing is copied.
        transpose_y: `y` is stored transposed. Nothing is copied.
        precision: For float32: None or "default" (one bfloat16 pass on the MXU), "high" (three
            passes), "highest" (six).
        block_m: Rows of the output per grid step; None for the heuristic's choice.
        block_n: Columns of the output per grid step.
        block_k: Elements of the contracted dimension per grid step.
        interpret: Filled in by the toolkit.

    Returns:
        [M, N] in the promoted dtype of `x` and `y`, accumulated in float32.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` is unknown.
        DTypeError: An operand is not of a floating point type that the kernel multiplies.
        ConfigError: A block neither covers its dimension nor is a whole number of tiles.

    Example:
        >>> matmul(torch.ones(2, 3), torch.ones(3, 1))
        tensor([[3.],
                [3.]])
    """
    plan = make_plan(
        "tpu::matmul",
        2,
        x,
        y,
        transposed=(transpose_x, transpose_y),
        precision=precision,
        blocks=(block_m, block_n, block_k),
        interpret=interpret,
    )
    return _product(x, y, plan)


@_operator("tpu::bmm")
def bmm(
    x: jax.Array,
    y: jax.Array,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
    precision: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply two batches of matrices: `matmul` with one more grid axis in front.

    Args:
        x: [B, M, K], or [B, K, M] with `transpose_x`; bfloat16, float16 or float32.
        y: [B, K, N], or [B, N, K] with `transpose_y`; may differ from `x` in dtype.
        transpose_x: The matrices of `x` are stored transposed. Nothing is copied.
        transpose_y: The matrices of `y` are stored transposed. Nothing is copied.
        precision: As in `matmul`.
        block_m: As in `matmul`.
        block_n: As in `matmul`.
        block_k: As in `matmul`.
        interpret: Filled in by the toolkit.

    Returns:
        [B, M, N] in the promoted dtype of `x` and `y`, accumulated in float32.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` is unknown.
        DTypeError: An operand is not of a floating point type that the kernel multiplies.
        ConfigError: A block neither covers its dimension nor is a whole number of tiles.

    Example:
        >>> bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4)).shape
        torch.Size([5, 2, 4])
    """
    plan = make_plan(
        "tpu::bmm",
        3,
        x,
        y,
        transposed=(transpose_x, transpose_y),
        precision=precision,
        blocks=(block_m, block_n, block_k),
        interpret=interpret,
    )
    return _product(x, y, plan)
