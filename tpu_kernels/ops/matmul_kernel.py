"""The Pallas kernel of all matrix products: tiles of the output, K innermost, an epilogue.

The output is cut into ``block_m x block_n`` tiles. For each of them the grid walks the contracted
dimension, ``block_k`` at a time, and adds the partial products into a float32 tile that stays in
VMEM; what is fused and the rounding to the output's dtype happen once, in the last step. A block is
computed in pieces by a loop, so that blocks can be as large as VMEM allows (which is what saves HBM
traffic) while the code stays as long as the compiler likes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.epilogue import activate, as_rank
from tpu_kernels.ops.matmul_blocks import choose_blocks, limit, pieces
from tpu_kernels.ops.matmul_plan import Blocks, Operands, Plan
from tpu_kernels.ops.precision import Contraction, dot


class _Static(NamedTuple):
    """What the body knows of the grid and of its blocks."""

    plan: Plan
    axis: int  # grid axis of the contracted dimension
    steps: int  # its length
    tail: int  # elements of K in the last step, 0 if that block is full
    block: Blocks
    piece: Blocks
    keeps: bool  # the products themselves are outputs, too

    @property
    def contract(self) -> Contraction:
        return ((0 if self.plan.transpose_x else 1,), (1 if self.plan.transpose_y else 0,))


# Kernel body --------------------------------------------------------------------------------------


def _body(
    operands: Operands,  # references: x [m, k] or [k, m]; y and up [k, n] or [n, k]; bias, ...
    outputs: Sequence[Any],  # [m, n]: the result and, where they are kept, the products
    totals: Sequence[Any],  # float32 [m, n] for each product; none when one step does it all
    static: _Static,
) -> None:
    if static.steps == 1:
        _pieces(static, lambda at: _store(operands, outputs, _products(operands, at, static), at))
        return
    step = pl.program_id(static.axis)
    is_last = step == static.steps - 1

    def add(at: _Place) -> None:
        for total, product in zip(totals, _products(operands, at, static), strict=True):
            if static.steps == 2:
                total[at.rows, at.columns] = product
            else:
                # By select, for there is no telling what VMEM held before. A branch of its own for
                # the first step would be one more copy of the product's code.
                before = jnp.where(step == 0, 0.0, total[at.rows, at.columns])
                total[at.rows, at.columns] = before + product

    def finish(at: _Place) -> None:
        last = _products(operands, at, static, masked=bool(static.tail))
        sums = [t[at.rows, at.columns] + p for t, p in zip(totals, last, strict=True)]
        _store(operands, outputs, sums, at)

    # Two branches, so that only the last step masks the ragged end of K.
    pl.when(jnp.logical_not(is_last))(lambda: _pieces(static, add))
    pl.when(is_last)(lambda: _pieces(static, finish))


class _Place(NamedTuple):
    """A piece of the block."""

    rows: Any
    columns: Any
    static: _Static


def _pieces(static: _Static, compute: Callable[[_Place], None]) -> None:
    """Compute a block piece by piece."""
    (m, n, _), (rows, columns, _) = static.block, static.piece
    across = n // columns
    count = m // rows * across
    if count == 1:
        compute(_Place(slice(None), slice(None), static))
        return

    def one(index: Any, _: None) -> None:
        # Of 32 bits, whatever the mode of the trace; // would add code for signs.
        row = jax.lax.div(index, np.int32(across))
        column = jax.lax.rem(index, np.int32(across))
        compute(
            _Place(
                pl.ds(pl.multiple_of(row * rows, rows), rows),
                pl.ds(pl.multiple_of(column * columns, columns), columns),
                static,
            )
        )

    jax.lax.fori_loop(np.int32(0), np.int32(count), one, None)


def _products(
    operands: Operands, at: _Place, static: _Static, masked: bool = False
) -> list[jax.Array]:
    plan = static.plan
    # Mixed dtypes meet here, a tile at a time; promoting a whole operand costs HBM traffic.
    dtype = jnp.promote_types(operands.x.dtype, operands.y.dtype)
    x = operands.x[(slice(None), at.rows) if plan.transpose_x else (at.rows, slice(None))]
    x = x.astype(dtype)
    (x_axis,), (y_axis,) = static.contract
    if masked:
        x = _keep(x, x_axis, static.tail)
    found = []
    for ref in (operands.y, operands.up):
        if ref is None:
            continue
        y = ref[(at.columns, slice(None)) if plan.transpose_y else (slice(None), at.columns)]
        y = y.astype(dtype)
        if masked:
            y = _keep(y, y_axis, static.tail)
        found.append(dot(x, y, static.contract, plan.precision))
    return found


def _keep(tile: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros beyond `size` along `axis`.

    Both operands need it, and by select: what lies outside an array is anything, and 0 x NaN is
    NaN. The edges of M and N need no mask, for what they spoil is outside the output.
    """
    inside = jax.lax.broadcasted_iota(jnp.int32, tile.shape, axis) < size
    return jnp.where(inside, tile, jnp.zeros_like(tile))


def _store(
    operands: Operands, outputs: Sequence[Any], sums: Sequence[jax.Array], at: _Place
) -> None:
    plan = at.static.plan
    first = sums[0] if plan.alpha == 1 else sums[0] * plan.alpha
    if operands.bias is not None:
        bias = _added(operands.bias, at)
        first = first + (bias if plan.beta == 1 else bias * plan.beta)
    if at.static.keeps:
        for output, kept in zip(outputs[1:], (first, *sums[1:]), strict=True):
            output[at.rows, at.columns] = kept.astype(output.dtype)
    result = activate(first, plan.activation)
    if operands.up is not None:
        result = result * sums[1]
    if operands.residual is not None:
        result = result + _added(operands.residual, at)
    outputs[0][at.rows, at.columns] = result.astype(outputs[0].dtype)


def _added(ref: Any, at: _Place) -> jax.Array:
    """The part of a bias or residual that meets a piece; an axis of one element is broadcast."""
    rows, columns = ref.shape
    part = ref[
        at.rows if rows > 1 else slice(None),
        at.columns if columns > 1 else slice(None),
    ]
    wide: jax.Array = part.astype(jnp.float32)
    return wide


# Launcher -----------------------------------------------------------------------------------------


def launch(operands: Operands, plan: Plan, keeps: bool = False) -> list[jax.Array]:
    """One `pallas_call`.

    Args:
        operands: bfloat16 or float32; `x`, `y` and `up` with equal leading (batch) dimensions.
        plan: What to compute.
        keeps: Return what the activation is applied to as well and, gated, the second product.

    Returns:
        The result and what is kept, [..., M, N] in the plan's dtype.
    """
    x, y = operands.x, operands.y
    m, n, k = plan.sizes(x, y)
    batch = x.shape[:-2]
    out = jax.ShapeDtypeStruct((*batch, m, n), plan.out_dtype)
    products = 1 if operands.up is None else 2
    outs = [out] * (1 + (products if keeps else 0))
    if 0 in out.shape:  # a grid cannot be empty
        return [jnp.zeros(o.shape, o.dtype) for o in outs]
    if not all(isinstance(size, int) for size in (*out.shape, k)):
        # Sizes are symbols only while the registry derives the result's shape. Blocks cannot be
        # chosen for symbols, and any operation of that shape will do.
        return [jnp.empty(o.shape, o.dtype) for o in outs]
    if k == 0:  # a sum over nothing is zero, which one element of zeros makes as well
        return launch(_one_zero(operands, plan), plan, keeps)
    return _call(operands, plan, choose_blocks(operands, plan), outs, keeps)


def _one_zero(operands: Operands, plan: Plan) -> Operands:
    def padded(operand: Any, axis: int) -> Any:
        if operand is None:
            return None
        shape = list(operand.shape)
        shape[axis] = 1
        return jnp.zeros(shape, operand.dtype)

    return operands._replace(
        x=padded(operands.x, -2 if plan.transpose_x else -1),
        y=padded(operands.y, -1 if plan.transpose_y else -2),
        up=padded(operands.up, -1 if plan.transpose_y else -2),
    )


def _call(
    operands: Operands, plan: Plan, blocks: Blocks, outs: list[Any], keeps: bool
) -> list[jax.Array]:
    x, y = operands.x, operands.y
    m, n, k = plan.sizes(x, y)
    batch = x.shape[:-2]
    steps = pl.cdiv(k, blocks.k)
    static = _Static(
        plan, len(batch) + 2, steps, k % blocks.k, blocks, pieces(operands, plan, blocks), keeps
    )
    products = 1 if operands.up is None else 2
    arrays = operands._replace(
        bias=None if operands.bias is None else as_rank(operands.bias, len(batch) + 2),
        residual=None if operands.residual is None else as_rank(operands.residual, len(batch) + 2),
    )
    given = [
        name for name, array in zip(Operands._fields, arrays, strict=True) if array is not None
    ]
    specs = _specs(arrays, plan, blocks)
    result = _spec((blocks.m, blocks.n), lambda row, column, step: (row, column), batch)

    def body(*refs: Any) -> None:
        inputs = Operands(**{"x": None, "y": None, **dict(zip(given, refs, strict=False))})
        outputs = refs[len(given) : len(given) + len(outs)]
        _body(inputs, outputs, refs[len(given) + len(outs) :], static)

    # x is read once per column of blocks, y once per row of blocks
    moved = sum(math.prod(o.shape) * jnp.dtype(o.dtype).itemsize for o in outs)
    for name in given:
        array = getattr(arrays, name)
        again = {"x": pl.cdiv(n, blocks.n), "y": pl.cdiv(m, blocks.m), "up": pl.cdiv(m, blocks.m)}
        moved += array.size * array.dtype.itemsize * again.get(name, 1)
    call = pl.pallas_call(
        body,
        out_shape=outs,
        grid=(*batch, pl.cdiv(m, blocks.m), pl.cdiv(n, blocks.n), steps),
        in_specs=[specs[name] for name in given],
        out_specs=[result] * len(outs),
        scratch_shapes=[
            pltpu.VMEM((blocks.m, blocks.n), jnp.float32)
            for _ in range(products if steps > 1 else 0)
        ],
        compiler_params=pltpu.CompilerParams(
            # Parallel: a chip with two cores shares the output. K revisits it, so in order.
            dimension_semantics=[*[pltpu.PARALLEL] * (len(batch) + 2), pltpu.ARBITRARY],
            vmem_limit_bytes=limit(operands, plan, blocks),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * math.prod(batch) * m * n * k * products,
            bytes_accessed=moved,
            transcendentals=math.prod(outs[0].shape) if plan.activation else 0,
        ),
        interpret=plan.interpret,
        name=plan.kernel.replace("::", "_"),
    )
    found: list[jax.Array] = call(*[getattr(arrays, name) for name in given])
    return found


def _spec(shape: tuple[int, ...], place: Any, batch: Sequence[int]) -> pl.BlockSpec:
    """Blocks of `shape` at ``place(row, column, step)`` in the matrices of a batch."""
    return pl.BlockSpec((*[None] * len(batch), *shape), lambda *at: (*at[:-3], *place(*at[-3:])))


def _specs(arrays: Operands, plan: Plan, blocks: Blocks) -> dict[str, pl.BlockSpec]:
    batch = arrays.x.shape[:-2]
    found = {}
    if plan.transpose_x:
        found["x"] = _spec((blocks.k, blocks.m), lambda row, column, step: (step, row), batch)
    else:
        found["x"] = _spec((blocks.m, blocks.k), lambda row, column, step: (row, step), batch)
    if plan.transpose_y:
        found["y"] = _spec((blocks.n, blocks.k), lambda row, column, step: (column, step), batch)
    else:
        found["y"] = _spec((blocks.k, blocks.n), lambda row, column, step: (step, column), batch)
    found["up"] = found["y"]
    for name in ("bias", "residual"):
        array = getattr(arrays, name)
        if array is not None:
            found[name] = _added_spec(array.shape, blocks)
    return found


def _added_spec(shape: Sequence[int], blocks: Blocks) -> pl.BlockSpec:
    """Blocks of an operand that is added: where it has one element, that one stays."""
    block: list[int | None] = [None] * (len(shape) - 2)
    block += [min(size, b) for size, b in zip(shape[-2:], (blocks.m, blocks.n), strict=True)]

    def place(*at: Any) -> tuple[Any, ...]:
        where = at[:-1]  # without the step in K
        return tuple(0 if size == 1 else i for size, i in zip(shape, where, strict=True))

    return pl.BlockSpec(tuple(block), place)
