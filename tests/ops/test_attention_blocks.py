"""The list of blocks to visit, against the mask as a matrix."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.ops.attention_blocks import (
    EMPTY,
    FIRST,
    FULL,
    KIND_SHIFT,
    LAST,
    MAX_BRANCHES,
    Band,
    block_of,
    flags_of,
    parts_of,
    steps_of,
)

far = st.none() | st.integers(0, 40)
bands = st.builds(Band, far, far, st.integers(-30, 30))
PARTS = (4, 2)


def dense(band: Band, lengths: tuple[int, int]) -> np.ndarray:
    """The mask as a matrix [queries, keys]."""
    distance = np.arange(lengths[0])[:, None] + band.offset - np.arange(lengths[1])
    keep = np.ones(distance.shape, bool)
    if band.right is not None:
        keep &= distance >= -band.right
    if band.left is not None:
        keep &= distance <= band.left
    return keep


@given(
    band=bands,
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    block=st.tuples(st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16])),
    by_keys=st.booleans(),
    group=st.integers(1, 3),
)
def test_every_pair_that_counts_is_computed_once_and_no_other(
    band: Band, lengths: tuple[int, int], block: tuple[int, int], by_keys: bool, group: int
) -> None:
    group = group if by_keys else 1
    steps = steps_of(band, lengths, block, by_keys=by_keys, group=group)
    keep = dense(band, lengths)
    padded = np.zeros(
        (-(-lengths[0] // block[0]) * block[0], -(-lengths[1] // block[1]) * block[1])
    )
    padded = padded.astype(bool)
    padded[: lengths[0], : lengths[1]] = keep
    real = np.zeros_like(padded)
    real[: lengths[0], :] = True  # what is computed for padded queries is thrown away
    seen = np.zeros((group, *padded.shape), int)
    for i, j, head, flag in zip(steps.q, steps.kv, steps.head, steps.flags, strict=True):
        kind = flag >> KIND_SHIFT
        if kind == EMPTY:
            continue
        cut = steps.cuts[kind - 2] if kind > FULL and steps.cuts else None
        rows = slice(i * block[0], (i + 1) * block[0])
        columns = slice(j * block[1], (j + 1) * block[1])
        tile = np.zeros(block, int)
        for part in parts_of(band, cut, block, PARTS):
            at = (
                slice(part.q * PARTS[0], (part.q + 1) * PARTS[0]),
                slice(part.kv * PARTS[1], (part.kv + 1) * PARTS[1]),
            )
            masked = part.cut or (kind > FULL and cut is None)
            tile[at] += padded[rows, columns][at] if masked else 1
        seen[head, rows, columns] += tile
    assert (seen[:, real] == np.broadcast_to(padded, seen.shape)[:, real]).all()


@given(band=bands, lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)), by_keys=st.booleans())
def test_every_block_of_the_output_is_started_once_and_finished_once(
    band: Band, lengths: tuple[int, int], by_keys: bool
) -> None:
    steps = steps_of(band, lengths, (8, 8), by_keys=by_keys)
    outer = steps.kv if by_keys else steps.q
    blocks = list(range(-(-lengths[1 if by_keys else 0] // 8)))
    assert outer[steps.flags & FIRST != 0].tolist() == blocks
    assert outer[steps.flags & LAST != 0].tolist() == blocks
    assert (np.diff(outer) >= 0).all()


def test_a_causal_mask_skips_half_and_cuts_in_one_way() -> None:
    steps = steps_of(Band(right=0), (4096, 4096), (1024, 1024))
    assert len(steps.q) == 10
    assert [cut.delta for cut in steps.cuts] == [0]
    live = parts_of(Band(right=0), steps.cuts[0], (1024, 1024), (512, 256))
    assert len(live) == 6
    assert sum(part.cut for part in live) == 4


def test_many_ways_to_cut_share_a_branch() -> None:
    steps = steps_of(Band(left=37, right=0, offset=3), (64, 64), (16, 8))
    assert steps.cuts == ()
    assert max(steps.kinds) == 2
    assert MAX_BRANCHES >= 2  # causal with a window, aligned, must not fall under this
    assert len(steps_of(Band(left=1023, right=0), (8192, 8192), (1024, 1024)).cuts) == 2


@given(band=bands, lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)))
def test_two_words_hold_a_step(band: Band, lengths: tuple[int, int]) -> None:
    steps = steps_of(band, lengths, (8, 8), by_keys=True, group=3)
    where, what = steps.packed()
    assert all(map(np.array_equal, block_of(where), (steps.q, steps.kv)))
    assert all(map(np.array_equal, flags_of(what), (steps.flags, steps.head)))
