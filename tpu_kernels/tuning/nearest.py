"""Which tuned shapes are near enough to lend their config to others.

Near means: same dtypes and ranks, every dimension within a factor of two, and whatever size in the
config divides a tuned dimension divides the new one as well. The last rule is what makes it safe: a
kernel that does not handle ragged edges works for the tuned shape only because its blocks divide
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Arrays = Sequence[tuple[Sequence[int], str]]
"""``(shape, dtype name)`` of every tensor argument."""

_FARTHEST = 1.0  # log2: a factor of two


@dataclass(frozen=True)
class Neighbour:
    """A tuned call.

    Attributes:
        arrays: Shape and dtype name of every tensor argument.
        config: The config that was chosen.
        static: Static values, where the source has not been filtered by them yet.
    """

    arrays: Arrays
    config: Mapping[str, Any]
    static: Mapping[str, Any] = field(default_factory=dict)


def nearest(arrays: Arrays, neighbours: Iterable[Neighbour]) -> Neighbour | None:
    """Return the neighbour whose shapes are nearest, None if none is near enough.

    Args:
        arrays: The call that needs a config.
        neighbours: Tuned calls of the same kernel and chip.

    Example:
        >>> tuned = Neighbour([((4096, 512), "float32")], {"block": 256})
        >>> nearest([((6144, 512), "float32")], [tuned]) is tuned
        True
        >>> nearest([((5000, 512), "float32")], [tuned]) is None  # 256 divides 4096, but not 5000
        True
    """
    best: tuple[float, Neighbour] | None = None
    for neighbour in neighbours:
        apart = distance(arrays, neighbour.arrays)
        if apart > _FARTHEST or not _divides_alike(arrays, neighbour):
            continue
        if best is None or apart < best[0]:
            best = (apart, neighbour)
    return best[1] if best is not None else None


def distance(a: Arrays, b: Arrays) -> float:
    """Return the largest log2 ratio of two dimensions, infinite for other ranks or dtypes.

    Example:
        >>> distance([((8, 16), "int8")], [((8, 64), "int8")])
        2.0
    """
    if len(a) != len(b):
        return math.inf
    farthest = 0.0
    for (shape, dtype), (other, other_dtype) in zip(a, b, strict=True):
        if dtype != other_dtype or len(shape) != len(other):
            return math.inf
        for size, other_size in zip(shape, other, strict=True):
            if size == other_size:
                continue
            if size <= 0 or other_size <= 0:
                return math.inf
            farthest = max(farthest, abs(math.log2(size / other_size)))
    return farthest


def _divides_alike(arrays: Arrays, neighbour: Neighbour) -> bool:
    sizes = {size for size in _integers(neighbour.config) if size > 1}
    for (shape, _), (tuned, _) in zip(arrays, neighbour.arrays, strict=True):
        for dim, tuned_dim in zip(shape, tuned, strict=True):
            if any(tuned_dim % size == 0 and dim % size for size in sizes):
                return False
    return True


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _integers(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
