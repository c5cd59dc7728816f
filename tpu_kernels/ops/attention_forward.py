"""The forward kernel of attention: online softmax over the blocks that a static mask leaves.

Everything is transposed: scores are [keys, queries], the accumulator is [v_dim, queries]. Maxima
and sums over keys are then elementwise operations of registers, what is kept per query is one row,
and the second product streams the few rows of the transposed values through the MXU while the
weights sit in it: on the 256-wide MXUs of v6e and tpu7x that product wastes nothing at a head
dimension of 128, where the usual orientation leaves half of the columns idle.

A block is computed in parts, in three stages each: products and their maximum, exponentials, and
the product with the values. Stage by stage, the code of three successive parts is interleaved, so
that the MXU works on one part while the vector units work on another. Scores pass through VMEM
between the first two stages on purpose: held as values they would be spilled and reloaded several
times.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.attention_blocks import (
    EMPTY,
    FIRST,
    FULL,
    KIND_SHIFT,
    LAST,
    Cut,
    Part,
    Steps,
    block_of,
    flags_of,
    parts_of,
    steps_of,
)
from tpu_kernels.ops.attention_operands import Operands, pad_to, segment_overlap
from tpu_kernels.ops.attention_plan import Blocks, Plan, Shape, choose_blocks, shape_of, vmem_need
from tpu_kernels.ops.attention_scores import (
    LN2,
    LOG2E,
    START,
    Scores,
    Tile,
    Where,
    factor,
    over_keys,
)
from tpu_kernels.ops.precision import dot
from tpu_kernels.ops.tiles import vmem_limit

_NN = ((1,), (0,))
_NT = ((1,), (1,))


def splits(plan: Plan, shape: Shape, dtype: Any) -> bool:
    """Whether queries carry the scale, as the sum of two numbers of their dtype.

    One bfloat16 number would lose what makes a score exact. A second one doubles the depth of the
    product, which costs nothing where the MXU is deeper than the heads are; elsewhere, multiplying
    every score is cheaper.
    """
    if dtype != jnp.bfloat16:
        return True
    if plan.split_scale is not None:
        return plan.split_scale
    return 2 * shape.depth <= _mxu_depth()


def _mxu_depth() -> int:
    """Rows of an MXU of the chip that a program is lowered for; of recent chips if that is unknown.

    The abstract device tells, and nobody else is asked: `pltpu.get_tpu_info` without one starts
    JAX's backends.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return 256 if device is None else pltpu.get_tpu_info().mxu_column_size


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Attention and the logarithm of the sums of its exponentials.

    Args:
        q: [batch, heads, q_len, head_dim], bfloat16 or float32.
        k: [batch, kv_heads, kv_len, head_dim].
        v: [batch, kv_heads, kv_len, v_dim].
        operands: Optional operands.
        plan: The call's options.

    Returns:
        [batch, heads, q_len, v_dim] in the dtype of `q`, and float32 [batch, heads, q_len], which
        is minus infinity where a query sees no key.
    """
    shape = shape_of(q, k, v)
    blocks = choose_blocks(shape, q.dtype.itemsize, plan.blocks, plan.kernel)
    lengths = (shape.queries, shape.keys)
    steps = steps_of(plan.band, lengths, blocks.block)
    q = pad_to(q, 2, blocks.q)
    k, v = pad_to(k, 2, blocks.kv), pad_to(v, 2, blocks.kv)
    values = v.swapaxes(2, 3)  # of all layouts that the kernel could ask for, XLA makes this cheap
    group, split = shape.group, splits(plan, shape, q.dtype)

    def at(place: Any) -> Any:
        """`place(batch, head, block of queries, block of keys)` as an index map."""
        return lambda b, h, s, blocks_at, *_: place(b, h, *block_of(blocks_at[s]))

    named, specs, arrays = operands.blocked(shape, blocks, at)
    scalars: list[jax.Array] = [jnp.asarray(a) for a in steps.packed()]
    scalars.append(segment_overlap(operands, blocks) if operands.segmented else jnp.zeros((1, 1)))
    scalars[-1] = scalars[-1].astype(jnp.int32)

    body = functools.partial(
        _body, names=named, plan=plan, shape=shape, blocks=blocks, steps=steps, split=split
    )
    depth = 2 * shape.depth if split and q.dtype == jnp.bfloat16 else shape.depth
    padded_q = q.shape[2]
    need = vmem_need(shape, q.dtype, blocks) + operands.vmem(blocks)
    pairs = len(steps.q) * blocks.q * blocks.kv * shape.batch * shape.heads
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.batch, shape.heads, len(steps.q)),
            in_specs=[
                pl.BlockSpec(
                    (None, None, blocks.q, shape.depth), at(lambda b, h, i, j: (b, h, i, 0))
                ),
                pl.BlockSpec(
                    (None, None, blocks.kv, shape.depth),
                    at(lambda b, h, i, j: (b, h // group, j, 0)),
                ),
                pl.BlockSpec(
                    (None, None, shape.depth_v, blocks.kv),
                    at(lambda b, h, i, j: (b, h // group, 0, j)),
                ),
                *specs,
            ],
            out_specs=[
                pl.BlockSpec(
                    (None, None, blocks.q, shape.depth_v), at(lambda b, h, i, j: (b, h, i, 0))
                ),
                pl.BlockSpec((None, None, 1, blocks.q), at(lambda b, h, i, j: (b, h, 0, i))),
            ],
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
            jax.ShapeDtypeStruct((*q.shape[:3], shape.depth_v), q.dtype),
            jax.ShapeDtypeStruct((shape.batch, shape.heads, 1, padded_q), jnp.float32),
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
    )
    out, lse = call(*scalars, q, k, values, *arrays)
    return out[:, :, : shape.queries], lse[:, :, 0, : shape.queries]


def _body(
    blocks_at: Any,  # scalar memory: the steps
    flags_at: Any,
    overlap: Any,  # [batch, q blocks x kv blocks], whether segments of the blocks meet
    q_ref: Any,  # [block_q, head_dim]
    k_ref: Any,  # [block_kv, head_dim]
    v_ref: Any,  # [v_dim, block_kv]
    *refs: Any,
    names: Sequence[str],
    plan: Plan,
    shape: Shape,
    blocks: Blocks,
    steps: Steps,
    split: bool,
) -> None:
    optional = dict(zip(names, refs, strict=False))
    out_ref, lse_ref, scaled_ref, top_ref, sum_ref, total_ref, *scores = refs[len(names) :]
    batch, head, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    i, j = block_of(blocks_at[step])
    flag, _ = flags_of(flags_at[step])
    query_factor, product_factor = factor(plan, split)
    double = split and q_ref.dtype == jnp.bfloat16

    @pl.when(flag & FIRST != 0)
    def _start() -> None:
        scale_queries(q_ref, scaled_ref, slice(None), query_factor if split else None)
        if "sinks" in optional:
            # a key of its own, with this score and no value; the eight rows of the sum add up to it
            sink = optional["sinks"][head] * LOG2E
            top_ref[...] = jnp.full_like(top_ref, sink)
            sum_ref[...] = jnp.full_like(sum_ref, 1 / 8)
        else:
            top_ref[...] = jnp.full_like(top_ref, START)
            sum_ref[...] = jnp.zeros_like(sum_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    def branch(parts: Sequence[Part], cut: Cut | None) -> None:
        ragged = shape.keys % blocks.kv != 0
        where = Where(
            cut,
            delta=i * blocks.q + plan.band.offset - j * blocks.kv,
            keys=shape.keys - j * blocks.kv if ragged else None,
            first_q=i * blocks.q,
            first_kv=j * blocks.kv,
            head=batch * shape.heads + head,
        )
        score = Scores(plan, blocks, product_factor, optional, where)
        state: dict[tuple[str, int], Any] = {}

        def tile(part: Part) -> Tile:
            return Tile(
                part.kv * blocks.part_kv, part.q * blocks.part_q, blocks.part_kv, blocks.part_q
            )

        def multiply(n: int) -> None:
            at, cut_here = tile(parts[n]), parts[n].cut
            keys = k_ref[at.rows, :]
            keys = jnp.concatenate([keys, keys], axis=1) if double else keys
            product = dot(keys, scaled_ref[at.columns, :], _NT, plan.precision)
            top = None
            for piece in at.pieces(score.rows):
                row = piece.kv - at.kv
                x, _ = score(product[row : row + piece.keys], piece, cut_here)
                scores[n % 2][row : row + piece.keys, :] = x
                here = over_keys(x, jnp.max)
                top = here if top is None else jnp.maximum(top, here)
            state["top", n] = top

        def exponentiate(n: int) -> None:
            at = tile(parts[n])
            before = top_ref[:, at.columns]
            top = jnp.maximum(before, state.pop(("top", n)).max(axis=0, keepdims=True))
            shrink = jnp.exp2(before - top)
            total = sum_ref[:, at.columns] * shrink
            weights = []
            for piece in at.pieces(score.rows):
                row = piece.kv - at.kv
                weight = jnp.exp2(scores[n % 2][row : row + piece.keys, :] - top)
                total = total + over_keys(weight, jnp.sum)
                kept = score.kept(piece)
                weight = weight if kept is None else jnp.where(kept, weight, 0.0)
                weights.append(weight.astype(v_ref.dtype))
            top_ref[:, at.columns], sum_ref[:, at.columns] = top, total
            state["weights", n] = jnp.concatenate(weights, axis=0), shrink

        def accumulate(n: int) -> None:
            at = tile(parts[n])
            weights, shrink = state.pop(("weights", n))
            here = dot(v_ref[:, at.rows], weights, _NN, plan.precision)
            total_ref[:, at.columns] = total_ref[:, at.columns] * shrink + here

        for turn in range(len(parts) + 2):
            for stage, n in ((multiply, turn), (exponentiate, turn - 1), (accumulate, turn - 2)):
                if 0 <= n < len(parts):
                    stage(n)

    meets = None
    if "q_segments" in optional:
        kv_blocks = -(-shape.keys // blocks.kv)
        meets = overlap[batch, i * kv_blocks + j] != 0
    each_branch(steps, plan, blocks, flag >> KIND_SHIFT, meets, branch)

    @pl.when(flag & LAST != 0)
    def _finish() -> None:
        total = sum_ref[...].sum(axis=0, keepdims=True)
        share = 1 / jnp.where(total == 0, 1.0, total) / (1 - plan.dropout)
        out_ref[...] = (total_ref[...] * share).T.astype(out_ref.dtype)
        lse_ref[...] = (top_ref[...] + jnp.log2(total)) * LN2


def scale_queries(q_ref: Any, scaled_ref: Any, rows: slice, query_factor: float | None) -> None:
    """Store some queries times their factor, as two bfloat16 numbers side by side, or as float32.

    Args:
        q_ref: [block_q, head_dim].
        scaled_ref: [block_q, head_dim], twice as wide for two numbers.
        rows: Which queries.
        query_factor: None to store them as they are.
    """
    if query_factor is None:
        scaled_ref[rows, :] = q_ref[rows, :]
        return
    depth = q_ref.shape[1]
    scaled = q_ref[rows, :].astype(jnp.float32) * query_factor
    high = scaled.astype(q_ref.dtype)
    scaled_ref[rows, :depth] = high
    if scaled_ref.shape[1] > depth:
        scaled_ref[rows, depth:] = (scaled - high.astype(jnp.float32)).astype(q_ref.dtype)


def each_branch(
    steps: Steps,
    plan: Plan,
    blocks: Blocks,
    kind: Any,
    condition: Any,
    branch: Any,
) -> None:
    """Call `branch(parts, cut)` under the condition that a step is of that kind.

    Args:
        steps: All steps.
        plan: The call's options.
        blocks: The blocks in force.
        kind: The step's kind, at run time.
        condition: Another condition at run time, or None.
        branch: What emits the code for a kind of block.
    """
    for value in sorted(steps.kinds - {EMPTY}):
        cut = steps.cuts[value - 2] if value >= 2 and steps.cuts else None
        parts = parts_of(plan.band, cut, blocks.block, blocks.part)
        if value != FULL and cut is None:
            parts = tuple(part._replace(cut=True) for part in parts)
        meets = kind == value
        meets = meets if condition is None else meets & condition
        pl.when(meets)(functools.partial(branch, parts, cut))
