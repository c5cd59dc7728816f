"""The optional operands of attention: as the kernels want them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.tiles import padded_bytes, round_up


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Optional operands of one call.

    Attributes:
        mask: bool or floating [batch or 1, heads or 1, q_len or 1, kv_len or 1].
        q_segments: int32 [batch, q_len].
        kv_segments: int32 [batch, kv_len].
        sinks: float32 [heads].
        seed: int32 [1].
    """

    mask: jax.Array | None = None
    q_segments: jax.Array | None = None
    kv_segments: jax.Array | None = None
    sinks: jax.Array | None = None
    seed: jax.Array | None = None

    @property
    def segmented(self) -> bool:
        """Whether tokens have segments."""
        return self.q_segments is not None

    def blocked(
        self, shape: Shape, blocks: Blocks, at: Any
    ) -> tuple[list[str], list[pl.BlockSpec], list[jax.Array]]:
        """Names, block specs and arrays of the operands that there are.

        Args:
            shape: The problem's sizes.
            blocks: The blocks in force.
            at: Makes an index map of ``place(batch, head, block of queries, block of keys)``.

        Returns:
            Names as `Scores` and the kernels know them, specs, arrays.
        """
        found: list[tuple[str, pl.BlockSpec, jax.Array]] = []
        if self.mask is not None:
            mask = transposed_mask(self.mask, shape, blocks)
            batched, headed = mask.shape[0] > 1, mask.shape[1] > 1

            def place(b: Any, h: Any, i: Any, j: Any) -> Any:
                return (b if batched else 0, h if headed else 0, j, i)

            spec = pl.BlockSpec((None, None, blocks.kv, blocks.q), at(place))
            found.append(("mask", spec, mask))
        if self.q_segments is not None and self.kv_segments is not None:
            # padding is in segments of its own, so that nothing sees it
            rows = pad_to(self.q_segments, 1, blocks.q, -1)[:, None, :]
            columns = pad_to(self.kv_segments, 1, blocks.kv, -2)[:, :, None]
            spec = pl.BlockSpec((None, 1, blocks.q), at(lambda b, h, i, j: (b, 0, i)))
            found.append(("q_segments", spec, rows))
            spec = pl.BlockSpec((None, blocks.kv, 1), at(lambda b, h, i, j: (b, j, 0)))
            found.append(("kv_segments", spec, columns))
        scalar = pl.BlockSpec(memory_space=pltpu.SMEM)
        if self.sinks is not None:
            found.append(("sinks", scalar, self.sinks.astype(jnp.float32)))
        if self.seed is not None:
            found.append(("seed", scalar, self.seed.reshape(1)))
        if not found:
            return [], [], []
        names, specs, arrays = zip(*found, strict=True)
        return list(names), list(specs), list(arrays)

    def vmem(self, blocks: Blocks) -> int:
        """Bytes of VMEM that the blocks of the operands take."""
        need = 0
        if self.mask is not None:
            dtype = jnp.int8 if self.mask.dtype == jnp.bool_ else self.mask.dtype
            need += 2 * padded_bytes((blocks.kv, blocks.q), dtype)
        if self.segmented:
            need += 2 * padded_bytes((blocks.kv, 1), jnp.int32)
        return need


def transposed_mask(mask: jax.Array, shape: Shape, blocks: Blocks) -> jax.Array:
    """A dense mask as [batch or 1, heads or 1, keys, queries], whole blocks; booleans as int8."""
    if mask.dtype == jnp.bool_:
        mask = mask.astype(jnp.int8)
    full = (*mask.shape[:2], shape.queries, shape.keys)
    mask = jnp.broadcast_to(mask, full).swapaxes(2, 3)
    return pad_to(pad_to(mask, 3, blocks.q), 2, blocks.kv)


def pad_to(x: jax.Array, axis: int, multiple: int, value: int = 0) -> jax.Array:
    """`x` with `axis` filled up with `value` to a multiple of `multiple`."""
    missing = round_up(x.shape[axis], multiple) - x.shape[axis]
    if not missing:
        return x
    widths = [(0, missing if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def segment_overlap(operands: Operands, blocks: Blocks) -> jax.Array:
    """Which pairs of blocks may hold tokens of one segment.

    Segments are intervals of token ids as often as not (packed documents), so the ranges of the ids
    tell: blocks whose ranges do not meet are skipped at run time.

    Returns:
        int32 [batch, q blocks x kv blocks].
    """

    def ranges(ids: jax.Array | None, block: int) -> tuple[jax.Array, jax.Array]:
        if ids is None:
            return jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
        # the edge repeats its last id: padding must not widen a range
        ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
        cut = ids.reshape(ids.shape[0], -1, block)
        return cut.min(axis=2), cut.max(axis=2)

    q_low, q_high = ranges(operands.q_segments, blocks.q)
    k_low, k_high = ranges(operands.kv_segments, blocks.kv)
    meet = (q_low[:, :, None] <= k_high[:, None, :]) & (k_low[:, None, :] <= q_high[:, :, None])
    return meet.reshape(meet.shape[0], -1).astype(jnp.int32)
