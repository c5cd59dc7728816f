"""From a BlockMask to the blocks that a kernel visits, at run time.

A BlockMask lists, for each block of queries, the blocks of keys that hold something to see, and
apart from them those of which everything is seen. Its blocks are small (128 x 128 by default); a
kernel's are large, and come in parts. By the small blocks in it, a block is one of a few patterns,
each of which is a branch of the kernel: full; cut along the diagonal, with nothing to compute above
or below it, and nothing to mask elsewhere; or cut anywhere.

As in `attention_blocks`, the grid walks a list in scalar memory, and its length is that of the
list: an empty block costs neither a step nor a copy. Here the list is computed by XLA, from the
BlockMask's tensors; if those are NumPy arrays, when the program is traced.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_kernels.ops.attention_blocks import EMPTY, FIRST, FULL, KIND_SHIFT, LAST
from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.tiles import LANES, round_up

CUT = 2  # state of a part, beside EMPTY and FULL
_KV_SHIFT, _HEAD_SHIFT = 16, 8


class Cut(enum.Enum):
    """What the mask does to a part that a kernel computes."""

    NOTHING = "nothing"
    ANYWHERE = "anywhere"
    BELOW = "kept below the diagonal"  # queries after keys
    ABOVE = "kept above the diagonal"


class Part(NamedTuple):
    """A tile of a block.

    Attributes:
        kv: Number of the part along the keys.
        q: Number of the part along the queries.
        cut: What the mask does to it.
    """

    kv: int
    q: int
    cut: Cut


class Pattern(NamedTuple):
    """What a block may look like.

    Attributes:
        states: int [queries, keys], in units of grains; CUT stands for anything.
        parts: The parts to compute, part of queries by part of queries.
    """

    states: np.ndarray
    parts: tuple[Part, ...]


@functools.lru_cache(maxsize=64)
def patterns(blocks: Blocks, grain: int) -> tuple[Pattern, ...]:
    """The patterns of blocks, in the order of what they cost.

    Args:
        blocks: The kernel's blocks.
        grain: Length of the squares whose states are known; it divides the parts.

    Returns:
        Kind 1 + n of a step is pattern n. The last one covers every block.

    Example:
        >>> [p.states.tolist() for p in patterns(Blocks(4, 4, 2, 2), 2)]
        [[[1, 1], [1, 1]], [[2, 0], [1, 2]], [[2, 1], [0, 2]], [[2, 2], [2, 2]]]
    """
    grains = (blocks.q // grain, blocks.kv // grain)
    whole = [
        Part(kv, q, Cut.NOTHING)
        for q in range(blocks.q // blocks.part_q)
        for kv in range(blocks.kv // blocks.part_kv)
    ]
    found = [Pattern(np.full(grains, FULL), tuple(whole))]
    step = math.gcd(blocks.q, blocks.kv)
    if blocks.part_q == blocks.part_kv and (blocks.part_q > grain or len(whole) > 1):
        # Corners of blocks differ by multiples of `step`; so does the diagonal's place in a block.
        for keep in (Cut.BELOW, Cut.ABOVE):
            for delta in range(0, -blocks.q, -step):
                found.append(_diagonal(whole, grains, grain, blocks, delta, keep))
            for delta in range(step, blocks.kv, step):
                found.append(_diagonal(whole, grains, grain, blocks, delta, keep))
    anything = tuple(part._replace(cut=Cut.ANYWHERE) for part in whole)
    return (*found, Pattern(np.full(grains, CUT), anything))


def _diagonal(
    whole: Sequence[Part],
    grains: tuple[int, int],
    grain: int,
    blocks: Blocks,
    delta: int,
    keep: Cut,
) -> Pattern:
    """The pattern of a block whose first query is `delta` after its first key."""
    below, above = (FULL, EMPTY) if keep is Cut.BELOW else (EMPTY, FULL)
    distance = np.arange(grains[0])[:, None] + delta // grain - np.arange(grains[1])
    states = np.where(distance > 0, below, np.where(distance < 0, above, CUT))
    parts = []
    for part in whole:
        apart = part.q + delta // blocks.part_q - part.kv
        if apart == 0:
            parts.append(part._replace(cut=keep))
        elif (below if apart > 0 else above) == FULL:
            parts.append(part)
    return Pattern(states, tuple(parts))


def grain_of(blocks: Blocks, size: tuple[int, int]) -> int:
    """The length of the squares that patterns are made of: a BlockMask's blocks if they divide
    the parts of the kernel's blocks, else whole parts."""
    grain = max(*size, LANES)
    if blocks.part_q % grain == 0 == blocks.part_kv % grain:
        return grain
    return math.gcd(blocks.part_q, blocks.part_kv)


class Lists(NamedTuple):
    """The blocks to visit.

    Attributes:
        kinds: The kinds that occur, None if that is not known.
        words: int32 [masks x steps]: blocks of queries and of keys.
        flags: int32 [masks x steps]: first and last visit of the output's block, kind, query head
            within its group.
        count: Steps of the grid: a number, or an array.
        length: Steps in memory, per mask.
        batched: Whether batches differ.
        headed: Whether heads differ.
    """

    kinds: tuple[int, ...] | None
    words: Any
    flags: Any
    count: Any
    length: int
    batched: bool
    headed: bool

    def place(self, batch: Any, head: Any, heads: Any, step: Any) -> Any:
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

    def cuts(self, shape: Shape) -> bool:
        """Whether it could leave something out by itself: not if it is one block."""
        return self.size[0] < shape.queries or self.size[1] < shape.keys

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


def kinds_of(
    sparsity: Sparsity | None, trivial: bool, shape: Shape, blocks: Blocks, grain: int
) -> Any:
    """The kind of every block: EMPTY, or 1 + the number of its pattern.

    Args:
        sparsity: The BlockMask, None for none.
        trivial: Whether the mask_mod keeps everything.
        shape: The problem's sizes.
        blocks: The kernel's blocks.
        grain: As in `patterns`.

    Returns:
        int [batch or 1, heads or 1, q blocks, kv blocks].
    """
    counts = (-(-shape.queries // blocks.q), -(-shape.keys // blocks.kv))
    inner = (blocks.q // grain, blocks.kv // grain)
    fine = (counts[0] * inner[0], counts[1] * inner[1])
    if sparsity is None:
        states = np.full((1, 1, *fine), FULL if trivial else CUT, np.int32)
    else:
        listed = sparsity.states(trivial)
        xp = _xp(listed)
        size = [min(n, round_up(m, p)) for n, m, p in zip(
            sparsity.size, (shape.queries, shape.keys), blocks.block, strict=True
        )]  # fmt: skip
        rows = _overlap(grain, fine[0], size[0], listed.shape[2])
        columns = _overlap(grain, fine[1], size[1], listed.shape[3])

        def touched(state: Any) -> Any:
            flags = state.astype(np.float32)
            return xp.einsum("qi,bhij,kj->bhqk", rows, flags, columns) > 0

        something, hole = touched(listed != EMPTY), touched(listed != FULL)
        states = xp.where(something, xp.where(hole, CUT, FULL), EMPTY)
    states = _at_the_edge(states, shape.keys, grain)
    states = states.reshape(*states.shape[:2], counts[0], inner[0], counts[1], inner[1])
    return _kinds(states.transpose(0, 1, 2, 4, 3, 5), [p.states for p in patterns(blocks, grain)])


def _at_the_edge(states: Any, keys: int, grain: int) -> Any:
    """What lies beyond the last key is empty, and what holds it is cut if it has more."""
    xp = _xp(states)
    first = np.arange(states.shape[-1]) * grain
    states = xp.where((first + grain > keys) & (states == FULL), CUT, states)
    return xp.where(first >= keys, EMPTY, states)


def _kinds(states: Any, known: Sequence[np.ndarray]) -> Any:
    xp = _xp(states)
    kinds = xp.full(states.shape[:4], len(known))
    for number in range(len(known) - 1, 0, -1):
        pattern = known[number - 1]
        fits = (pattern == CUT) | (states == pattern)
        kinds = xp.where(fits.all(axis=(4, 5)), number, kinds)
    return xp.where((states == EMPTY).all(axis=(4, 5)), EMPTY, kinds)


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
    order: Any
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
    occurring = tuple(np.unique(kinds).tolist()) if xp is np else None
    return Lists(
        occurring,
        words.reshape(-1).astype(np.int32),
        flags.reshape(-1).astype(np.int32),
        count,
        length,
        batched=cube.shape[0] > 1,
        headed=cube.shape[1] > 1,
    )
