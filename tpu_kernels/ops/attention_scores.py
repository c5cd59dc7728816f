"""From a tile of products of keys and queries to scores, inside the kernels.

Tiles are transposed: keys along sublanes (rows), queries along lanes (columns). A maximum over keys
is then an elementwise maximum of registers, what belongs to a query is one row that broadcasts for
free, and both are exactly what an attention kernel does most.

Scores are in base 2 (``log2(e)`` times the natural ones), so that exponentials cost one
instruction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.ops.attention_blocks import FULL, Band, Cut, _state
from tpu_kernels.ops.attention_plan import Blocks, Plan

LOG2E = math.log2(math.e)
LN2 = math.log(2)

# The running maximum starts at START, and what is masked is so far below it that its weight is 0
# even where everything is masked. Additive masks below START count as masked.
START = -1e30
MASKED = -2e30

ROWS = 32  # keys that are handled at a time: few enough registers to keep in flight


def factor(plan: Plan, split: bool) -> tuple[float, float]:
    """What queries and what products are multiplied by.

    Args:
        plan: The call's options.
        split: Whether the factor goes into the queries.

    Returns:
        Factor of the queries, factor of the products; what is left after both is tanh, if any.
    """
    whole = plan.scale / plan.softcap if plan.softcap else plan.scale * LOG2E
    return (whole, 1.0) if split else (1.0, whole)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a tile of scores lies.

    Attributes:
        kv: First key, counted in its block.
        q: First query, counted in its block.
        keys: Number of keys, the tile's rows.
        queries: Number of queries, its columns.
    """

    kv: int
    q: int
    keys: int
    queries: int

    @property
    def rows(self) -> slice:
        """The keys in the block."""
        return slice(self.kv, self.kv + self.keys)

    @property
    def columns(self) -> slice:
        """The queries in the block."""
        return slice(self.q, self.q + self.queries)

    def pieces(self, rows: int) -> list[Tile]:
        """The tile, `rows` keys at a time."""
        return [
            dataclasses.replace(self, kv=self.kv + row, keys=min(rows, self.keys - row))
            for row in range(0, self.keys, rows)
        ]


@dataclasses.dataclass(frozen=True)
class Where:
    """The block that a grid step works on, and what the mask does to it.

    Attributes:
        cut: How the static mask cuts it, None if not at all.
        delta: As `Cut.delta`, at run time; used where `cut` is None.
        keys: As `Cut.keys`, at run time; None where the block is whole.
        first_q: Position of its first query.
        first_kv: Position of its first key.
        head: Number of the query head, counted over the batch.
    """

    cut: Cut | None
    delta: Any
    keys: Any
    first_q: Any
    first_kv: Any
    head: Any


class Scores:
    """Scores of one grid step.

    Args:
        plan: The call's options.
        blocks: The blocks in force.
        product_factor: What products are multiplied by.
        refs: Blocks of the optional operands: ``mask`` [keys, queries], ``q_segments``
            [1, queries], ``kv_segments`` [keys, 1], ``seed`` [1] in scalar memory.
        where: The block.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        product_factor: float,
        refs: Mapping[str, Any],
        where: Where,
    ) -> None:
        self.plan, self.blocks, self.refs, self.where = plan, blocks, refs, where
        self.product_factor = product_factor
        # An interpreter has no registers to run out of, and pays for every operation.
        self.rows = blocks.part_kv if plan.interpret else ROWS
        self._rows: dict[int, jax.Array] = {}

    def __call__(self, product: jax.Array, tile: Tile, cut: bool) -> tuple[jax.Array, jax.Array]:
        """Scores of a tile, in base 2, and the tanh of softcapping.

        Args:
            product: [keys, queries] float32.
            tile: Where it lies.
            cut: Whether the static mask may exclude something in it.

        Returns:
            Scores, `MASKED` where masked; and what `slope` wants.
        """
        x = product if self.product_factor == 1.0 else product * self.product_factor
        capped = x
        if self.plan.softcap:
            capped = jnp.tanh(x)
            x = capped * (self.plan.softcap * LOG2E)
        keep = self._allowed(tile, cut)
        mask = self.refs.get("mask")
        if mask is not None:
            values = mask[tile.rows, tile.columns]
            if values.dtype == jnp.int8:
                allowed = values.astype(jnp.int32) != 0
                keep = allowed if keep is None else keep & allowed
            else:
                # minus infinity would make NaN of differences; no sum of finite scores gets there
                x = jnp.maximum(x + values.astype(jnp.float32) * LOG2E, MASKED)
        return (x if keep is None else jnp.where(keep, x, MASKED)), capped

    def slope(self, grad: jax.Array, capped: jax.Array) -> jax.Array:
        """Gradient of the products, but for the scale, from that of the scores."""
        return grad * (1.0 - capped * capped) if self.plan.softcap else grad

    def _allowed(self, tile: Tile, cut: bool) -> jax.Array | None:
        conditions = self._static(tile) if cut else []
        if "q_segments" in self.refs:
            conditions.append(
                self.refs["kv_segments"][tile.rows, :] == self.refs["q_segments"][:, tile.columns]
            )
        keep: jax.Array | None = None
        for condition in conditions:
            keep = condition if keep is None else keep & condition
        return keep

    def _static(self, tile: Tile) -> list[jax.Array]:
        where, band = self.where, self.plan.band
        shape = (tile.keys, tile.queries)
        delta: Any
        if where.cut is not None:
            if where.cut.delta is None:
                band = Band()
            delta, keys = where.cut.delta or 0, where.cut.keys
            rows, columns = (
                range(tile.kv, tile.kv + tile.keys),
                range(tile.q, tile.q + tile.queries),
            )
            if _state(band, delta, columns, rows, keys) == FULL:
                return []
            padded = keys < tile.kv + tile.keys
        else:
            delta, keys, padded = where.delta, where.keys, where.keys is not None
        found = []
        if not band.everything:
            distance = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            distance -= jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            corner = delta + tile.q - tile.kv
            if band.right is not None:
                found.append(distance >= -band.right - corner)
            if band.left is not None:
                found.append(distance <= band.left - corner)
        if padded:
            found.append(jax.lax.broadcasted_iota(jnp.int32, shape, 0) < keys - tile.kv)
        return found

    def kept(self, tile: Tile) -> jax.Array | None:
        """Which weights of a tile dropout keeps; None without dropout.

        A hash of seed, head, query and key: the same whatever the blocks, forward and backward.
        """
        if not self.plan.dropout:
            return None
        if tile.q not in self._rows:
            query = jax.lax.broadcasted_iota(jnp.int32, (1, tile.queries), 1)
            query += self.where.first_q + tile.q
            salt = _mix(self.refs["seed"][0] ^ (self.where.head * _ODD))
            self._rows[tile.q] = _mix(query ^ salt)
        key = jax.lax.broadcasted_iota(jnp.int32, (tile.keys, tile.queries), 0)
        bits = _mix(self._rows[tile.q] + (key + self.where.first_kv + tile.kv) * _ODD)
        # 31 bits, since there are no unsigned comparisons
        return jax.lax.shift_right_logical(bits, 1) >= int(self.plan.dropout * 2**31)


_ODD = -1640531535  # 2^32 / golden ratio, as int32


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of int32 in which every bit depends on every bit: MurmurHash3's finalizer."""
    x = x ^ jax.lax.shift_right_logical(x, 16)
    x = x * -2048144789
    x = x ^ jax.lax.shift_right_logical(x, 13)
    x = x * -1028477387
    return x ^ jax.lax.shift_right_logical(x, 16)


def over_keys(x: jax.Array, reduce: Any) -> jax.Array:
    """Reduce [keys, queries] to [8, queries], register by register, with `jnp.max` or `jnp.sum`."""
    found: jax.Array = reduce(x.reshape(x.shape[0] // 8, 8, x.shape[1]), axis=0)
    return found
