"""From a tile of products of keys and queries to scores, by the mods, inside the kernels.

Tiles are [keys, queries], as in `attention_scores`. A mod's values are numbers, rows, columns or
tiles, and grow to what they are computed with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.ops.attention_plan import Blocks
from tpu_kernels.ops.attention_scores import LOG2E, MASKED, ROWS, Tile
from tpu_kernels.ops.flex_blocks import Cut, grain_of
from tpu_kernels.ops.flex_operands import Operands
from tpu_kernels.ops.flex_plan import FlexPlan, Mods
from tpu_kernels.ops.flex_program import Program, Step, call

_KEEP_SHAPE = frozenset({"aten::expand", "aten::view", "aten::alias", "aten::clone"})


class FlexScores:
    """Scores of one grid step.

    Args:
        plan: The call's options.
        mods: The mods.
        operands: Operands of the score_mod and of the mask_mod.
        refs: Their blocks, in that order.
        product_factor: What products are multiplied by.
        place: Batch, query head, first query, first key of the block, at run time.
        heads: Number of query heads.
        keys: Keys of the block that exist; None where all do.
        blocks: The blocks in force.
    """

    def __init__(
        self,
        plan: FlexPlan,
        mods: Mods,
        operands: tuple[Operands, Operands],
        refs: Sequence[Any],
        product_factor: float,
        place: tuple[Any, Any, Any, Any],
        heads: int,
        keys: Any,
        blocks: Blocks,
    ) -> None:
        self.plan, self.mods, self.operands = plan, mods, operands
        count = len(operands[0].readers)
        self.refs = (refs[:count], refs[count:])
        self.product_factor = product_factor
        self.place, self.heads, self.keys = place, heads, keys
        self.blocks, self.grain = blocks, grain_of(blocks, plan.sparse_block)
        # An interpreter has no registers to run out of, and pays for every operation.
        self.rows = min(blocks.part_kv, self.grain) if plan.interpret else ROWS

    def __call__(self, product: jax.Array, tile: Tile, cut: Cut) -> jax.Array:
        """Scores of a tile, in base 2, `MASKED` where masked."""
        x = self.scaled(product)
        if self.mods.score is not None:
            x = self.modified(x, tile, self.score_operands(tile))
        return self.masked(x, tile, cut)

    def masked(self, x: jax.Array, tile: Tile, cut: Cut, value: float = MASKED) -> jax.Array:
        """A tile with a value where it is masked; next to the diagonal, only there is it asked."""
        if cut is Cut.NOTHING:
            return x
        if cut is Cut.ANYWHERE:
            keep = self.kept(tile)
            return x if keep is None else jnp.where(keep, x, value)
        row = tile.kv % self.blocks.part_kv // self.grain
        columns = []
        for column in range(tile.queries // self.grain):
            at = slice(column * self.grain, (column + 1) * self.grain)
            here = dataclasses.replace(tile, q=tile.q + at.start, queries=self.grain)
            if column == row:
                columns.append(self.masked(x[:, at], here, Cut.ANYWHERE, value))
            elif (column > row) == (cut is Cut.BELOW):
                columns.append(x[:, at])
            else:
                columns.append(jnp.full((tile.keys, self.grain), value, x.dtype))
        return jnp.concatenate(columns, axis=1)

    def scaled(self, product: jax.Array) -> jax.Array:
        """What the score_mod is given."""
        return product if self.product_factor == 1.0 else product * self.product_factor

    def modified(self, x: jax.Array, tile: Tile, operands: Sequence[Any]) -> jax.Array:
        """What the score_mod makes of scores, in base 2."""
        program = self.mods.score
        if program is None:
            return x
        found = self._evaluate(program, tile, [x], operands)
        found = _grow(found, (tile.keys, tile.queries)).astype(jnp.float32)
        # minus infinity would make NaN of differences
        return jnp.maximum(found * LOG2E, MASKED)

    def score_operands(self, tile: Tile) -> list[Any]:
        """The score_mod's operands at a tile."""
        return self._read(0, tile)

    def kept(self, tile: Tile) -> jax.Array | None:
        """Which pairs of a cut tile count; None for all."""
        keep = None
        if self.mods.mask is not None:
            keep = self._evaluate(self.mods.mask, tile, [], self._read(1, tile))
            keep = _grow(keep, (tile.keys, tile.queries))
        if self.keys is not None:
            row = jax.lax.broadcasted_iota(jnp.int32, (tile.keys, tile.queries), 0)
            exists = row < self.keys - tile.kv
            keep = exists if keep is None else keep & exists
        return keep

    def _read(self, which: int, tile: Tile) -> list[Any]:
        batch, head = self.place[:2]
        return [
            reader.read(ref, tile.rows, tile.columns, batch, head, self.heads)
            for reader, ref in zip(self.operands[which].readers, self.refs[which], strict=True)
        ]

    def _evaluate(
        self, program: Program, tile: Tile, score: list[Any], operands: Sequence[Any]
    ) -> Any:
        batch, head, first_q, first_kv = self.place
        shape = (tile.keys, tile.queries)
        which = 0 if program.scored else 1
        hoisted = [reader.hoisted.number for reader in self.operands[which].readers]
        known: dict[int, Any] = dict(zip(hoisted, operands, strict=True))

        def index(symbol: str) -> Any:
            if symbol == "q":
                row = jax.lax.broadcasted_iota(jnp.int32, (1, tile.queries), 1)
                return row + (first_q + tile.q)
            if symbol == "k":
                return jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (first_kv + tile.kv)
            return {"b": batch, "h": head, "s": score[0] if score else None}[symbol]

        def value(number: int) -> Any:
            if number not in known:
                step = program.step_of(number)
                known[number] = (
                    index(program.symbols[number]) if step is None else _call(step, value)
                )
            return known[number]

        return value(program.result)


def _call(step: Step, value: Callable[[int], Any]) -> Any:
    """One elementwise step, its operands grown to one shape first.

    torch promotes numbers without dimensions less than others. All values of a mod have none, so
    here they must all have the same number of dimensions.
    """
    if step.name in _KEEP_SHAPE:
        return value(step.operands[0])
    given = {number: jnp.asarray(value(number)) for number in step.operands}
    shape = jnp.broadcast_shapes(*(x.shape for x in given.values()))
    return call(step, lambda number: _grow(given[number], shape))


def _grow(x: Any, shape: tuple[int, ...]) -> Any:
    """A number, row, column or tile as a larger one."""
    x = jnp.asarray(x)
    if x.shape == shape:
        return x
    if x.dtype == jnp.bool_:  # a register of booleans cannot be made of a number
        return jnp.broadcast_to(x.astype(jnp.int32), shape) != 0
    return jnp.broadcast_to(x, shape)
