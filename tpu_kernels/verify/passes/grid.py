"""Pass "grid": what a kernel's outputs see of the order in which the grid is walked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpu_kernels.compiler import locations
from tpu_kernels.compiler.pallas_grid import (
    Block,
    GridCall,
    Names,
    block_indices,
    block_name,
    point_name,
)
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import failed

NAME = "grid"
_OUTSIDE_HINT = (
    "an index map counts in blocks, not in elements: let it end with the array (pl.cdiv for the "
    "grid, jnp.minimum in the map)"
)


def run(calls: Sequence[GridCall], where: str | None, names: Names | None = None) -> CheckRow:
    """Check the index maps over the grid.

    Args:
        calls: The Pallas calls of the program.
        where: Place of the kernel, for calls without one.
        names: The author's names of the program's arguments.

    Returns:
        A row that fails where a block lies wholly outside its array, where an output block is left
        and visited again (a TPU does not read it back), or where steps of an axis declared parallel
        write the same block.
    """
    if not calls:
        return CheckRow(NAME, "skipped", "the program calls no Pallas kernel")
    if not any(call.blocks for call in calls):
        return CheckRow(NAME, "skipped", "its Pallas kernels have no grid that could be listed")
    points, notes = 0, []
    for call in calls:
        sample = call.sample()
        if min(sample, default=1) < 0:
            return failed(NAME, f"the grid {call.grid} has a negative size", call.where or where)
        points += int(np.prod(sample))
        if 0 in sample:
            notes.append(f"the grid {call.grid} is empty: nothing runs, outputs are not written")
            continue
        if sample != tuple(size or 1 for size in call.grid):
            notes.append(f"grid {call.grid} sampled as {sample}")
        if None in call.grid:
            notes.append(f"dynamic grid bounds of {call.name!r} taken as 1")
        for block in call.blocks:
            if not block.windowed:
                continue
            if block.reads_scalars:
                notes.append(
                    f"{block.role} {block.position} is placed by prefetched scalars: not checked"
                )
                continue
            indices = block_indices(block, sample)
            outside = _outside(block, indices, sample, names or {})
            if outside is not None:
                place = block.where if _is_authors(block.where) else call.where
                return failed(NAME, outside, place or where, _OUTSIDE_HINT)
            if block.role == "input":
                continue
            finding = _parallel(call, block, indices, sample) or _revisit(block, indices, sample)
            if finding is not None:
                what, hint = finding
                return failed(NAME, what, call.where or where, hint)
    checked = (
        f"{points} grid points: every block touches its array, no output block is revisited, "
        "parallel axes are independent"
    )
    return CheckRow(NAME, "ok", "; ".join([checked, *notes]))


def _is_authors(place: str) -> bool:
    return bool(place) and locations.is_authors(place.rpartition(":")[0])


def _outside(block: Block, indices: np.ndarray, grid: tuple[int, ...], names: Names) -> str | None:
    """Words for the first block that has no element in common with its array."""
    if 0 in block.array:
        return None
    unit = np.array([b if t else 1 for b, t in zip(block.block, block.tiled, strict=True)])
    starts = indices * unit
    beyond = (starts < 0) | (starts >= np.array(block.array))
    steps = np.flatnonzero(beyond.any(axis=1))
    if not len(steps):
        return None
    step = int(steps[0])
    axis = int(np.flatnonzero(beyond[step])[0])
    point = np.array(np.unravel_index(step, grid)) if grid else ()
    return (
        f"{block_name(block, names)}: block {point_name(indices[step])} at grid point "
        f"{point_name(point)} lies outside the array: it starts at element {starts[step][axis]} of "
        f"dimension {axis}, which has {block.array[axis]}"
    )


def _groups(indices: np.ndarray) -> np.ndarray:
    """A number for each grid point, equal where the block is the same."""
    if indices.shape[1] == 0:
        return np.zeros(len(indices), np.int64)
    return np.unique(indices, axis=0, return_inverse=True)[1].reshape(-1)


def _revisit(block: Block, indices: np.ndarray, grid: tuple[int, ...]) -> tuple[str, str] | None:
    groups = _groups(indices)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    _, first = np.unique(groups[starts], return_index=True)
    again = np.setdiff1d(np.arange(len(starts)), first)
    if not len(again):
        return None
    step = int(starts[again[0]])
    now, before = (np.array(np.unravel_index(at, grid)) for at in (step, step - 1))
    what = (
        f"output {block.position}, block {point_name(indices[step])} is revisited at grid point "
        f"{point_name(now)} after {point_name(before)}: a TPU has written it back by then and does "
        "not read it again"
    )
    idle = _independent(groups, grid)
    axes = " and ".join(map(str, idle))
    hint = "visit each output block in consecutive grid steps only"
    if idle:
        hint = (
            f"make the reduction axis ({axes}), which the output does not depend on, the last one"
        )
    return what, hint


def _parallel(
    call: GridCall, block: Block, indices: np.ndarray, grid: tuple[int, ...]
) -> tuple[str, str] | None:
    groups = _groups(indices)
    for axis, kind in enumerate(call.semantics):
        if not kind.endswith("parallel") or grid[axis] < 2:
            continue
        lines = np.moveaxis(groups.reshape(grid), axis, 0).reshape(grid[axis], -1)
        hint = f'declare axis {axis} "arbitrary" in dimension_semantics'
        if axis in _independent(groups, grid):
            what = f"axis {axis} is parallel but output {block.position} does not depend on it"
            return f"{what}: on a chip with two cores both write the same block", hint
        ordered = np.sort(lines, axis=0)
        shared = np.argwhere(ordered[1:] == ordered[:-1])
        if len(shared):
            what = (
                f"axis {axis} is parallel but two of its steps write the same block of output "
                f"{block.position}"
            )
            return what, hint
    return None


def _independent(groups: np.ndarray, grid: tuple[int, ...]) -> list[int]:
    shaped = groups.reshape(grid)
    return [
        axis
        for axis, size in enumerate(grid)
        if size > 1 and bool((shaped == shaped.take([0], axis=axis)).all())
    ]
