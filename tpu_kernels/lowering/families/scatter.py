"""Writing by index: scatter, index_put, index_add, masked_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.families.indexing import along, indices_of, positive
from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import (
    Array,
    axis_of,
    broadcast,
    cast,
    expand,
    full,
    is_array,
    is_floating,
    is_integral,
    torch_dtype,
)


def _places(x: Array, dim: int, index: Array) -> tuple[Array, Array, tuple[Any, ...]]:
    if not x.ndim or not index.ndim:
        x = jnp.reshape(x, (-1,)) if not x.ndim else x
        index = jnp.reshape(index, (-1,)) if not index.ndim else index
    return x, index, tuple(along(x.shape, axis_of(dim, x.ndim), index))


def _part(source: Array, index: Array) -> Array:
    """The elements of the source that an index covers."""
    source = jnp.reshape(source, (-1,)) if not source.ndim else source
    return source[tuple(slice(0, n) for n in index.shape)]


def _scattered(x: Array, dim: int, index: Array, source: Any, how: str) -> Array:
    if index.size == 0:
        return x
    dtype, shape = torch_dtype(x), x.shape
    x, index, places = _places(x, dim, index)
    values = _part(source, index) if is_array(source) and source.ndim else source
    if not is_array(values) or values.shape != index.shape:
        values = full(index.shape, values, dtype)
    # Sums in half precision would round at every step.
    wide = torch.float32 if how == "add" and is_floating(dtype) and dtype.itemsize < 4 else dtype
    target = cast(x, wide).at[places]
    found = getattr(target, how)(cast(values, wide))
    return lax.reshape(cast(found, dtype), shape)


@lowers("scatter.src", "scatter.value")
def scatter(x: Array, dim: int, index: Array, src: Any) -> Array:
    return _scattered(x, dim, index, src, "set")


@lowers("scatter_add")
def scatter_add(x: Array, dim: int, index: Array, src: Array) -> Array:
    if torch_dtype(x) is torch.bool:
        return _scattered(x, dim, index, src, "max")
    return _scattered(x, dim, index, src, "add")


@lowers("scatter.reduce", "scatter.value_reduce")
def scatter_reduce_old(x: Array, dim: int, index: Array, src: Any, *, reduce: str) -> Array:
    return _scattered(x, dim, index, src, {"add": "add", "multiply": "multiply"}[reduce])


@lowers("scatter_reduce.two")
def scatter_reduce(
    x: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True
) -> Array:
    hows = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}
    how = hows[reduce]
    if not include_self and index.size:
        x = _scattered(x, dim, index, _neutral(torch_dtype(x), how), "set")
    found = _scattered(x, dim, index, src, how)
    if reduce == "mean" and index.size:
        dtype = torch_dtype(x)
        ones = full(index.shape, 1, dtype)
        start = full(x.shape, 1 if include_self else 0, dtype)
        counts = jnp.maximum(_scattered(start, dim, index, ones, "add"), 1)
        found = jnp.floor_divide(found, counts) if is_integral(dtype) else found / counts
    return found


def _neutral(dtype: torch.dtype, how: str) -> Any:
    if how in ("add", "multiply"):
        return 0 if how == "add" else 1
    if dtype is torch.bool:
        return how == "min"
    if is_floating(dtype):
        return float("-inf") if how == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if how == "max" else limits.max


@lowers("index_put", "_unsafe_index_put")
def index_put(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False
) -> Array:
    dtype = torch_dtype(x)
    masks = [i for i in indices if i is not None and torch_dtype(i) is torch.bool]
    if masks:
        return _masked_put(x, indices, values, accumulate)
    places = indices_of(x, indices)
    if all(isinstance(p, slice) for p in places):
        source = expand(cast(values, dtype), x.shape)
        return x + source if accumulate else source
    if accumulate:
        wide = torch.float32 if is_floating(dtype) and dtype.itemsize < 4 else dtype
        if dtype is torch.bool:
            return x.at[places].max(cast(values, dtype))
        return cast(cast(x, wide).at[places].add(cast(values, wide)), dtype)
    return x.at[places].set(cast(values, dtype))


def _masked_put(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool
) -> Array:
    """One mask and one value: a choice. Anything else has sizes that depend on values."""
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or values.size != 1:
        raise Unlowered("an index that is a mask: its size depends on values")
    axis, mask = given[0]
    mask = lax.reshape(mask, (*(1,) * axis, *mask.shape, *(1,) * (x.ndim - axis - mask.ndim)))
    value = expand(cast(jnp.reshape(values, ()), torch_dtype(x)), x.shape)
    return lax.select(expand(mask, x.shape), x + value if accumulate else value, x)


@lowers("_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put(
    x: Array, mask: Array, indices: Sequence[Array | None], values: Array
) -> Array:
    clamped = [
        None if i is None else jnp.clip(i, -x.shape[axis], x.shape[axis] - 1)
        for axis, i in enumerate(indices)
    ]
    values, mask = broadcast(values, mask)
    kept = lax.select(mask, values, lax.full_like(values, 0))
    return index_put(x, clamped, kept, accumulate=True)


def _rows(x: Array, dim: int, index: Array) -> tuple[Array, tuple[Any, ...]]:
    x = jnp.reshape(x, (-1,)) if not x.ndim else x
    axis = axis_of(dim, x.ndim)
    index = positive(jnp.reshape(index, (-1,)), x.shape[axis])
    return x, (*(slice(None),) * axis, index)


@lowers("index_add")
def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    dtype, shape = torch_dtype(x), x.shape
    x, places = _rows(x, dim, index)
    source = jnp.reshape(source, (-1,)) if not source.ndim else source
    if alpha != 1:
        source = source * cast(alpha, dtype)
    wide = torch.float32 if is_floating(dtype) and dtype.itemsize < 4 else dtype
    if dtype is torch.bool:
        return lax.reshape(x.at[places].max(source), shape)
    return lax.reshape(cast(cast(x, wide).at[places].add(cast(source, wide)), dtype), shape)


@lowers("index_copy")
def index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    shape = x.shape
    x, places = _rows(x, dim, index)
    source = jnp.reshape(source, (-1,)) if not source.ndim else source
    return lax.reshape(x.at[places].set(source), shape)


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(x: Array, dim: int, index: Array, value: Any) -> Array:
    shape, value = x.shape, cast(value, torch_dtype(x))
    x, places = _rows(x, dim, index)
    return lax.reshape(x.at[places].set(value), shape)


@lowers("put")
def put(x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    flat = lax.reshape(x, (x.size,))
    at = flat.at[positive(lax.reshape(index, (index.size,)), x.size)]
    values = lax.reshape(source, (source.size,))
    return lax.reshape(at.add(values) if accumulate else at.set(values), x.shape)


@lowers("masked_scatter")
def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    x, mask = broadcast(x, mask)
    flat = lax.reshape(mask, (mask.size,))
    if not source.size:
        return x
    position = jnp.maximum(jnp.cumsum(flat.astype(jnp.int32)) - 1, 0)
    values = jnp.take(lax.reshape(source, (source.size,)), position, mode="clip")
    return lax.select(mask, lax.reshape(values, x.shape), x)
