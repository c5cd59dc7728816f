"""The backward of FlexAttention: `attention_backward` with mods, and captured tensors' gradients.

Weights are computed again from the saved `lse`, and a score_mod is differentiated inside the
kernels. One kernel makes the gradients of queries, keys and values, or two where the sums do not
fit into VMEM. Where captured tensors want gradients, another kernel makes those of the operands
that were computed of them (`flex_operands`), and XLA goes the rest of the way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.attention_backward import FUSED_BYTES, _need, _outputs, _resident
from tpu_kernels.ops.attention_blocks import block_of, flags_of
from tpu_kernels.ops.attention_forward import splits
from tpu_kernels.ops.attention_gradients import Wanted as Made
from tpu_kernels.ops.attention_operands import pad_to
from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.attention_scores import LOG2E, MASKED
from tpu_kernels.ops.flex_blocks import lists_of
from tpu_kernels.ops.flex_forward import operands_of, problem
from tpu_kernels.ops.flex_gradients import Frame, Wanted, body
from tpu_kernels.ops.flex_operands import Hoisted, hoist
from tpu_kernels.ops.flex_plan import (
    FlexPlan,
    Mods,
    is_floating,
    score_values,
    split_buffers,
)
from tpu_kernels.ops.tiles import LANES, vmem_limit

_HUGE = -MASKED  # an `lse` that makes every weight 0


class Saved(NamedTuple):
    """What the backward needs of the forward."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    tensors: Any
    buffers: Any
    out: jax.Array
    lse: jax.Array


class Context(NamedTuple):
    """Inputs of the kernels, padded to whole blocks, and what is known of them."""

    arrays: dict[str, jax.Array]
    plan: FlexPlan
    mods: Mods
    shape: Shape
    blocks: Blocks
    kinds: Any


def context(saved: Saved, grad: jax.Array, grad_lse: jax.Array | None, plan: FlexPlan) -> Context:
    """Prepare the inputs of the backward kernels.

    Args:
        saved: Inputs and results of the forward.
        grad: Gradient of the output, [batch, heads, q_len, v_dim].
        grad_lse: Gradient of `lse`, float32 [batch, heads, q_len], or None.
        plan: The call's options.

    Returns:
        What the kernels take.
    """
    q, k, v, tensors, buffers, out, lse = saved
    k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
    shape, mods, blocks, kinds = problem(q, k, v, tensors, buffers, plan, backward=True)
    grad = grad.astype(q.dtype)
    weight = (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(axis=-1)
    if grad_lse is not None:
        weight = weight - grad_lse
    # Queries that see nothing, and those that do not exist, have weights of zero.
    lse = jnp.where(jnp.isneginf(lse), _HUGE, lse * LOG2E)
    missing = -shape.queries % blocks.q
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, missing)), constant_values=_HUGE)
    k = pad_to(k, 2, blocks.kv)
    arrays = {
        "q": pad_to(q, 2, blocks.q),
        "k": k,
        "v": pad_to(v, 2, blocks.kv),
        "grad": pad_to(grad, 2, blocks.q),
        "lse": lse[:, :, None, :],
        "weight": pad_to(weight, 2, blocks.q)[:, :, None, :],
        "k_transposed": k.swapaxes(2, 3),
    }
    return Context(arrays, plan, mods, shape, blocks, kinds)


def gradients(found: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values, for as many batches as there are queries."""
    shape, blocks = found.shape, found.blocks
    if _resident(shape, blocks, found.arrays["q"].dtype) <= FUSED_BYTES:
        dq, dk, dv = _launch(found, Wanted(q=True, kv=True))
    else:
        dk, dv = _launch(found, Wanted(kv=True))
        (dq,) = _launch(found, Wanted(q=True))
    return dq[:, :, : shape.queries], dk[:, :, : shape.keys], dv[:, :, : shape.keys]


def captured_gradients(found: Context, buffers: Sequence[jax.Array]) -> list[jax.Array | None]:
    """Gradients of the captured tensors; None for those that have none.

    Args:
        found: What the kernels take.
        buffers: The captured tensors, those of the mask_mod last.

    Returns:
        One for each.
    """
    of_score, _ = split_buffers(found.plan, buffers)
    none: list[jax.Array | None] = [None] * len(buffers)
    floating = [n for n, x in enumerate(of_score) if is_floating(x)]
    if found.mods.score is None or not floating:
        return none

    def hoisted(*chosen: jax.Array) -> tuple[jax.Array, ...]:
        filled = list(of_score)
        for place, value in zip(floating, chosen, strict=True):
            filled[place] = value
        values = score_values(found.plan, filled, found.shape)
        return tuple(x for x in values if is_floating(x))

    wanted = tuple(n for n, x in enumerate(found.mods.score_values) if is_floating(x))
    if not wanted:
        return none
    values, pull = jax.vjp(hoisted, *(of_score[n] for n in floating))
    sums = _launch(found, Wanted(operands=wanted))
    grads = []
    for place, total, value in zip(wanted, sums, values, strict=True):
        grads.append(_reduced(total, hoist(found.mods.score)[place], found.shape, value))
    for place, grad in zip(floating, pull(tuple(grads)), strict=True):
        none[place] = grad
    return none


def _reduced(total: jax.Array, hoisted: Hoisted, shape: Shape, like: jax.Array) -> jax.Array:
    """A kernel's sums as the gradient of an operand."""
    if hoisted.kind == "number":
        total = total.sum(axis=(2, 3), keepdims=True)
    elif hoisted.kind == "row":
        total = total.sum(axis=2, keepdims=True)[..., : shape.queries]
    elif hoisted.kind == "column":
        total = total.sum(axis=3, keepdims=True)[:, :, : shape.keys]
    else:
        total = total[:, :, : shape.keys, : shape.queries]
    axes = tuple(n for n, name in enumerate("bh") if name not in hoisted.symbols)
    return total.sum(axis=axes, keepdims=True).reshape(like.shape).astype(like.dtype)


def _launch(found: Context, wanted: Wanted) -> tuple[jax.Array, ...]:
    arrays, plan, mods, shape, blocks, kinds = found
    group = shape.group
    lists = lists_of(kinds, by_keys=wanted.kv, group=group if wanted.kv else 1)
    heads = shape.kv_heads if wanted.kv else shape.heads
    split = splits(plan, shape, arrays["q"].dtype)

    def at(place: Any) -> Any:
        """`place(batch, query head, block of queries, block of keys)` as an index map."""

        def index(b: Any, h: Any, s: Any, words: Any, flags: Any) -> Any:
            here = lists.place(b, h, heads, s)
            head = h * group + flags_of(flags[here])[1] if wanted.kv else h
            return place(b, head, *block_of(words[here]))

        return index

    def of_queries(depth: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, blocks.q, depth), at(lambda b, h, i, j: (b, h, i, 0)))

    def of_keys(depth: int) -> pl.BlockSpec:
        place = at(lambda b, h, i, j: (b, h // group, j, 0))
        return pl.BlockSpec((None, None, blocks.kv, depth), place)

    row = pl.BlockSpec((None, None, 1, blocks.q), at(lambda b, h, i, j: (b, h, 0, i)))
    specs = {
        "q": of_queries(shape.depth),
        "k": of_keys(shape.depth),
        "v": of_keys(shape.depth_v),
        "grad": of_queries(shape.depth_v),
        "lse": row,
        "weight": row,
    }
    if wanted.q:
        place = at(lambda b, h, i, j: (b, h // group, 0, j))
        specs["k_transposed"] = pl.BlockSpec((None, None, shape.depth, blocks.kv), place)
    given = operands_of(mods, shape, blocks, at)
    named = [(name, spec, arrays[name]) for name, spec in specs.items()]
    captured = [("", s, a) for each in given for s, a in zip(each.specs, each.arrays, strict=True)]
    made = Made(wanted.q, wanted.kv)
    outputs, scratch = _outputs(made, shape, blocks, arrays["q"], arrays["k"], arrays["v"], at)
    outputs += [_operand_output(found, n, at) for n in wanted.operands]
    depth = 2 * shape.depth if split and arrays["q"].dtype == jnp.bfloat16 else shape.depth
    scratch.insert(0, ("scaled", pltpu.VMEM((blocks.q, depth), arrays["q"].dtype)))
    frame = Frame(
        wanted=wanted,
        names=tuple(specs),
        outputs=tuple(name for name, _, _ in outputs),
        plan=plan,
        mods=mods,
        given=given,
        shape=shape,
        blocks=blocks,
        lists=lists,
        split=split,
    )
    # A matrix's gradient is zero where no block is visited: its result starts as an input of zeros.
    kinds_of = [mods.score_hoisted[n].kind for n in wanted.operands]
    zeros = [
        (place, jnp.zeros(outputs[place][2].shape, jnp.float32))
        for place, kind in enumerate(kinds_of, len(outputs) - len(kinds_of))
        if kind == "matrix"
    ]
    first = 2 + len(named) + len(captured)
    limit = vmem_limit(_need([*named, *captured], outputs, scratch))
    pairs = lists.length * blocks.q * blocks.kv * shape.batch * heads
    products = 3 * shape.depth + 2 * shape.depth_v if wanted.kv else 2 * shape.depth + shape.depth_v
    call = pl.pallas_call(
        functools.partial(_skipping, frame=frame, count=first - 2, zeros=len(zeros)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(shape.batch, heads, lists.count),
            in_specs=[
                *(spec for _, spec, _ in (*named, *captured)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(zeros),
            ],
            out_specs=[spec for _, spec, _ in outputs],
            scratch_shapes=[buffer for _, buffer in scratch],
        ),
        out_shape=[out for _, _, out in outputs],
        input_output_aliases={first + n: place for n, (place, _) in enumerate(zeros)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY],
            vmem_limit_bytes=limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * products,
            transcendentals=pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for _, _, x in named),
        ),
        interpret=plan.interpret,
        name=f"{plan.kernel.replace('::', '_')}_backward_{wanted.label}",
    )
    scalars = (jnp.asarray(lists.words), jnp.asarray(lists.flags))
    inputs = [x for _, _, x in (*named, *captured)] + [x for _, x in zeros]
    results: tuple[jax.Array, ...] = tuple(call(*scalars, *inputs))
    return results


def _skipping(words: Any, flags: Any, *refs: Any, frame: Frame, count: int, zeros: int) -> None:
    """The body without the inputs that are there to be overwritten."""
    body(words, flags, *refs[:count], *refs[count + zeros :], frame=frame)


def _operand_output(found: Context, place: int, at: Any) -> tuple[str, pl.BlockSpec, Any]:
    """Name, block spec and shape of the gradient of one operand."""
    shape, blocks, kind = found.shape, found.blocks, found.mods.score_hoisted[place].kind
    keys, queries = found.arrays["k"].shape[2], found.arrays["q"].shape[2]
    if kind == "number":
        size, block, index = (8, LANES), (8, LANES), lambda b, h, *_: (b, h, 0, 0)
    elif kind == "column":
        size, block, index = (keys, LANES), (keys, LANES), lambda b, h, *_: (b, h, 0, 0)
    elif kind == "row":
        size, block = (8, queries), (8, blocks.q)
        index = at(lambda b, h, i, j: (b, h, 0, i))
    else:
        size, block = (keys, queries), (blocks.kv, blocks.q)
        index = at(lambda b, h, i, j: (b, h, j, i))
    result = jax.ShapeDtypeStruct((shape.batch, shape.heads, *size), jnp.float32)
    return f"operand{place}", pl.BlockSpec((None, None, *block), index), result
