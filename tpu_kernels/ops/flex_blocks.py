"""From a BlockMask to the blocks that a kernel visits, at run time.

A BlockMask lists, for each block of queries, the blocks of keys that hold something to see, and
apart from them those of which everything is seen. Its blocks are small (128 x 128 by default); a
kernel's are large, and come in parts. A part is empty, full or cut according to the small blocks
in it, and a block is one of a few patterns of parts, each of which is a branch of the kernel: full;
cut along the diagonal, with empty parts above or below it; or cut anywhere.

As in `attention_blocks`, the grid walks a list in scalar memory, and its length is that of the
list: an empty block costs neither a step nor a copy. Here the list is computed by XLA, from the
BlockMask's tensors; if those are NumPy arrays, when the program is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_kernels.ops.attention_blocks import (
    EMPTY,
    FIRST,
    FULL,
    KIND_SHIFT,
    LAST,
    Part,
)
from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.tiles import round_up

CUT = 2  # state of a part, beside EMPTY and FULL
_KV_SHIFT, _HEAD_SHIFT = 16, 8


def patterns(parts: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """What parts of a block may be, in the order of what they cost.

    Args:
        parts: Number of parts along queries and along keys.

    Returns:
        int [queries, keys] arrays of states; kind 1 + n of a step is pattern n. The last one
        covers every block.

    Example:
        >>> [p.tolist() for p in patterns((2, 2))]
        [[[1, 1], [1, 1]], [[2, 0], [1, 2]], [[2, 1], [0, 2]], [[2, 2], [2, 2]]]
    """
    found = [np.full(parts, FULL)]
    if parts[0] == parts[1] > 1:
        below = np.tril(np.full(parts, FULL), -1) + CUT * np.eye(parts[0], dtype=int)
        found += [below, below.T]
    return (*found, np.full(parts, CUT))


def parts_in(pattern: np.ndarray) -> tuple[Part, ...]:
    """The parts of a pattern that are not empty, part of queries by part of queries."""
    return tuple(
        Part(kv, q, bool(pattern[q, kv] == CUT))
        for q in range(pattern.shape[0])
        for kv in range(pattern.shape[1])
        if pattern[q, kv] != EMPTY
    )


class Lists(NamedTuple):
    """The blocks to visit.

    Attributes:
        words: int32 [masks x steps]: blocks of queries and of keys.
        flags: int32 [masks x steps]: first and last visit of the output's block, kind, query head
            within its group.
        count: Steps of the grid: a number, or an array.
        length: Steps in memory, per mask.
        batched: Whether batches differ.
        headed: Whether heads differ.
    """

    words: Any
    flags: Any
    count: Any
    length: int
    batched: bool
    headed: bool

    def place(self, batch: Any, head: Any, heads: int, step: Any) -> Any:
        """Where a step of a batch and head of the grid lies in the lists."""
        mask = (batch if self.batched else 0) * (heads if self.headed else 1)
        return (mask + (head if self.headed else 0)) * self.length + step


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """A BlockMask's tensors.

    Attributes:
        counts: [batch or 1, heads or 1, q blocks] blocks of keys per block of queries.
        indices: [batch or 1, heads or 1, q blocks, kv blocks] which.
        full_counts: The same for the blocks that are seen whole, or None.
        full_indices: As `full_counts`.
        size: Queries and keys of a block.
    """

    counts: Any
    indices: Any
    full_counts: Any
    full_indices: Any
    size: tuple[int, int]

    @classmethod
    def of(cls, tensors: Sequence[Any], size: tuple[int, int]) -> Sparsity | None:
        """The two or four tensors that an operator takes; None for none."""
        if not tensors:
            return None
        counts, indices, full_counts, full_indices = (*tensors, None, None)[:4]
        return cls(counts, indices, full_counts, full_indices, size)

    def states(self, trivial: bool) -> Any:
        """int8 [batch or 1, heads or 1, q blocks, kv blocks]: EMPTY, FULL or CUT.

        Args:
            trivial: Whether the mask_mod keeps everything, so that no listed block is cut.
        """
        found = _listed(self.counts, self.indices) * (FULL if trivial else CUT)
        if self.full_counts is not None:
            whole = _listed(self.full_counts, self.full_indices)
            xp = _xp(found, whole)
            found = xp.where(whole != 0, FULL, found)
        return found


def _xp(*arrays: Any) -> Any:
    return np if all(isinstance(a, (np.ndarray, np.generic)) for a in arrays) else jnp


def _listed(counts: Any, indices: Any) -> Any:
    """1 where a block is in a list, else 0."""
    xp = _xp(counts, indices)
    slots = indices.shape[-1]
    real = xp.arange(slots) < counts[..., None]
    hit = (indices[..., :, None] == xp.arange(slots)) & real[..., None]
    return hit.any(axis=-2).astype(np.int32)


def _overlap(block: int, count: int, small: int, smalls: int) -> np.ndarray:
    """Which small blocks touch which parts: 0 or 1, [count, smalls]."""
    first = np.arange(count)[:, None] * block
    other = np.arange(smalls)[None, :] * small
    return ((first < other + small) & (other < first + block)).astype(np.float32)


def kinds_of(sparsity: Sparsity | None, trivial: bool, shape: Shape, blocks: Blocks) -> Any:
    """The kind of every block: EMPTY, or 1 + the number of its pattern.

    Args:
        sparsity: The BlockMask, None for none.
        trivial: Whether the mask_mod keeps everything.
        shape: The problem's sizes.
        blocks: The kernel's blocks.

    Returns:
        int [batch or 1, heads or 1, q blocks, kv blocks].
    """
    counts = (-(-shape.queries // blocks.q), -(-shape.keys // blocks.kv))
    inner = (blocks.q // blocks.part_q, blocks.kv // blocks.part_kv)
    fine = (counts[0] * inner[0], counts[1] * inner[1])
    if sparsity is None:
        parts = np.full((1, 1, *fine), FULL if trivial else CUT, np.int32)
    else:
        states = sparsity.states(trivial)
        xp = _xp(states)
        size = [min(n, round_up(m, p)) for n, m, p in zip(
            sparsity.size, (shape.queries, shape.keys), blocks.block, strict=True
        )]  # fmt: skip
        rows = _overlap(blocks.part_q, fine[0], size[0], states.shape[2])
        columns = _overlap(blocks.part_kv, fine[1], size[1], states.shape[3])

        def touched(state: Any) -> Any:
            flags = state.astype(np.float32)
            return xp.einsum("qi,bhij,kj->bhqk", rows, flags, columns) > 0

        something, hole = touched(states != EMPTY), touched(states != FULL)
        parts = xp.where(something, xp.where(hole, CUT, FULL), EMPTY)
    parts = _at_the_edge(parts, shape.keys, blocks.part_kv)
    parts = parts.reshape(*parts.shape[:2], counts[0], inner[0], counts[1], inner[1])
    return _kinds(parts.transpose(0, 1, 2, 4, 3, 5), inner)


def _at_the_edge(parts: Any, keys: int, part: int) -> Any:
    """Parts beyond the last key are empty, and the one that holds it is cut if it has more."""
    xp = _xp(parts)
    first = np.arange(parts.shape[-1]) * part
    parts = xp.where((first + part > keys) & (parts == FULL), CUT, parts)
    return xp.where(first >= keys, EMPTY, parts)


def _kinds(parts: Any, inner: tuple[int, int]) -> Any:
    xp = _xp(parts)
    known = patterns(inner)
    kinds = xp.full(parts.shape[:4], len(known))
    for number in range(len(known) - 1, 0, -1):
        pattern = known[number - 1]
        fits = (pattern == CUT) | (parts == pattern)
        # A part that is full costs less than the diagonal's if all is known of it, and no more.
        kinds = xp.where(fits.all(axis=(4, 5)), number, kinds)
    return xp.where((parts == EMPTY).all(axis=(4, 5)), EMPTY, kinds)


def lists_of(kinds: Any, *, by_keys: bool = False, group: int = 1) -> Lists:
    """List the blocks to visit.

    Args:
        kinds: `kinds_of`.
        by_keys: Visit all blocks of queries for one block of keys after the other.
        group: Query heads to visit for each block of keys; heads of `kinds` then become groups.

    Returns:
        The lists; every block of the outer dimension is visited, as EMPTY if need be.

    Example:
        >>> lists = lists_of(np.array([[[[2, 0], [1, 2]]]]))
        >>> lists.count, (lists.words >> 16).tolist(), (lists.flags >> 2).tolist()
        (3, [0, 0, 1], [2, 1, 2])
    """
    xp = _xp(kinds)
    batch, heads, rows, columns = kinds.shape
    if by_keys:
        # [batch, groups, kv blocks, head within the group, q blocks]
        if heads > 1:
            cube = kinds.reshape(batch, heads // group, group, rows, columns)
        else:
            cube = xp.broadcast_to(kinds[:, :, None], (batch, 1, group, rows, columns))
        cube = cube.transpose(0, 1, 4, 2, 3)
        outer, inner = columns, group * rows
    else:
        cube = kinds
        outer, inner = rows, columns
    table = cube.reshape(cube.shape[0] * cube.shape[1], outer, inner)
    lonely = ~(table > EMPTY).any(axis=2)
    here = (table > EMPTY) | (lonely[:, :, None] & (np.arange(inner) == 0))
    flat = here.reshape(-1, outer * inner)
    counts = flat.sum(axis=1).astype(np.int32)
    length = outer * inner
    if xp is np:
        order, count = np.argsort(~flat, axis=1, kind="stable"), int(counts.max())
        order, length = order[:, :count], count
    else:
        order, count = jnp.argsort(~flat, axis=1, stable=True), counts.max()
    step = np.arange(length)
    real = step < counts[:, None]
    # what is beyond a shorter list repeats its last block, which copies nothing
    order = xp.where(real, order, xp.take_along_axis(order, counts[:, None] - 1, axis=1))
    kind = xp.take_along_axis(table.reshape(flat.shape), order, axis=1)
    outside, inside = order // inner, order % inner
    if by_keys:
        head, i, j = inside // rows, inside % rows, outside
    else:
        head, i, j = xp.zeros_like(inside), outside, inside
    edge = outside[:, 1:] != outside[:, :-1]
    ends = xp.ones_like(outside[:, :1], dtype=bool)
    first = xp.concatenate([ends, edge], axis=1)
    last = xp.concatenate([edge, ends], axis=1) | (step == counts[:, None] - 1)
    flags = xp.where(first, FIRST, 0) | xp.where(last, LAST, 0)
    flags = xp.where(real, flags | kind << KIND_SHIFT, 0) | head << _HEAD_SHIFT
    words = i | j << _KV_SHIFT
    return Lists(
        words.reshape(-1).astype(np.int32),
        flags.reshape(-1).astype(np.int32),
        count,
        length,
        batched=cube.shape[0] > 1,
        headed=cube.shape[1] > 1,
    )
