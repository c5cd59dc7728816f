"""The body of the backward kernels of attention; see `attention_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpu_kernels.ops.attention_blocks import (
    FIRST,
    KIND_SHIFT,
    LAST,
    Cut,
    Part,
    Steps,
    block_of,
    flags_of,
)
from tpu_kernels.ops.attention_forward import each_branch, scale_queries
from tpu_kernels.ops.attention_plan import Blocks, Plan, Shape
from tpu_kernels.ops.attention_scores import Scores, Tile, Where, factor
from tpu_kernels.ops.precision import dot

_NN = ((1,), (0,))
_NT = ((1,), (1,))


class Wanted(NamedTuple):
    """Which gradients a kernel makes."""

    q: bool
    kv: bool

    @property
    def label(self) -> str:
        """For the kernel's name."""
        return "qkv" if self.q and self.kv else "q" if self.q else "kv"


def body(
    blocks_at: Any,  # scalar memory: the steps
    flags_at: Any,
    overlap: Any,  # [batch, q blocks x kv blocks], whether segments of the blocks meet
    *refs: Any,
    names: Sequence[str],
    outputs: Sequence[str],
    wanted: Wanted,
    plan: Plan,
    shape: Shape,
    blocks: Blocks,
    steps: Steps,
    split: bool,
) -> None:
    """Add what one block of scores contributes to the gradients.

    Args:
        blocks_at: Blocks of queries and keys of each step; see `Steps.packed`.
        flags_at: Flags and query head within its group of each step.
        overlap: Whether segments of two blocks meet.
        *refs: Blocks of the operands `names`, of the results `outputs`, and scratch.
        names: Names of the operands.
        outputs: Names of the results.
        wanted: Which gradients to make.
        plan: The call's options.
        shape: The problem's sizes.
        blocks: The blocks in force.
        steps: All steps.
        split: Whether queries carry the scale.
    """
    given = dict(zip(names, refs, strict=False))
    out = dict(zip(outputs, refs[len(names) :], strict=False))
    scaled_ref, *tiles, sums = _scratch(refs[len(names) + len(outputs) :], wanted)
    query_factor, product_factor = factor(plan, split)
    batch, step = pl.program_id(0), pl.program_id(2)
    i, j = block_of(blocks_at[step])
    flag, member = flags_of(flags_at[step])
    head = pl.program_id(1)
    if wanted.kv:
        head = head * shape.group + member
    q_blocks = -(-shape.queries // blocks.q)
    fused = wanted.q and wanted.kv
    slot = member * q_blocks + i if fused else 0

    if fused:

        @pl.when(step == 0)
        def _clear() -> None:
            sums["q"][...] = jnp.zeros_like(sums["q"])

    @pl.when(flag & FIRST != 0)
    def _start() -> None:
        for name in "kv" if wanted.kv else "q":
            sums[name][...] = jnp.zeros_like(sums[name])

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
        score = Scores(plan, blocks, product_factor, given, where)
        state: dict[tuple[str, int], Any] = {}
        columns: dict[tuple[str, int], jax.Array] = {}
        double = scaled_ref.shape[-1] == 2 * shape.depth
        scaled: set[int] = set()

        def tile(part: Part) -> Tile:
            return Tile(
                part.kv * blocks.part_kv, part.q * blocks.part_q, blocks.part_kv, blocks.part_q
            )

        def transposed(name: str, at: Tile) -> jax.Array:
            if (name, at.q) not in columns:
                columns[name, at.q] = given[name][at.columns, :].T
            return columns[name, at.q]

        def multiply(n: int) -> None:
            at = tile(parts[n])
            keys = given["k"][at.rows, :]
            keys = jnp.concatenate([keys, keys], axis=1) if double else keys
            if at.q not in scaled:
                # here and not before the branch: it overlaps with products, all but the first
                scale_queries(given["q"], scaled_ref, at.columns, query_factor if split else None)
                scaled.add(at.q)
            queries, grad = scaled_ref[at.columns, :], given["grad"][at.columns, :]
            tiles[n % 2][...] = dot(keys, queries, _NT, plan.precision)
            tiles[2 + n % 2][...] = dot(given["v"][at.rows, :], grad, _NT, plan.precision)

        def differentiate(n: int) -> None:
            at = tile(parts[n])
            lse, weight = given["lse"][:, at.columns], given["weight"][:, at.columns]
            weights, grads = [], []
            for piece in at.pieces(score.rows):
                rows = slice(piece.kv - at.kv, piece.kv - at.kv + piece.keys)
                x, capped = score(tiles[n % 2][rows, :], piece, parts[n].cut)
                p, dp = jnp.exp2(x - lse), tiles[2 + n % 2][rows, :]
                kept, used = score.kept(piece), p
                if kept is not None:
                    share = 1 / (1 - plan.dropout)
                    used = jnp.where(kept, p * share, 0.0)
                    dp = jnp.where(kept, dp * share, 0.0)
                if wanted.kv:
                    weights.append(used.astype(given["grad"].dtype))
                ds = score.slope(p * (dp - weight), capped)
                grads.append(ds.astype(given["grad"].dtype))
            state["p", n] = jnp.concatenate(weights, axis=0) if wanted.kv else None
            state["ds", n] = jnp.concatenate(grads, axis=0)

        def accumulate(n: int) -> None:
            at = tile(parts[n])
            p, ds = state.pop(("p", n)), state.pop(("ds", n))
            if wanted.kv:
                grad = transposed("grad", at)
                sums["v"][:, at.rows] += dot(grad, p, _NT, plan.precision)
                sums["k"][:, at.rows] += dot(transposed("q", at), ds, _NT, plan.precision)
            if wanted.q:
                here = dot(given["k_transposed"][:, at.rows], ds, _NN, plan.precision)
                sums["q"][slot, :, at.columns] += here

        for turn in range(len(parts) + 2):
            for stage, n in ((multiply, turn), (differentiate, turn - 1), (accumulate, turn - 2)):
                if 0 <= n < len(parts):
                    stage(n)

    meets = None
    if "q_segments" in given:
        meets = overlap[batch, i * -(-shape.keys // blocks.kv) + j] != 0
    each_branch(steps, plan, blocks, flag >> KIND_SHIFT, meets, branch)

    @pl.when(flag & LAST != 0)
    def _finish() -> None:
        if wanted.kv:
            out["dk"][...] = (sums["k"][...] * plan.scale).T.astype(out["dk"].dtype)
            out["dv"][...] = sums["v"][...].T.astype(out["dv"].dtype)
        else:
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


def _scratch(refs: Sequence[Any], wanted: Wanted) -> tuple[Any, ...]:
    """Scaled queries, four tiles, and the sums by the letter of what they are the gradient of."""
    letters = ("q" if wanted.q else "") + ("kv" if wanted.kv else "")
    return (*refs[:5], dict(zip(letters, refs[5:], strict=True)))
