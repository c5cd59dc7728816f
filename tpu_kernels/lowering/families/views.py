"""What torch calls views, and what rearranges elements. Programs have values, no memory: a view is
computed, and one that is written through is a scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import (
    Array,
    axis_of,
    cast,
    expand,
    full,
    iota,
    jax_dtype,
    result_type,
    torch_dtype,
)


def resolved(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """A shape whose -1 is filled in."""
    if -1 not in shape:
        return tuple(shape)
    known = -math.prod(shape)
    return tuple(size // known if n == -1 else n for n in shape)


@lowers(
    "view",
    "view_copy",
    "_unsafe_view",
    "reshape",
    "_reshape_copy",
    "prims.reshape",
)
def view(x: Array, size: Sequence[int]) -> Array:
    return lax.reshape(x, resolved(size, x.size))


@lowers("_reshape_alias", "_reshape_alias_copy")
def reshape_alias(x: Array, size: Sequence[int], stride: Sequence[int]) -> Array:
    return lax.reshape(x, tuple(size))


@lowers("view.dtype", "view_copy.dtype", "prims.view_of_dtype")
def view_dtype(x: Array, dtype: torch.dtype) -> Array:
    wanted = jax_dtype(dtype)
    before, after = x.dtype.itemsize, wanted.itemsize
    if dtype is torch.bool or x.dtype == np.bool_:
        if wanted == x.dtype:
            return x
        raise Unlowered("a view of bool as another dtype")
    if after > before:
        ratio = after // before
        x = lax.reshape(x, (*x.shape[:-1], x.shape[-1] // ratio, ratio))
    found = lax.bitcast_convert_type(x, wanted)
    if after < before:
        found = lax.reshape(found, (*x.shape[:-1], x.shape[-1] * (before // after)))
    return found


@lowers("expand", "expand_copy")
def expand_to(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    missing = len(size) - x.ndim
    return expand(x, [x.shape[i - missing] if n == -1 else n for i, n in enumerate(size)])


@lowers("prims.broadcast_in_dim")
def broadcast_in_dim(x: Array, shape: Sequence[int], dimensions: Sequence[int]) -> Array:
    return lax.broadcast_in_dim(x, tuple(shape), tuple(dimensions))


@lowers("permute", "permute_copy", "prims.transpose")
def permute(x: Array, dims: Sequence[int]) -> Array:
    return lax.transpose(x, [axis_of(d, x.ndim) for d in dims])


@lowers("transpose.int", "transpose_copy.int", "swapaxes", "swapdims")
def transpose(x: Array, dim0: int, dim1: int) -> Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers("t", "t_copy", "numpy_T", "mT")
def t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x


@lowers("unsqueeze", "unsqueeze_copy")
def unsqueeze(x: Array, dim: int) -> Array:
    return lax.expand_dims(x, [dim % (x.ndim + 1)])


def _squeezed(x: Array, dims: Sequence[int]) -> Array:
    ones = {axis_of(d, x.ndim) for d in dims}
    return lax.reshape(x, [n for i, n in enumerate(x.shape) if not (i in ones and n == 1)])


@lowers("squeeze", "squeeze_copy")
def squeeze(x: Array) -> Array:
    return _squeezed(x, range(x.ndim))


@lowers("squeeze.dim", "squeeze_copy.dim")
def squeeze_dim(x: Array, dim: int) -> Array:
    return _squeezed(x, [dim])


@lowers("squeeze.dims", "squeeze_copy.dims", "prims.squeeze")
def squeeze_dims(x: Array, dims: Sequence[int]) -> Array:
    return _squeezed(x, dims)


@lowers("prims.collapse_view", "prims.collapse")
def collapse(x: Array, start: int, end: int) -> Array:
    merged = math.prod(x.shape[start : end + 1])
    return lax.reshape(x, (*x.shape[:start], merged, *x.shape[end + 1 :]))


@lowers("prims.split_dim")
def split_dim(x: Array, dim: int, outer: int) -> Array:
    shape = (*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])
    return lax.reshape(x, shape)


@lowers("unflatten.int")
def unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    axis = axis_of(dim, x.ndim)
    return lax.reshape(x, (*x.shape[:axis], *resolved(sizes, x.shape[axis]), *x.shape[axis + 1 :]))


# ------------------------------------------------------------------ parts
def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """A slice's ends as torch reads them: clamped, and never crossing."""
    start = 0 if start is None else start
    end = size if end is None else end
    start = max(start + size, 0) if start < 0 else min(start, size)
    end = max(end + size, 0) if end < 0 else min(end, size)
    return start, max(start, end)


@lowers("slice.Tensor", "slice_copy.Tensor")
def slice_of(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    axis = axis_of(dim, x.ndim)
    first, last = bounds(x.shape[axis], start, end)
    return lax.slice_in_dim(x, first, last, step, axis)


@lowers("select.int", "select_copy.int")
def select(x: Array, dim: int, index: int) -> Array:
    axis = axis_of(dim, x.ndim)
    return lax.index_in_dim(x, index % x.shape[axis], axis, keepdims=False)


@lowers("narrow", "narrow_copy")
def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    axis = axis_of(dim, x.ndim)
    start = start % x.shape[axis] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, 1, axis)


@lowers("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
def split_with_sizes(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    axis, start, parts = axis_of(dim, x.ndim), 0, []
    for size in sizes:
        parts.append(lax.slice_in_dim(x, start, start + size, 1, axis))
        start += size
    return parts


@lowers("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
def split(x: Array, size: int, dim: int = 0) -> list[Array]:
    whole = x.shape[axis_of(dim, x.ndim)]
    if whole == 0:
        return [x]
    sizes = [min(size, whole - at) for at in range(0, whole, size)]
    parts: list[Array] = split_with_sizes(x, sizes, dim)
    return parts


@lowers("chunk", "unsafe_chunk")
def chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    whole = x.shape[axis_of(dim, x.ndim)]
    parts: list[Array] = split(x, max(1, -(-whole // chunks)), dim)
    return parts


@lowers("unbind.int", "unbind_copy.int")
def unbind(x: Array, dim: int = 0) -> list[Array]:
    axis = axis_of(dim, x.ndim)
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


@lowers("diagonal", "diagonal_copy")
def diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("unfold", "unfold_copy")
def unfold(x: Array, dim: int, size: int, step: int) -> Array:
    if x.ndim == 0:
        return lax.reshape(x, (1,))[:size]
    axis = axis_of(dim, x.ndim)
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    index = starts[:, None] + np.arange(size)
    return jnp.moveaxis(jnp.take(x, index, axis=axis), axis + 1, -1)


@lowers("as_strided", "as_strided_copy")
def as_strided(
    x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    # Only of row-major tensors can the elements be found by what a program knows of them.
    index = np.asarray(storage_offset or 0)
    for n, step in zip(size, stride, strict=True):
        index = index[..., None] + np.arange(n) * step
    if index.size and int(index.max()) >= x.size:
        raise Unlowered("as_strided reaches beyond the tensor")
    return jnp.take(lax.reshape(x, (x.size,)), index, axis=0)


# ------------------------------------------------------------------ writing to a part
@lowers("slice_scatter")
def slice_scatter(
    x: Array,
    source: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    axis = axis_of(dim, x.ndim)
    first, last = bounds(x.shape[axis], start, end)
    source = cast(source, torch_dtype(x))
    if step == 1:
        shape = (*x.shape[:axis], last - first, *x.shape[axis + 1 :])
        return lax.dynamic_update_slice_in_dim(x, expand(source, shape), first, axis)
    index = (slice(None),) * axis + (slice(first, last, step),)
    return x.at[index].set(source)


@lowers("select_scatter")
def select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    axis = axis_of(dim, x.ndim)
    part = lax.expand_dims(cast(source, torch_dtype(x)), [axis])
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return lax.dynamic_update_slice_in_dim(x, expand(part, shape), index % x.shape[axis], axis)


@lowers("diagonal_scatter")
def diagonal_scatter(
    x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    size = min(moved.shape[-2] + min(offset, 0), moved.shape[-1] - max(offset, 0))
    rows = np.arange(max(0, size))
    index = (..., rows + max(-offset, 0), rows + max(offset, 0))
    moved = moved.at[index].set(cast(source, torch_dtype(x)))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@lowers("slice_backward")
def slice_backward(
    grad: Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Array:
    axis = axis_of(dim, len(sizes))
    first, _ = bounds(sizes[axis], start, end)
    zero = lax.full((), 0, grad.dtype)
    covered = (grad.shape[axis] - 1) * step + 1 if grad.shape[axis] else 0
    config = [(0, 0, 0)] * len(sizes)
    config[axis] = (first, sizes[axis] - first - covered, step - 1)
    return lax.pad(grad, zero, config)


@lowers("select_backward")
def select_backward(grad: Array, sizes: Sequence[int], dim: int, index: int) -> Array:
    axis = axis_of(dim, len(sizes))
    config = [(0, 0, 0)] * len(sizes)
    index = index % sizes[axis]
    config[axis] = (index, sizes[axis] - index - 1, 0)
    return lax.pad(lax.expand_dims(grad, [axis]), lax.full((), 0, grad.dtype), config)


# ------------------------------------------------------------------ joining and repeating
@lowers("cat", "concat", "prims.cat")
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    dtype = result_type(*tensors)
    # torch skips empty vectors, whatever the shape of the others.
    kept = [x for x in tensors if x.shape != (0,)] or [tensors[0]]
    axis = axis_of(dim, kept[0].ndim)
    return lax.concatenate([cast(x, dtype) for x in kept], axis)


@lowers("stack")
def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    dtype = result_type(*tensors)
    axis = dim % (tensors[0].ndim + 1)
    return lax.concatenate([lax.expand_dims(cast(x, dtype), [axis]) for x in tensors], axis)


@lowers("repeat")
def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(lax.reshape(x, (1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@lowers("tile")
def tile(x: Array, dims: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(dims))


@lowers("repeat_interleave.self_int")
def repeat_interleave(
    x: Array, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Array:
    if dim is None:
        x, dim = lax.reshape(x, (x.size,)), 0
    return jnp.repeat(x, repeats, axis=axis_of(dim, x.ndim))


@lowers("flip", "prims.rev")
def flip(x: Array, dims: Sequence[int]) -> Array:
    return lax.rev(x, [axis_of(d, x.ndim) for d in dims]) if x.ndim else x


@lowers("roll")
def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    if not dims:
        return lax.reshape(jnp.roll(lax.reshape(x, (x.size,)), shifts[0]), x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@lowers("rot90")
def rot90(x: Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> Array:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@lowers("constant_pad_nd")
def constant_pad_nd(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, cast(value, torch_dtype(x)), config)


def _triangle(x: Array, offset: int, *, lower: bool) -> Array:
    row, column = (iota(torch.int32, x.shape[-2:], axis) for axis in (0, 1))
    kept = column <= row + offset if lower else column >= row + offset
    return lax.select(expand(kept, x.shape), x, full(x.shape, 0, torch_dtype(x)))


@lowers("tril")
def tril(x: Array, diagonal: int = 0) -> Array:
    return _triangle(x, diagonal, lower=True)


@lowers("triu")
def triu(x: Array, diagonal: int = 0) -> Array:
    return _triangle(x, diagonal, lower=False)


@lowers("diag_embed")
def diag_embed(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    size, ndim = x.shape[-1] + abs(offset), x.ndim + 1
    base = full((*x.shape[:-1], size, size), 0, torch_dtype(x))
    rows = np.arange(x.shape[-1])
    base = base.at[..., rows + max(-offset, 0), rows + max(offset, 0)].set(x)
    return jnp.moveaxis(base, (-2, -1), (axis_of(dim1, ndim), axis_of(dim2, ndim)))
