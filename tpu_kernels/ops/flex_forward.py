"""The forward kernel of FlexAttention: that of `attention_forward`, with mods.

The dataflow and its schedule are described there: everything is transposed, and a block is computed
part by part in three interleaved stages. What differs is what happens between a product and a
score (`flex_scores`), and that the list of blocks is known at run time only (`flex_blocks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.attention_blocks import (
    FIRST,
    KIND_SHIFT,
    LAST,
    block_of,
    flags_of,
)
from tpu_kernels.ops.attention_forward import scale_queries, splits
from tpu_kernels.ops.attention_operands import pad_to
from tpu_kernels.ops.attention_plan import Blocks, Shape, shape_of, vmem_need
from tpu_kernels.ops.attention_scores import LN2, START, Tile, over_keys
from tpu_kernels.ops.flex_blocks import Lists, Part, grain_of, kinds_of, lists_of, patterns
from tpu_kernels.ops.flex_operands import Operands, operands
from tpu_kernels.ops.flex_plan import FlexPlan, Mods, blocks_of, mods_of, sparsity_of
from tpu_kernels.ops.flex_program import Program
from tpu_kernels.ops.flex_scores import FlexScores
from tpu_kernels.ops.precision import dot
from tpu_kernels.ops.tiles import vmem_limit

_NN = ((1,), (0,))
_NT = ((1,), (1,))
NO_OPERANDS = Operands((), (), ())


def operands_of(mods: Mods, shape: Shape, blocks: Blocks, at: Any) -> tuple[Operands, Operands]:
    """The operands of the score_mod and of the mask_mod."""

    def of(program: Program | None, found: Sequence[jax.Array]) -> Operands:
        return NO_OPERANDS if program is None else operands(program, found, shape, blocks, at)

    return of(mods.score, mods.score_values), of(mods.mask, mods.mask_values)


def problem(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tensors: Any,
    buffers: Any,
    plan: FlexPlan,
    *,
    backward: bool = False,
) -> tuple[Shape, Mods, Blocks, Any]:
    """Sizes, mods, blocks in force, and the kind of each block."""
    shape = shape_of(q, k, v)
    mods, sparsity = mods_of(plan, buffers, shape), sparsity_of(plan, tensors)
    blocks = blocks_of(plan, mods, shape, q.dtype.itemsize, sparsity, backward=backward)
    grain = grain_of(blocks, plan.sparse_block)
    kinds = kinds_of(sparsity, mods.mask is None, shape, blocks, grain)
    return shape, mods, blocks, kinds


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tensors: Any, buffers: Any, plan: FlexPlan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention, the logarithm of the sums of its exponentials, and the largest scores.

    Args:
        q: [batch, heads, q_len, head_dim], bfloat16 or float32.
        k: [batch or 1, kv_heads, kv_len, head_dim].
        v: [batch or 1, kv_heads, kv_len, v_dim].
        tensors: Those of the BlockMask, or none.
        buffers: Captured tensors.
        plan: The call's options.

    Returns:
        [batch, heads, q_len, v_dim] in the dtype of `q`, and float32 [batch, heads, q_len] twice,
        minus infinity where a query sees no key.
    """
    shape, mods, blocks, kinds = problem(q, k, v, tensors, buffers, plan)
    lists = lists_of(kinds)
    shared = k.shape[0] == 1
    q = pad_to(q, 2, blocks.q)
    k, v = pad_to(k, 2, blocks.kv), pad_to(v, 2, blocks.kv)
    values = v.swapaxes(2, 3)
    group, split = shape.group, splits(plan, shape, q.dtype)

    def at(place: Any) -> Any:
        """`place(batch, head, block of queries, block of keys)` as an index map."""

        def index(b: Any, h: Any, s: Any, words: Any, *_: Any) -> Any:
            return place(b, h, *block_of(words[lists.place(b, h, shape.heads, s)]))

        return index

    def of_keys(size: tuple[int, int], across: bool) -> pl.BlockSpec:
        def place(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (0 if shared else b, h // group, 0, j) if across else (
                0 if shared else b, h // group, j, 0)  # fmt: skip

        return pl.BlockSpec((None, None, *size), at(place))

    by_query = at(lambda b, h, i, j: (b, h, i, 0))
    row = pl.BlockSpec((None, None, 1, blocks.q), at(lambda b, h, i, j: (b, h, 0, i)))
    given = operands_of(mods, shape, blocks, at)
    depth = 2 * shape.depth if split and q.dtype == jnp.bfloat16 else shape.depth
    need = vmem_need(shape, q.dtype, blocks) + sum(each.vmem(blocks) for each in given)
    pairs = lists.length * blocks.q * blocks.kv * shape.batch * shape.heads
    rows = jax.ShapeDtypeStruct((shape.batch, shape.heads, 1, q.shape[2]), jnp.float32)
    call = pl.pallas_call(
        functools.partial(
            _body, plan=plan, mods=mods, given=given, shape=shape, blocks=blocks, lists=lists,
            split=split,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(shape.batch, shape.heads, lists.count),
            in_specs=[
                pl.BlockSpec((None, None, blocks.q, shape.depth), by_query),
                of_keys((blocks.kv, shape.depth), False),
                of_keys((shape.depth_v, blocks.kv), True),
                *given[0].specs,
                *given[1].specs,
            ],
            out_specs=[pl.BlockSpec((None, None, blocks.q, shape.depth_v), by_query), row, row],
            scratch_shapes=[
                pltpu.VMEM((blocks.q, depth), q.dtype),
                pltpu.VMEM((1, blocks.q), jnp.float32),
                pltpu.VMEM((8, blocks.q), jnp.float32),
                pltpu.VMEM((shape.depth_v, blocks.q), jnp.float32),
                pltpu.VMEM((blocks.part_kv, blocks.part_q), jnp.float32),
                pltpu.VMEM((blocks.part_kv, blocks.part_q), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:3], shape.depth_v), q.dtype), rows, rows
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY],
            vmem_limit_bytes=vmem_limit(need),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (shape.depth + shape.depth_v),
            transcendentals=pairs,
            bytes_accessed=q.dtype.itemsize
            * (q.size + q.size // shape.depth * shape.depth_v + group * (k.size + v.size)),
        ),
        interpret=plan.interpret,
        name=f"{plan.kernel.replace('::', '_')}_forward",
    )  # fmt: skip
    scalars = (jnp.asarray(lists.words), jnp.asarray(lists.flags))
    out, lse, top = call(*scalars, q, k, values, *given[0].arrays, *given[1].arrays)
    queries = slice(shape.queries)
    return out[:, :, queries], lse[:, :, 0, queries], top[:, :, 0, queries]


def _body(
    words: Any,  # scalar memory: the steps
    flags: Any,
    q_ref: Any,  # [block_q, head_dim]
    k_ref: Any,  # [block_kv, head_dim]
    v_ref: Any,  # [v_dim, block_kv]
    *refs: Any,
    plan: FlexPlan,
    mods: Mods,
    given: tuple[Operands, Operands],
    shape: Shape,
    blocks: Blocks,
    lists: Lists,
    split: bool,
) -> None:
    count = len(given[0].readers) + len(given[1].readers)
    captured, refs = refs[:count], refs[count:]
    out_ref, lse_ref, most_ref, scaled_ref, top_ref, sum_ref, total_ref, *scores = refs
    batch, head = pl.program_id(0), pl.program_id(1)
    here = lists.place(batch, head, shape.heads, pl.program_id(2))
    i, j = block_of(words[here])
    flag, _ = flags_of(flags[here])
    query_factor, product_factor = plan.factors(split)
    double = split and q_ref.dtype == jnp.bfloat16

    @pl.when(flag & FIRST != 0)
    def _start() -> None:
        scale_queries(q_ref, scaled_ref, slice(None), query_factor if split else None)
        top_ref[...] = jnp.full_like(top_ref, START)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    def branch(parts: Sequence[Part]) -> None:
        ragged = shape.keys % blocks.kv != 0
        score = FlexScores(
            plan,
            mods,
            given,
            captured,
            product_factor,
            (batch, head, i * blocks.q, j * blocks.kv),
            shape.heads,
            shape.keys - j * blocks.kv if ragged else None,
            blocks,
        )
        state: dict[tuple[str, int], Any] = {}

        def multiply(n: int) -> None:
            at = tile_of(parts[n], blocks)
            keys = k_ref[at.rows, :]
            keys = jnp.concatenate([keys, keys], axis=1) if double else keys
            product = dot(keys, scaled_ref[at.columns, :], _NT, plan.precision)
            top = None
            for piece in at.pieces(score.rows):
                row = piece.kv - at.kv
                x = score(product[row : row + piece.keys], piece, parts[n].cut)
                scores[n % 2][row : row + piece.keys, :] = x
                largest = over_keys(x, jnp.max)
                top = largest if top is None else jnp.maximum(top, largest)
            state["top", n] = top

        def exponentiate(n: int) -> None:
            at = tile_of(parts[n], blocks)
            before = top_ref[:, at.columns]
            top = jnp.maximum(before, state.pop(("top", n)).max(axis=0, keepdims=True))
            shrink = jnp.exp2(before - top)
            total = sum_ref[:, at.columns] * shrink
            weights = []
            for piece in at.pieces(score.rows):
                row = piece.kv - at.kv
                weight = jnp.exp2(scores[n % 2][row : row + piece.keys, :] - top)
                total = total + over_keys(weight, jnp.sum)
                weights.append(weight.astype(v_ref.dtype))
            top_ref[:, at.columns], sum_ref[:, at.columns] = top, total
            state["weights", n] = jnp.concatenate(weights, axis=0), shrink

        def accumulate(n: int) -> None:
            at = tile_of(parts[n], blocks)
            weights, shrink = state.pop(("weights", n))
            product = dot(v_ref[:, at.rows], weights, _NN, plan.precision)
            total_ref[:, at.columns] = total_ref[:, at.columns] * shrink + product

        pipeline(len(parts), multiply, exponentiate, accumulate)

    each_pattern(plan, blocks, lists, flag >> KIND_SHIFT, branch)

    @pl.when(flag & LAST != 0)
    def _finish() -> None:
        total = sum_ref[...].sum(axis=0, keepdims=True)
        share = 1 / jnp.where(total == 0, 1.0, total)
        out_ref[...] = (total_ref[...] * share).T.astype(out_ref.dtype)
        lse_ref[...] = (top_ref[...] + jnp.log2(total)) * LN2
        most_ref[...] = jnp.where(total == 0, -jnp.inf, top_ref[...] * LN2)


def tile_of(part: Part, blocks: Blocks) -> Tile:
    """Where a part lies in its block."""
    return Tile(part.kv * blocks.part_kv, part.q * blocks.part_q, blocks.part_kv, blocks.part_q)


def pipeline(count: int, *stages: Callable[[int], None]) -> None:
    """Emit the stages of all parts, each stage one part behind the stage before it."""
    for turn in range(count + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= turn - behind < count:
                stage(turn - behind)


def each_pattern(
    plan: FlexPlan,
    blocks: Blocks,
    lists: Lists,
    kind: Any,
    branch: Callable[[Sequence[Part]], None],
) -> None:
    """Call `branch` with the parts of each pattern, under the condition that the step is of it."""
    for number, pattern in enumerate(patterns(blocks, grain_of(blocks, plan.sparse_block)), 1):
        if lists.kinds is None or number in lists.kinds:
            pl.when(kind == number)(functools.partial(branch, pattern.parts))
