"""The smallest call of a kernel at which a check still fails.

Greedy and deterministic: sizes first (equal sizes of different arguments together, since they
mostly mean the same dimension), then scalars, then values. A call counts only if it fails in the
same way: an argument that the kernel refuses is no smaller example of a wrong sum.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels.errors import KernelError
from tpu_kernels.verify.calls import GivenCall, Path, equal, simple_tensors, snippet
from tpu_kernels.verify.passes import running
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject

MOST_TRIES = 80
_TILES = (1, 2, 8, 16, 128, 256)
_FEW = 16  # from here on down one by one
_NUMBER = re.compile(r"-?\b(?:\d[\w.+-]*|inf|nan)\b")
_PLACE = re.compile(r"dimension \d+")
_Make = Callable[[GivenCall], Subject]


@dataclass
class _Search:
    """What is known while searching.

    Attributes:
        name: Name of the pass.
        finding: The failure to keep; see `_finding`.
        make: Makes what a pass takes of a call.
        deadline: When to stop, by `time.perf_counter`.
        tries: Calls checked so far.
        row: The row of the smallest call so far.
        seen: Calls that have been checked.
    """

    name: str
    finding: tuple[str, frozenset[str]]
    make: _Make
    deadline: float
    tries: int = 0
    row: CheckRow | None = None
    seen: set[Any] = dataclasses.field(default_factory=set)

    @property
    def over(self) -> bool:
        return self.tries >= MOST_TRIES or time.perf_counter() > self.deadline

    def fails(self, call: GivenCall) -> bool:
        """Check a call; True if it fails as the first one did. Each call is checked once."""
        key = _key(call)
        if key in self.seen:
            return False
        self.seen.add(key)
        self.tries += 1
        try:
            (row,) = running.run([self.name], self.make(call))
        except (KernelError, TypeError, ValueError, RuntimeError):
            return False  # the kernel does not take such arguments
        if row.status != "failed" or not _same(_finding(row), self.finding):
            return False
        self.row = row
        return True


def with_smallest(
    rows: Sequence[CheckRow],
    kernel: Callable[..., Any],
    call: GivenCall,
    make: _Make,
    budget_s: float,
) -> list[CheckRow]:
    """Add to each failed row the smallest call that fails in the same way.

    Args:
        rows: Rows of passes that run the kernel.
        kernel: The kernel or function.
        call: The arguments that were checked.
        make: Makes what a pass takes of a call; may raise for arguments that do not fit.
        budget_s: Seconds that all searches together may take.

    Returns:
        The rows; those that failed have `CheckRow.smallest`.
    """
    deadline = time.perf_counter() + budget_s
    found: list[CheckRow] = []
    smallest = call
    for row in rows:
        if row.status != "failed" or row.name not in running.PASSES:
            found.append(row)
            continue
        search = _Search(row.name, _finding(row), make, deadline)
        # What was found for one pass is most likely the smallest for the next as well.
        start = smallest if smallest is not call and search.fails(smallest) else call
        smallest = _descend(search, start)
        text = snippet(kernel, smallest, call, row.name)
        if search.row is not None:
            text += f"\n# {search.row.what.splitlines()[0]}"
        if time.perf_counter() > deadline:
            text += f"\n# the search stopped after {budget_s:g} s: smaller calls may fail too"
        found.append(dataclasses.replace(row, smallest=text))
    return found


def _key(call: GivenCall) -> Any:
    """Equal for calls that differ in nothing but in which part of a tensor they took."""
    parts: list[Any] = []
    for path, value in call.leaves():
        if isinstance(value, torch.Tensor):
            few = value.detach().cpu().reshape(-1)[:4]
            parts.append((path, tuple(value.shape), repr(few.tolist())))
        else:
            parts.append((path, type(value).__name__, repr(value)))
    return tuple(parts)


def _finding(row: CheckRow) -> tuple[str, frozenset[str]]:
    """A failure's first line without its numbers, and the places that it is about."""
    first = row.what.partition("\n")[0].partition(";")[0]
    return _NUMBER.sub("#", first), frozenset(_PLACE.findall(row.what))


def _same(found: tuple[str, frozenset[str]], wanted: tuple[str, frozenset[str]]) -> bool:
    return found[0] == wanted[0] and found[1] <= wanted[1]


def _descend(search: _Search, call: GivenCall) -> GivenCall:
    """Take the first smaller call that fails, until none does."""
    while not search.over:
        for smaller in _smaller(search, call):
            if search.over:
                return call
            if smaller.weight < call.weight and search.fails(smaller):
                call = smaller
                break
        else:
            break
    for path, value in list(call.leaves()):
        if not isinstance(value, torch.Tensor):
            continue
        for tensor in simple_tensors(value):
            if search.over or equal(tensor.detach(), value.detach().cpu()):
                break
            simpler = call.replaced({path: tensor})
            if search.fails(simpler):
                call = simpler
                break
    return call


def _smaller(search: _Search, call: GivenCall) -> Iterator[GivenCall]:
    sizes = sorted({size for _, size in _sizes(call)}, reverse=True)
    blocks = _blocks(search, call)
    for size in sizes:
        equal = [place for place, other in _sizes(call) if other == size]
        for smaller in _steps(size, blocks):
            yield _resized(call, equal, smaller)
    for (path, axis), size in _sizes(call):
        for smaller in _steps(size, blocks):
            yield _resized(call, [(path, axis)], smaller)
    for path, value in call.leaves():
        for simpler in _simpler(value):
            yield call.replaced({path: simpler})


def _sizes(call: GivenCall) -> list[tuple[tuple[Path, int | None], int]]:
    """Every tensor's sizes by path and axis, and the integers that may mean one (axis None)."""
    found: list[tuple[tuple[Path, int | None], int]] = []
    for path, value in call.leaves():
        if isinstance(value, torch.Tensor):
            found += [((path, axis), size) for axis, size in enumerate(value.shape) if size > 1]
    known = {size for _, size in found}
    for path, value in call.leaves():
        if isinstance(value, int) and not isinstance(value, bool) and value in known:
            found.append(((path, None), value))
    return found


def _steps(size: int, blocks: Sequence[int]) -> list[int]:
    """Smaller sizes to try in place of one: small ones, whole and overhanging blocks, halves."""
    near = [step for block in blocks for step in (block, block + 1, 2 * block)]
    if size <= _FEW:
        near.append(size - 1)
    return sorted({step for step in (*_TILES, *near, size // 2) if 0 < step < size})


def _blocks(search: _Search, call: GivenCall) -> list[int]:
    """Block sizes of the kernel's own grid: a mistake at an edge needs one block and a bit."""
    try:
        calls = search.make(call).calls
    except Exception:  # whatever tracing raises: the pass itself tells
        return []
    sizes = {size for each in calls for block in each.blocks for size in block.block if size > 1}
    return sorted(sizes)


def _resized(call: GivenCall, places: Sequence[tuple[Path, int | None]], size: int) -> GivenCall:
    values = dict(call.leaves())
    for path, axis in places:
        if axis is None:
            values[path] = size
            continue
        tensor = values[path].detach().narrow(axis, 0, size).clone()
        values[path] = tensor.requires_grad_(dict(call.leaves())[path].requires_grad)
    return call.replaced(values)


def _simpler(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        return [v for v in (0, 1, value // 2) if abs(v) < abs(value)]
    if isinstance(value, float):
        return [v for v in (0.0, 1.0, float(round(value))) if abs(v) < abs(value)]
    return []
