"""Reading by index: embedding, gather, index. Indices out of range are not caught: they read the
nearest element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import Array, axis_of, broadcast, cast, full, torch_dtype


def positive(index: Array, size: int) -> Array:
    """Indices from the front: torch counts negative ones from the end."""
    return lax.select(lax.lt(index, lax.full_like(index, 0)), index + size, index)


def take(x: Array, index: Array, axis: int) -> Array:
    """The slices of an array at indices that lie in its range."""
    if x.shape[axis] == 0 or x.ndim == 0:
        return jnp.take(jnp.reshape(x, (-1,)) if x.ndim == 0 else x, index, axis=axis)
    return jnp.take(x, index, axis=axis, mode="clip")


@lowers("embedding")
def embedding(
    weight: Array,
    index: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    return take(weight, index, 0)


@lowers("embedding_dense_backward")
def embedding_dense_backward(
    grad: Array, index: Array, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    dtype = torch_dtype(grad)
    width = grad.shape[index.ndim :]
    flat_index = lax.reshape(index, (index.size,))
    flat = lax.reshape(grad, (index.size, *width))
    if scale_grad_by_freq:
        counts = jnp.zeros((rows,), flat.dtype).at[flat_index].add(1)
        flat = flat / jnp.take(counts, flat_index)[(...,) + (None,) * len(width)]
    if padding_idx >= 0:
        real = (flat_index != padding_idx)[(...,) + (None,) * len(width)]
        flat = jnp.where(real, flat, lax.full_like(flat, 0))
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    zeros = full((rows, *width), 0, wide)
    return cast(zeros.at[flat_index].add(cast(flat, wide), mode="drop"), dtype)


@lowers("index_select")
def index_select(x: Array, dim: int, index: Array) -> Array:
    if not x.ndim:
        return x
    return take(x, jnp.reshape(index, (-1,)), axis_of(dim, x.ndim))


@lowers("gather")
def gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    if not x.ndim or not index.ndim:
        scalar = jnp.reshape(x, (-1,))
        return lax.reshape(take(scalar, jnp.reshape(index, (-1,)), 0), index.shape)
    if index.size == 0:
        return full(index.shape, 0, torch_dtype(x))
    return x[tuple(along(x.shape, axis_of(dim, x.ndim), index))]


def along(shape: Sequence[int], axis: int, index: Array) -> list[Array]:
    """Indices for every axis that take, along one axis, what `index` says, as `gather` does."""
    found = []
    for i in range(index.ndim):
        if i == axis:
            found.append(positive(index, shape[axis]))
        else:
            found.append(lax.broadcasted_iota(index.dtype, index.shape, i))
    return found


@lowers("take")
def take_flat(x: Array, index: Array) -> Array:
    return take(lax.reshape(x, (x.size,)), positive(index, x.size), 0)


@lowers("take_along_dim")
def take_along_dim(x: Array, index: Array, dim: int | None = None) -> Array:
    if dim is None:
        return gather(lax.reshape(x, (x.size,)), 0, lax.reshape(index, (index.size,)))
    axis = axis_of(dim, x.ndim)
    shape = list(np.broadcast_shapes(
        tuple(1 if i == axis else n for i, n in enumerate(x.shape)),
        tuple(1 if i == axis else n for i, n in enumerate(index.shape)),
    ))  # fmt: skip
    x = jnp.broadcast_to(x, (*shape[:axis], x.shape[axis], *shape[axis + 1 :]))
    index = jnp.broadcast_to(index, (*shape[:axis], index.shape[axis], *shape[axis + 1 :]))
    return gather(x, axis, index)


def indices_of(x: Array, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    """The indices of `index` and `index_put` as JAX takes them; a mask has no fixed size.

    Raises:
        Unlowered: One of them is a mask.
    """
    found: list[Any] = []
    for axis, index in enumerate(indices):
        if index is None:
            found.append(slice(None))
        elif torch_dtype(index) in (torch.bool, torch.uint8):
            raise Unlowered("an index that is a mask: its size depends on values")
        else:
            found.append(positive(index, x.shape[axis]) if x.shape[axis] else index)
    return tuple(found)


def _adjacent(indices: Sequence[Any]) -> bool:
    places = [i for i, index in enumerate(indices) if not isinstance(index, slice)]
    return not places or places[-1] - places[0] + 1 == len(places)


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(x: Array, indices: Sequence[Array | None]) -> Array:
    places = indices_of(x, indices)
    arrays = [p for p in places if not isinstance(p, slice)]
    if not arrays:
        return x
    if not _adjacent(places):
        # NumPy and torch both put the indexed dimensions first then.
        return x[places]
    return x.at[places].get(mode="clip") if x.size else x[places]


@lowers("_unsafe_masked_index")
def unsafe_masked_index(x: Array, mask: Array, indices: Sequence[Array | None], fill: Any) -> Array:
    clamped = [
        None if i is None else jnp.clip(i, -x.shape[axis], x.shape[axis] - 1)
        for axis, i in enumerate(indices)
    ]
    found = index(x, clamped)
    found, mask = broadcast(found, mask)
    return lax.select(mask, found, full(found.shape, fill, torch_dtype(x)))


@lowers("one_hot")
def one_hot(x: Array, num_classes: int = -1) -> Array:
    if num_classes < 0:
        raise Unlowered("one_hot without a number of classes: its size depends on values")
    classes = lax.broadcasted_iota(x.dtype, (*x.shape, num_classes), x.ndim)
    return cast(lax.expand_dims(x, [x.ndim]) == classes, torch.int64)
