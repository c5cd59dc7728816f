"""Sorting and what follows from it. NaN counts as the largest, as in torch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.families.indexing import gather
from tpu_kernels.lowering.rules import lowers
from tpu_kernels.lowering.values import Array, axis_of, cast, full, iota, is_floating, torch_dtype


def sorted_with_places(x: Array, axis: int, *, descending: bool) -> tuple[Array, Array]:
    """A stable sort along an axis, and where each element came from."""
    dtype = torch_dtype(x)
    key = cast(x, torch.uint8) if dtype is torch.bool else x
    if is_floating(dtype):
        # -0.0 and 0.0 are equal to torch, and NaN has no sign.
        key = jnp.where(key == 0, jnp.zeros_like(key), key)
        key = jnp.where(key != key, jnp.full_like(key, jnp.nan), key)
    place = iota(torch.int64, x.shape, axis)
    operands = [key, x, place]
    if descending:
        # Reversing before and after keeps equal elements in their order.
        operands = [lax.rev(o, (axis,)) for o in operands]
    _, values, places = lax.sort(operands, dimension=axis, is_stable=True, num_keys=1)
    if descending:
        values, places = lax.rev(values, (axis,)), lax.rev(places, (axis,))
    return values, places


@lowers("sort")
def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, full((), 0, torch.int64)
    return sorted_with_places(x, axis_of(dim, x.ndim), descending=descending)


@lowers("sort.stable")
def sort_stable(
    x: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    found: tuple[Array, Array] = sort(x, dim, descending)
    return found


@lowers("argsort", "argsort.stable")
def argsort(x: Array, dim: int = -1, descending: bool = False, **_: Any) -> Array:
    return sort(x, dim, descending)[1]


@lowers("msort")
def msort(x: Array) -> Array:
    return sort(x, 0)[0]


@lowers("topk")
def topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    if not x.ndim:
        return x, full((), 0, torch.int64)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_with_places(x, axis, descending=largest)
    return lax.slice_in_dim(values, 0, k, 1, axis), lax.slice_in_dim(places, 0, k, 1, axis)


@lowers("kthvalue")
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, full((), 0, torch.int64)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_with_places(x, axis, descending=False)
    return tuple(lax.index_in_dim(a, k - 1, axis, keepdims=keepdim) for a in (values, places))  # type: ignore[return-value]


@lowers("median")
def median(x: Array) -> Array:
    return median_dim(lax.reshape(x, (x.size,)), 0)[0]


@lowers("median.dim")
def median_dim(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, full((), 0, torch.int64)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_with_places(x, axis, descending=False)
    middle = full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), (x.shape[axis] - 1) // 2, torch.int64)
    if is_floating(torch_dtype(x)):
        # With a NaN anywhere, the result is the first NaN.
        count = jnp.sum(values == values, axis=axis, keepdims=True)
        middle = jnp.where(count < x.shape[axis], cast(count, torch.int64), middle)
    found = gather(values, axis, middle), gather(places, axis, middle)
    if keepdim:
        return found
    return lax.squeeze(found[0], [axis]), lax.squeeze(found[1], [axis])


@lowers("searchsorted.Tensor")
def searchsorted(
    boundaries: Array,
    x: Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    if sorter is not None:
        boundaries = gather(boundaries, -1, sorter)
    right = right or side == "right"
    rows = boundaries if boundaries.ndim == 1 else boundaries[..., None, :]
    if boundaries.ndim == 1:
        before = rows <= x[..., None] if right else rows < x[..., None]
    else:
        before = rows <= x[..., :, None] if right else rows < x[..., :, None]
    if is_floating(torch_dtype(x)):
        nan = (x != x)[..., None]
        before = before | nan
    result = torch.int32 if out_int32 else torch.int64
    return cast(jnp.sum(before, axis=-1), result)


@lowers("bucketize.Tensor")
def bucketize(
    x: Array, boundaries: Array, *, out_int32: bool = False, right: bool = False
) -> Array:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@lowers("histc")
def histc(x: Array, bins: int = 100, min: float = 0, max: float = 0) -> Array:
    values = cast(x.reshape(-1), torch.float64 if x.dtype.itemsize > 2 else torch.float32)
    low, high = (jnp.asarray(edge, values.dtype) for edge in (min, max))
    if min == max and x.size:
        low, high = values.min(), values.max()
    single = low == high  # the bins lie around the one value
    low, high = jnp.where(single, low - 1, low), jnp.where(single, high + 1, high)
    place = jnp.floor((values - low) * bins / (high - low)).astype(jnp.int32)
    place = jnp.where(values == high, bins - 1, place)
    inside = (values >= low) & (values <= high)
    found = jnp.zeros(bins, jnp.int32).at[jnp.where(inside, place, bins)].add(1, mode="drop")
    return cast(found, torch_dtype(x))
