"""The body of the backward kernels of FlexAttention; see `flex_backward`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpu_kernels.ops.attention_blocks import FIRST, KIND_SHIFT, LAST, block_of, flags_of
from tpu_kernels.ops.attention_forward import scale_queries
from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.attention_scores import LOG2E, Tile, over_keys
from tpu_kernels.ops.flex_blocks import Cut, Lists, Part
from tpu_kernels.ops.flex_forward import each_pattern, pipeline, tile_of
from tpu_kernels.ops.flex_operands import Operands
from tpu_kernels.ops.flex_plan import FlexPlan, Mods
from tpu_kernels.ops.flex_scores import FlexScores
from tpu_kernels.ops.precision import dot
from tpu_kernels.ops.tiles import LANES

_NN = ((1,), (0,))
_NT = ((1,), (1,))


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients a kernel makes.

    Attributes:
        q: That of the queries.
        kv: Those of keys and values; blocks of keys are then visited one after the other.
        operands: Which of the score_mod's operands.
    """

    q: bool = False
    kv: bool = False
    operands: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """For the kernel's name."""
        if self.operands:
            return "captured"
        return "qkv" if self.q and self.kv else "q" if self.q else "kv"

    @property
    def sums(self) -> str:
        """The letters of what is summed up in scratch."""
        return ("q" if self.q else "") + ("kv" if self.kv else "")


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a backward kernel knows when it is traced.

    Attributes:
        wanted: Which gradients to make.
        names: Names of the inputs, those of captured tensors not counted.
        outputs: Names of the results.
        plan: The call's options.
        mods: The mods.
        given: Operands of the score_mod and of the mask_mod.
        shape: The problem's sizes.
        blocks: The blocks in force.
        lists: The blocks to visit.
        split: Whether queries carry the scale.
    """

    wanted: Wanted
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    plan: FlexPlan
    mods: Mods
    given: tuple[Operands, Operands]
    shape: Shape
    blocks: Blocks
    lists: Lists
    split: bool


def body(words: Any, flags: Any, *refs: Any, frame: Frame) -> None:
    """Add what one block of scores contributes to the gradients.

    Args:
        words: Blocks of queries and of keys of each step, in scalar memory.
        flags: Flags, kind and query head within its group of each step.
        *refs: Blocks of the inputs, of captured tensors, of results, and scratch.
        frame: What is known at trace time.
    """
    wanted, plan, shape, blocks = frame.wanted, frame.plan, frame.shape, frame.blocks
    given = dict(zip(frame.names, refs, strict=False))
    refs = refs[len(frame.names) :]
    count = sum(len(each.readers) for each in frame.given)
    captured, refs = refs[:count], refs[count:]
    out = dict(zip(frame.outputs, refs, strict=False))
    scaled_ref, *tiles = refs[len(frame.outputs) : len(frame.outputs) + 5]
    sums = dict(zip(wanted.sums, refs[len(frame.outputs) + 5 :], strict=True))
    query_factor, product_factor = plan.factors(frame.split)
    batch, head, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    here = frame.lists.place(batch, head, pl.num_programs(1), step)
    i, j = block_of(words[here])
    flag, member = flags_of(flags[here])
    if wanted.kv:
        head = head * shape.group + member
    q_blocks = -(-shape.queries // blocks.q)
    fused = wanted.q and wanted.kv
    slot = member * q_blocks + i if fused else 0
    gradients = _OperandGradients(frame, out, j)

    @pl.when(step == 0)
    def _clear() -> None:
        if fused:
            sums["q"][...] = jnp.zeros_like(sums["q"])
        gradients.clear()

    @pl.when(flag & FIRST != 0)
    def _start() -> None:
        for name in "kv" if wanted.kv else wanted.sums:
            sums[name][...] = jnp.zeros_like(sums[name])
        gradients.start_row()

    if gradients.matrices:

        @pl.when((flag & FIRST != 0) | (flag >> KIND_SHIFT != 0))
        def _start_block() -> None:
            gradients.start_block()

    def branch(parts: Sequence[Part]) -> None:
        ragged = shape.keys % blocks.kv != 0
        score = FlexScores(
            plan,
            frame.mods,
            frame.given,
            captured,
            product_factor,
            (batch, head, i * blocks.q, j * blocks.kv),
            shape.heads,
            shape.keys - j * blocks.kv if ragged else None,
            blocks,
        )
        state: dict[tuple[str, int], Any] = {}
        columns: dict[tuple[str, int], jax.Array] = {}
        double = scaled_ref.shape[-1] == 2 * shape.depth
        scaled: set[int] = set()

        def transposed(name: str, at: Tile) -> jax.Array:
            if (name, at.q) not in columns:
                columns[name, at.q] = given[name][at.columns, :].T
            return columns[name, at.q]

        def multiply(n: int) -> None:
            at = tile_of(parts[n], blocks)
            keys = given["k"][at.rows, :]
            keys = jnp.concatenate([keys, keys], axis=1) if double else keys
            if at.q not in scaled:
                # here and not before the branch: it overlaps with products, all but the first
                factor = query_factor if frame.split else None
                scale_queries(given["q"], scaled_ref, at.columns, factor)
                scaled.add(at.q)
            queries, grad = scaled_ref[at.columns, :], given["grad"][at.columns, :]
            tiles[n % 2][...] = dot(keys, queries, _NT, plan.precision)
            tiles[2 + n % 2][...] = dot(given["v"][at.rows, :], grad, _NT, plan.precision)

        def differentiate(n: int) -> None:
            at = tile_of(parts[n], blocks)
            lse, weight = given["lse"][:, at.columns], given["weight"][:, at.columns]
            weights, grads = [], []
            for piece in at.pieces(score.rows):
                rows = slice(piece.kv - at.kv, piece.kv - at.kv + piece.keys)
                x, pull = _scores(score, tiles[n % 2][rows, :], piece, parts[n].cut, wanted)
                p = jnp.exp2(x - lse)
                weights.append(p.astype(given["grad"].dtype))
                ds, *others = pull(p * (tiles[2 + n % 2][rows, :] - weight))
                grads.append(ds.astype(given["grad"].dtype))
                gradients.add(piece, others)
            state["p", n] = jnp.concatenate(weights, axis=0) if wanted.kv else None
            state["ds", n] = jnp.concatenate(grads, axis=0)

        def accumulate(n: int) -> None:
            at = tile_of(parts[n], blocks)
            p, ds = state.pop(("p", n)), state.pop(("ds", n))
            if wanted.kv:
                grad = transposed("grad", at)
                sums["v"][:, at.rows] += dot(grad, p, _NT, plan.precision)
                sums["k"][:, at.rows] += dot(transposed("q", at), ds, _NT, plan.precision)
            if wanted.q:
                product = dot(given["k_transposed"][:, at.rows], ds, _NN, plan.precision)
                sums["q"][slot, :, at.columns] += product

        pipeline(len(parts), multiply, differentiate, accumulate)

    each_pattern(plan, blocks, frame.lists, flag >> KIND_SHIFT, branch)

    @pl.when(flag & LAST != 0)
    def _finish() -> None:
        if wanted.kv:
            out["dk"][...] = (sums["k"][...] * plan.scale).T.astype(out["dk"].dtype)
            out["dv"][...] = sums["v"][...].T.astype(out["dv"].dtype)
        elif wanted.q:
            out["dq"][...] = (sums["q"][0] * plan.scale).T.astype(out["dq"].dtype)

    if fused:

        @pl.when(step == pl.num_programs(2) - 1)
        def _write() -> None:
            def store(number: Any, _: Any) -> Any:
                row = pl.multiple_of(number % q_blocks * blocks.q, blocks.q)
                tile = (sums["q"][number] * plan.scale).T.astype(out["dq"].dtype)
                out["dq"][number // q_blocks, pl.ds(row, blocks.q), :] = tile
                return _

            jax.lax.fori_loop(0, shape.group * q_blocks, store, None)


def _scores(
    score: FlexScores, product: jax.Array, tile: Tile, cut: Cut, wanted: Wanted
) -> tuple[jax.Array, Any]:
    """Scores in base 2, and what turns their natural gradient into that of scaled products.

    The gradients of wanted operands follow, [keys, queries] whatever the operand is: how they are
    summed up is the caller's affair.
    """
    if score.mods.score is None:
        return score(product, tile, cut), lambda grad: (grad,)
    scaled, operands = score.scaled(product), score.score_operands(tile)
    shape = (tile.keys, tile.queries)

    def modified(x: jax.Array, *chosen: jax.Array) -> jax.Array:
        filled = list(operands)
        for place, value in zip(wanted.operands, chosen, strict=True):
            filled[place] = value
        return score.modified(x, tile, filled)

    chosen = [jnp.broadcast_to(operands[place], shape) for place in wanted.operands]
    x, pull = jax.vjp(modified, scaled, *chosen)
    if cut is Cut.NOTHING:
        return x, lambda grad: [g.astype(jnp.float32) for g in pull(grad * (1 / LOG2E))]

    def pulled(grad: jax.Array) -> list[jax.Array]:
        # 0 times an infinite slope is no number
        grads = pull(grad * (1 / LOG2E))
        return [score.masked(g.astype(jnp.float32), tile, cut, 0.0) for g in grads]

    return score.masked(x, tile, cut), pulled


class _OperandGradients:
    """Sums of gradients of the score_mod's operands, in the kernel's results.

    A number's gradient is one tile of partial sums; a row's eight rows of them; a column's 128
    columns, for all keys; a matrix's has its shape.
    """

    def __init__(self, frame: Frame, out: dict[str, Any], kv_block: Any) -> None:
        readers = frame.given[0].readers
        self.refs = [(readers[n].hoisted.kind, out[f"operand{n}"]) for n in frame.wanted.operands]
        self.blocks, self.kv_block = frame.blocks, kv_block
        self.matrices = any(kind == "matrix" for kind, _ in self.refs)

    def clear(self) -> None:
        """At the first step of a head."""
        self._zero("number", "column")

    def start_row(self) -> None:
        """At the first block of keys of a block of queries."""
        self._zero("row")

    def start_block(self) -> None:
        """At each block."""
        self._zero("matrix")

    def _zero(self, *kinds: str) -> None:
        for kind, ref in self.refs:
            if kind in kinds:
                ref[...] = jnp.zeros_like(ref)

    def add(self, tile: Tile, grads: Sequence[jax.Array]) -> None:
        """Add the gradients of a tile."""
        for (kind, ref), grad in zip(self.refs, grads, strict=True):
            if kind == "matrix":
                ref[tile.rows, tile.columns] = grad
            elif kind == "row":
                ref[:, tile.columns] += over_keys(grad, jnp.sum)
            elif kind == "column":
                row = pl.multiple_of(self.kv_block * self.blocks.kv + tile.kv, 8)
                ref[pl.ds(row, tile.keys), :] += _over_queries(grad)
            else:
                ref[...] += _over_queries(over_keys(grad, jnp.sum))


def _over_queries(x: jax.Array) -> jax.Array:
    """Sum [keys, queries] to [keys, 128], register by register."""
    pieces = [x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total
