"""The backward kernels of attention: weights are computed again from the saved `lse`.

As in the forward everything is transposed (see there), and so are the gradients while they are
summed up: [head_dim, queries] or [head_dim, keys], which the wide MXUs fill where the usual
orientation leaves half of them idle.

One kernel visits all blocks of queries for one block of keys after the other and makes all three
gradients. That of the queries is summed up in VMEM for all queries of a group of heads. Where this
does not fit, there are two kernels: one for keys and values, one for queries, and scores are
computed twice.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.attention_blocks import block_of, flags_of, steps_of
from tpu_kernels.ops.attention_forward import splits
from tpu_kernels.ops.attention_gradients import Wanted, body
from tpu_kernels.ops.attention_operands import Operands, pad_to, segment_overlap
from tpu_kernels.ops.attention_plan import Blocks, Plan, Shape, choose_blocks, shape_of
from tpu_kernels.ops.attention_scores import LOG2E, MASKED
from tpu_kernels.ops.tiles import MIB, padded_bytes, round_up, vmem_limit

# What the queries' gradients of a group may take, as sums and as results: with that and the blocks
# a kernel fits 64 MiB (v5p, tpu7x).
FUSED_BYTES = 36 * MIB


class Saved(NamedTuple):
    """What the backward needs of the forward."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    operands: Operands
    out: jax.Array
    lse: jax.Array


def backward(
    saved: Saved, grad: jax.Array, grad_lse: jax.Array | None, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values.

    Args:
        saved: Inputs and results of the forward.
        grad: Gradient of the output, [batch, heads, q_len, v_dim].
        grad_lse: Gradient of `lse`, float32 [batch, heads, q_len], or None.
        plan: The call's options.

    Returns:
        Gradients in the shapes and dtypes of `q`, `k` and `v`.
    """
    q, k, v, operands, out, lse = saved
    shape = shape_of(q, k, v)
    blocks = choose_blocks(
        shape, q.dtype.itemsize, plan.backward_blocks, plan.kernel, backward=True
    )
    grad = grad.astype(q.dtype)
    weight = (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(axis=-1)
    if grad_lse is not None:
        weight = weight - grad_lse
    # A query that sees nothing has weights of zero, which this makes of its masked scores.
    lse = jnp.where(jnp.isneginf(lse), -MASKED, lse * LOG2E)

    launch = functools.partial(
        _launch, q, k, v, operands, grad, lse, weight, plan=plan, shape=shape, blocks=blocks
    )
    if _resident(shape, blocks, q.dtype) <= FUSED_BYTES:
        dq, dk, dv = launch(wanted=Wanted(q=True, kv=True))
    else:
        dk, dv = launch(wanted=Wanted(q=False, kv=True))
        (dq,) = launch(wanted=Wanted(q=True, kv=False))
    return dq[:, :, : shape.queries], dk[:, :, : shape.keys], dv[:, :, : shape.keys]


def _resident(shape: Shape, blocks: Blocks, dtype: Any) -> int:
    """Bytes of the queries' gradients of one group of heads: sums, and two buffers of results."""
    rows = shape.group * round_up(shape.queries, blocks.q)
    sums = padded_bytes((shape.depth, rows), jnp.float32)
    return sums + 2 * padded_bytes((rows, shape.depth), dtype)


def _launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
    grad: jax.Array,
    lse: jax.Array,
    weight: jax.Array,
    *,
    plan: Plan,
    shape: Shape,
    blocks: Blocks,
    wanted: Wanted,
) -> tuple[jax.Array, ...]:
    group = shape.group
    steps = steps_of(
        plan.band,
        (shape.queries, shape.keys),
        blocks.block,
        by_keys=wanted.kv,
        group=group if wanted.kv else 1,
    )
    q, grad = pad_to(q, 2, blocks.q), pad_to(grad, 2, blocks.q)
    k, v = pad_to(k, 2, blocks.kv), pad_to(v, 2, blocks.kv)
    lse, weight = (pad_to(x, 2, blocks.q)[:, :, None, :] for x in (lse, weight))
    split = splits(plan, shape, q.dtype)

    def at(place: Any) -> Any:
        """`place(batch, query head, block of queries, block of keys)` as an index map."""
        if wanted.kv:
            return lambda b, h, s, blocks_at, flags_at, *_: place(
                b, h * group + flags_of(flags_at[s])[1], *block_of(blocks_at[s])
            )
        return lambda b, h, s, blocks_at, *_: place(b, h, *block_of(blocks_at[s]))

    def of_queries(depth: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, blocks.q, depth), at(lambda b, h, i, j: (b, h, i, 0)))

    def of_keys(depth: int) -> pl.BlockSpec:
        place = at(lambda b, h, i, j: (b, h // group, j, 0))
        return pl.BlockSpec((None, None, blocks.kv, depth), place)

    row = pl.BlockSpec((None, None, 1, blocks.q), at(lambda b, h, i, j: (b, h, 0, i)))
    arrays: list[tuple[str, pl.BlockSpec, jax.Array]] = [
        ("q", of_queries(shape.depth), q),
        ("k", of_keys(shape.depth), k),
        ("v", of_keys(shape.depth_v), v),
        ("grad", of_queries(shape.depth_v), grad),
        ("lse", row, lse),
        ("weight", row, weight),
    ]
    if wanted.q:
        place = at(lambda b, h, i, j: (b, h // group, 0, j))
        spec = pl.BlockSpec((None, None, shape.depth, blocks.kv), place)
        arrays.append(("k_transposed", spec, k.swapaxes(2, 3)))
    arrays += zip(*operands.blocked(shape, blocks, at), strict=True)
    scalars: list[jax.Array] = [jnp.asarray(a) for a in steps.packed()]
    scalars.append(
        segment_overlap(operands, blocks) if operands.segmented else jnp.zeros((1, 1), jnp.int32)
    )
    outputs, scratch = _outputs(wanted, shape, blocks, q, k, v, at)
    depth = 2 * shape.depth if split and q.dtype == jnp.bfloat16 else shape.depth
    scratch.insert(0, ("scaled", pltpu.VMEM((blocks.q, depth), q.dtype)))
    names = [name for name, _, _ in arrays]
    heads = shape.kv_heads if wanted.kv else shape.heads
    products = 3 * shape.depth + 2 * shape.depth_v if wanted.kv else 2 * shape.depth + shape.depth_v
    pairs = len(steps.q) * blocks.q * blocks.kv * shape.batch * heads
    call = pl.pallas_call(
        functools.partial(
            body,
            names=names,
            outputs=[name for name, _, _ in outputs],
            wanted=wanted,
            plan=plan,
            shape=shape,
            blocks=blocks,
            steps=steps,
            split=split,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.batch, heads, len(steps.q)),
            in_specs=[spec for _, spec, _ in arrays],
            out_specs=[spec for _, spec, _ in outputs],
            scratch_shapes=[scratch_shape for _, scratch_shape in scratch],
        ),
        out_shape=[out for _, _, out in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY],
            vmem_limit_bytes=vmem_limit(_need(arrays, outputs, scratch)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * products,
            transcendentals=pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for _, _, x in arrays),
        ),
        interpret=plan.interpret,
        name=f"{plan.kernel.replace('::', '_')}_backward_{wanted.label}",
    )
    results: tuple[jax.Array, ...] = tuple(call(*scalars, *(x for _, _, x in arrays)))
    return results


def _outputs(
    wanted: Wanted,
    shape: Shape,
    blocks: Blocks,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: Any,
) -> tuple[list[tuple[str, pl.BlockSpec, Any]], list[tuple[str, Any]]]:
    """Name, block spec and shape of each output; name and shape of each scratch buffer."""
    part = pltpu.VMEM((blocks.part_kv, blocks.part_q), jnp.float32)
    outputs: list[tuple[str, pl.BlockSpec, Any]] = []
    scratch: list[tuple[str, Any]] = [(f"part{n}", part) for n in range(4)]
    if wanted.q and wanted.kv:
        group = shape.group
        whole = pl.BlockSpec((None, group, q.shape[2], shape.depth), lambda b, h, *_: (b, h, 0, 0))
        outputs.append(("dq", whole, jax.ShapeDtypeStruct(q.shape, q.dtype)))
        blocks_of_q = group * (q.shape[2] // blocks.q)
        scratch.append(("sum_q", pltpu.VMEM((blocks_of_q, shape.depth, blocks.q), jnp.float32)))
    elif wanted.q:
        spec = pl.BlockSpec(
            (None, None, blocks.q, shape.depth), at(lambda b, h, i, j: (b, h, i, 0))
        )
        outputs.append(("dq", spec, jax.ShapeDtypeStruct(q.shape, q.dtype)))
        scratch.append(("sum_q", pltpu.VMEM((1, shape.depth, blocks.q), jnp.float32)))
    if wanted.kv:
        for name, x in (("dk", k), ("dv", v)):
            place = at(lambda b, h, i, j: (b, h // shape.group, j, 0))
            spec = pl.BlockSpec((None, None, blocks.kv, x.shape[-1]), place)
            outputs.append((name, spec, jax.ShapeDtypeStruct(x.shape, x.dtype)))
            buffer = pltpu.VMEM((x.shape[-1], blocks.kv), jnp.float32)
            scratch.append((f"sum_{name[1]}", buffer))
    return outputs, scratch


def _need(arrays: Any, outputs: Any, scratch: Any) -> int:
    """Bytes of VMEM: two buffers per operand and result, and the scratch."""

    def block(spec: Any, dtype: Any) -> int:
        if spec.block_shape is None:
            return 0
        sizes = [size for size in spec.block_shape if size is not None]
        return 2 * padded_bytes((1, *sizes)[-3:] if len(sizes) < 2 else sizes, dtype)

    need = sum(block(spec, x.dtype) for _, spec, x in (*arrays, *outputs))
    return need + sum(padded_bytes(buffer.shape, buffer.dtype) for _, buffer in scratch)
