"""Views of a storage in JAX: a flat array of a storage's elements, seen through sizes and strides.

torch's views are nothing but numbers, and a program has no memory to look at through them. Here a
view becomes slices, reshapes and a transposition of the flat array (and a write to it their
inverse), which XLA fuses with what computes on them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class View:
    """How to read sizes and strides from a flat array.

    Attributes:
        shape: The view's shape.
        kept: Dimensions that step through memory, from the largest stride to the smallest.
        start: First element of the region of memory that holds the view.
        grid: The region as a row-major array: one axis for each kept dimension, then one for what
            lies between neighbours.
        corner: Where the view begins in the grid.
        size: The view's size in the grid.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]
    start: int
    grid: tuple[int, ...]
    corner: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements of the region."""
        return math.prod(self.grid)

    def is_whole(self, count: int) -> bool:
        """Whether the view is the storage's `count` elements in their order."""
        return (
            self.start == 0
            and self.length == count
            and self.size == self.grid
            and self.kept == tuple(sorted(self.kept))
            and math.prod(self.shape) == count
        )

    def read(self, flat: Any) -> Any:
        """The view of a flat array, as an array of the view's shape."""
        from jax import lax

        if self.is_whole(flat.shape[0]):
            return lax.reshape(flat, self.shape)
        region = self._region(flat)
        end = [c + s for c, s in zip(self.corner, self.size, strict=True)]
        if self.size != self.grid:
            region = lax.slice(region, self.corner, end)
        packed = lax.reshape(region, self.size[:-1])
        order = tuple(self.kept.index(d) for d in sorted(self.kept))
        if order != tuple(range(len(order))):
            packed = lax.transpose(packed, order)
        if packed.shape == self.shape:
            return packed
        return lax.broadcast_in_dim(packed, self.shape, sorted(self.kept))

    def write(self, flat: Any, values: Any) -> Any:
        """The flat array with the view's elements replaced; each element has one place."""
        from jax import lax

        if self.is_whole(flat.shape[0]):
            return lax.reshape(values, flat.shape)
        squeezed = lax.reshape(values, [self.shape[d] for d in sorted(self.kept)])
        order = [sorted(self.kept).index(d) for d in self.kept]
        block = lax.reshape(lax.transpose(squeezed, order), self.size)
        region = self._region(flat)
        if self.size != self.grid:
            block = lax.dynamic_update_slice(region, block, self.corner)
        found = lax.reshape(block, (self.length,))
        if self.length == flat.shape[0]:
            return found
        inside = min(self.start + self.length, flat.shape[0]) - self.start
        found = lax.slice(found, (0,), (inside,))
        return lax.dynamic_update_slice(flat, found, (self.start,))

    def _region(self, flat: Any) -> Any:
        from jax import lax

        missing = self.start + self.length - flat.shape[0]
        if missing > 0:  # the last row's neighbour lies outside of the storage
            flat = lax.pad(flat, lax.full_like(flat, 0, shape=()), [(0, missing, 0)])
        if self.length != flat.shape[0]:
            flat = lax.slice(flat, (self.start,), (self.start + self.length,))
        return lax.reshape(flat, self.grid)


@functools.lru_cache(maxsize=65536)
def view(
    shape: Sequence[int], stride: Sequence[int], offset: int, *, writable: bool = False
) -> View | None:
    """Plan a view; None where slices and transpositions cannot express it.

    Args:
        shape: Sizes, none of them 0.
        stride: Strides.
        offset: First element.
        writable: Whether it will be written to, so that no element may occur twice.

    Example:
        >>> import jax.numpy as jnp
        >>> column = view((3,), (4,), 1)  # x[:, 1] of a 3 x 4 matrix
        >>> column.read(jnp.arange(12)).tolist()
        [1, 5, 9]
        >>> view((2, 2), (1, 1), 0) is None  # overlapping windows
        True
    """
    steps = [d for d, n in enumerate(shape) if n > 1]
    kept = sorted((d for d in steps if stride[d] != 0), key=lambda d: -stride[d])
    if writable and len(kept) != len(steps):
        return None
    if not kept:
        return View(tuple(shape), (), offset, (1,), (0,), (1,))
    grid, corner, size = [], [], []
    first = stride[kept[0]]
    rest = offset % first
    start = offset - rest
    before = first
    for place, d in enumerate(kept):
        step, count = stride[d], shape[d]
        if place == 0:
            grid.append(count)
            corner.append(0)
        else:
            if before % step or count * step > before:
                return None
            position = rest // step
            rest -= position * step
            if position + count > before // step:
                return None
            grid.append(before // step)
            corner.append(position)
        size.append(count)
        before = step
    grid.append(before)
    corner.append(rest)
    size.append(1)
    return View(tuple(shape), tuple(kept), start, tuple(grid), tuple(corner), tuple(size))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie side by side, each in one place, in any order of dimensions."""
    extent = 1
    for n, s in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n > 1),
                       key=lambda pair: pair[1]):  # fmt: skip
        if s != extent:
            return False
        extent *= n
    return True
