"""Which blocks of an attention matrix are empty, full or partly masked, and in which order to visit
those that are not empty.

A static mask depends on the distance between a query and a key alone: causal masks, sliding
windows and their combination, for any position of the first query. A block that it cuts is told
from another one only by the distance of their corners, so a mask cuts blocks in few ways. Each way
becomes a branch of the kernel of its own, in which even the parts of the block (the tiles of one
matrix instruction sequence) are known to be empty, full or cut.

The blocks to visit become a list in scalar memory: the grid walks the list, so an empty block costs
neither a step nor a copy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

EMPTY, FULL = 0, 1  # kinds of a step; 2 and more are the ways to cut a block
MAX_BRANCHES = 4  # ways that get a branch of their own; with more, one branch masks at run time

FIRST, LAST, KIND_SHIFT = 1, 2, 2
_KV_SHIFT, _HEAD_SHIFT = 16, 8


@dataclasses.dataclass(frozen=True)
class Band:
    """The keys that a query may see: ``-right <= query + offset - key <= left``.

    Attributes:
        left: How far back a query sees; None for any distance.
        right: How far ahead; 0 is causal, None is any distance.
        offset: Position of the first query among the keys.
    """

    left: int | None = None
    right: int | None = None
    offset: int = 0

    @property
    def everything(self) -> bool:
        """Whether no key is excluded."""
        return self.left is None and self.right is None


class Part(NamedTuple):
    """A tile of a block: some keys by some queries, as offsets in units of parts.

    Attributes:
        kv: Number of the part along the keys.
        q: Number of the part along the queries.
        cut: Whether the mask cuts it; if not, every pair in it counts.
    """

    kv: int
    q: int
    cut: bool


class Cut(NamedTuple):
    """A way in which a block is cut.

    Attributes:
        delta: Position of the block's first query less that of its first key; None where the band
            excludes nothing in the block.
        keys: Keys of the block that exist, the rest is padding.
    """

    delta: int | None
    keys: int


class Steps(NamedTuple):
    """The blocks to visit, in order, one entry per grid step.

    Attributes:
        q: int32 [steps], index of the block of queries.
        kv: int32 [steps], index of the block of keys.
        head: int32 [steps], query head within its group; zeros where the grid has an axis for it.
        flags: int32 [steps], bit 0: first visit of the output block, bit 1: last visit, from bit 2
            on: the kind.
        cuts: What kind 2, 3, ... mean; empty where one branch serves them all at run time.
    """

    q: np.ndarray
    kv: np.ndarray
    head: np.ndarray
    flags: np.ndarray
    cuts: tuple[Cut, ...]

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """The list in two words per step, since scalar memory is small; `block_of` unpacks them."""
        return self.q | self.kv << _KV_SHIFT, self.flags | self.head << _HEAD_SHIFT

    @property
    def kinds(self) -> frozenset[int]:
        """The kinds that occur."""
        return frozenset(np.unique(self.flags >> KIND_SHIFT).tolist())


def block_of(word: Any) -> tuple[Any, Any]:
    """Blocks of queries and of keys in the first word of a step."""
    return word & ((1 << _KV_SHIFT) - 1), word >> _KV_SHIFT


def flags_of(word: Any) -> tuple[Any, Any]:
    """Flags and query head in the second word of a step."""
    return word & ((1 << _HEAD_SHIFT) - 1), word >> _HEAD_SHIFT


def _state(band: Band, delta: int, q: range, k: range, keys: int) -> int:
    """Whether the mask keeps nothing (0), everything (1) or a part (2) of a region.

    `delta` is the distance of the corners that `q` and `k` count from.
    """
    if k.start >= keys:
        return EMPTY
    low = delta + q.start - (min(k.stop, keys) - 1)
    high = delta + q.stop - 1 - k.start
    if band.right is not None and high < -band.right:
        return EMPTY
    if band.left is not None and low > band.left:
        return EMPTY
    inside_right = band.right is None or low >= -band.right
    inside_left = band.left is None or high <= band.left
    return FULL if inside_right and inside_left and k.stop <= keys else 2


@functools.lru_cache(maxsize=256)
def parts_of(
    band: Band, cut: Cut | None, block: tuple[int, int], part: tuple[int, int]
) -> tuple[Part, ...]:
    """The parts of a block that are not empty, part of queries by part of queries.

    Args:
        band: The static mask.
        cut: How it cuts the block; None for a full block.
        block: Queries and keys of a block.
        part: Queries and keys of a part; divisors of `block`.

    Returns:
        The parts in the order to compute them in.

    Example:
        >>> causal = Band(right=0)
        >>> [tuple(p) for p in parts_of(causal, Cut(0, 8), (8, 8), (4, 4))]
        [(0, 0, True), (0, 1, False), (1, 1, True)]
    """
    found = []
    for q in range(block[0] // part[0]):
        for kv in range(block[1] // part[1]):
            state = FULL
            if cut is not None:
                rows = range(q * part[0], (q + 1) * part[0])
                columns = range(kv * part[1], (kv + 1) * part[1])
                limits = Band() if cut.delta is None else band
                state = _state(limits, cut.delta or 0, rows, columns, cut.keys)
            if state != EMPTY:
                found.append(Part(kv, q, state == 2))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def steps_of(
    band: Band,
    lengths: tuple[int, int],
    block: tuple[int, int],
    *,
    by_keys: bool = False,
    group: int = 1,
) -> Steps:
    """List the blocks to visit.

    Args:
        band: The static mask.
        lengths: Number of queries and of keys, without padding.
        block: Queries and keys of a block.
        by_keys: Visit all blocks of queries for one block of keys after the other (what gradients
            of keys and values want) instead of the reverse.
        group: Query heads to visit for each block of keys.

    Returns:
        At least one step for every block of the outer dimension, empty if need be, so that every
        block of the output is written.

    Example:
        >>> steps = steps_of(Band(right=0), (4, 4), (2, 2))
        >>> steps.q.tolist(), steps.kv.tolist(), (steps.flags >> 2).tolist()
        ([0, 1, 1], [0, 0, 1], [2, 1, 2])
    """
    q_blocks, kv_blocks = -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    cuts: dict[Cut, int] = {}

    def kind(i: int, j: int) -> int:
        delta = i * block[0] + band.offset - j * block[1]
        rows = range(min(block[0], lengths[0] - i * block[0]))
        keys = min(block[1], lengths[1] - j * block[1])
        state = _state(band, delta, rows, range(block[1]), keys)
        if state != 2:
            return state
        whole = _state(band, delta, range(block[0]), range(keys), keys) == FULL
        return cuts.setdefault(Cut(None if whole else delta, keys), len(cuts) + 2)

    rows: list[tuple[int, int, int, int]] = []
    for outer in range(kv_blocks if by_keys else q_blocks):
        visits = []
        for inner in range(q_blocks if by_keys else kv_blocks):
            i, j = (inner, outer) if by_keys else (outer, inner)
            if (what := kind(i, j)) != EMPTY:
                visits.append((i, j, what))
        visits = visits or [(0, outer, EMPTY) if by_keys else (outer, 0, EMPTY)]
        count = len(visits) * group
        for head in range(group):
            for number, (i, j, what) in enumerate(visits, head * len(visits)):
                edge = FIRST * (number == 0) | LAST * (number == count - 1)
                rows.append((i, j, head, edge | what << KIND_SHIFT))
    table = np.array(rows, np.int32).reshape(-1, 4)
    q, kv, head_of, flags = (np.ascontiguousarray(column) for column in table.T)
    if len(cuts) <= MAX_BRANCHES:
        return Steps(q, kv, head_of, flags, tuple(cuts))
    kinds = np.minimum(flags >> KIND_SHIFT, 2)
    return Steps(q, kv, head_of, flags & 3 | kinds << KIND_SHIFT, ())
