"""Pass "edges": results that depend on what lies outside an array, in a partly filled block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpu_kernels.compiler.pallas_grid import Block, block_indices, block_name, point_name
from tpu_kernels.verify.passes.isolated import (
    Lost,
    Outcome,
    lost,
    plain_runs,
    run_isolated,
)
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed, one_of

NAME = "edges"
_PATTERNS = ("nan", "high", "low")


def run(subject: Subject) -> CheckRow:
    """Run the kernel with different values beyond the edges of its inputs, and compare."""
    if not subject.calls:
        return CheckRow(NAME, "skipped", "the program calls no Pallas kernel")
    if not any(call.blocks for call in subject.calls):
        return CheckRow(NAME, "skipped", "its Pallas kernels have no blocks that could be listed")
    ragged = [
        (call, block)
        for call in subject.calls
        for block in call.inputs
        if block.leftovers and overhangs(block, call.sample())
    ]
    if not ragged:
        return CheckRow(NAME, "ok", "every block of an input lies inside its array")
    told = [_described(subject, block, overhangs(block, call.sample())) for call, block in ragged]
    arguments = (subject.interpreted(True), subject.arrays, _PATTERNS)
    found = run_isolated(plain_runs, arguments, subject.timeout_s)
    if isinstance(found, Lost):
        return lost(NAME, found, subject)
    for outcome in found:
        if outcome.error is not None:
            first = outcome.error.splitlines()[0]
            what = f"the kernel raised {outcome.error_type}: {first}"
            return failed(NAME, what, outcome.place or subject.call_place)
    difference = differing(found)
    if difference is None:
        return CheckRow(NAME, "ok", "no result depends on values outside: " + "; ".join(told))
    output, element = difference
    names = one_of(list(dict.fromkeys(block_name(b, subject.names) for _, b in ragged)))
    what = f"output {output} depends on values outside the array: mask {names}"
    lines = [what, *told, f"first element that does: {element}"]
    hint = "mask by selection, jnp.where(inside, x, 0): multiplying by a mask keeps NaN"
    return failed(NAME, "\n".join(lines), ragged[0][0].where or subject.where, hint)


def differing(outcomes: Sequence[Outcome]) -> tuple[int, str] | None:
    """Compare the outputs of several runs to the bit, NaN being equal to NaN.

    Args:
        outcomes: The runs.

    Returns:
        Number of the first output that differs, and the index of its first element that does.
    """
    first = outcomes[0].outputs
    for output, values in enumerate(first):
        for other in outcomes[1:]:
            a, b = values, other.outputs[output]
            same = (a == b) | ((a != a) & (b != b))
            if not bool(np.all(same)):
                index = np.argwhere(~np.atleast_1d(same))[0]
                return output, point_name(index)
    return None


def overhangs(block: Block, grid: tuple[int, ...]) -> list[int]:
    """Dimensions in which a block that the grid visits reaches beyond its array.

    Args:
        block: The block.
        grid: Grid sizes.

    Returns:
        The dimensions; where prefetched scalars place the block, all that have a partly filled one.
    """
    if block.reads_scalars or 0 in grid:
        return [] if 0 in grid else list(block.leftovers)
    ends = (block_indices(block, grid).max(axis=0) + 1) * np.array(block.block)
    return [axis for axis in block.leftovers if ends[axis] > block.array[axis]]


def _described(subject: Subject, block: Block, axes: Sequence[int]) -> str:
    parts = []
    for axis in axes:
        left = block.leftovers[axis]
        parts.append(
            f"dimension {axis} of {block.array[axis]} in blocks of {block.block[axis]}: "
            f"{left} left over, {block.block[axis] - left} outside"
        )
    return f"{block_name(block, subject.names)}, " + ", ".join(parts)
