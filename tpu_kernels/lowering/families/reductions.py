"""Reductions and scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import (
    Array,
    axes_of,
    axis_of,
    cast,
    float_of,
    float_result,
    full,
    iota,
    is_floating,
    is_integral,
    opmath,
    torch_dtype,
)

Dims = int | Sequence[int] | None


def kept(reduced: Array, shape: Sequence[int], axes: Sequence[int], keepdim: bool) -> Array:
    """A reduction's result with the reduced dimensions as ones, if asked."""
    if not keepdim or not len(shape):
        return reduced
    return lax.reshape(reduced, [1 if i in axes else n for i, n in enumerate(shape)])


def reduce(
    x: Array, dims: Dims, keepdim: bool, fn: Callable[[Array, tuple[int, ...]], Array]
) -> Array:
    """Apply a reduction over dimensions as torch names them."""
    axes = axes_of(dims, x.ndim)
    return kept(fn(x, axes) if axes else x, x.shape, axes, keepdim)


def summed(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sum(x, axis=axes, dtype=x.dtype)


@lowers("sum", "sum.dim_IntList", "prims.sum")
def total(
    x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **_: Any
) -> Array:
    own = torch_dtype(x)
    result = dtype or (torch.int64 if is_integral(own) else own)
    wide = cast(x, opmath(result) if is_floating(result) else result)
    return cast(reduce(wide, dim, keepdim, summed), result)


@lowers("mean", "mean.dim")
def mean(
    x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    result = dtype or torch_dtype(x)
    wide = cast(x, opmath(result))
    axes = axes_of(dim, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    found = reduce(wide, dim, keepdim, summed)
    divisor = lax.full_like(found, count if count else math.nan)
    return cast(lax.div(found, divisor), result)


@lowers("prod", "prims.prod")
def product(x: Array, dims: Dims = None, *, dtype: torch.dtype | None = None) -> Array:
    own = torch_dtype(x)
    result = dtype or (torch.int64 if is_integral(own) else own)
    wide = cast(x, opmath(result) if is_floating(result) else result)
    return cast(
        reduce(wide, dims, False, lambda a, axes: jnp.prod(a, axis=axes, dtype=a.dtype)), result
    )


@lowers("prod.dim_int")
def product_dim(
    x: Array, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    found = product(x, [dim], dtype=dtype)
    return kept(found, x.shape, axes_of(dim, x.ndim), keepdim)


@lowers("nansum")
def nansum(
    x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Array:
    if is_floating(torch_dtype(x)):
        x = jnp.where(x != x, lax.full_like(x, 0), x)
    return total(x, dim, keepdim, dtype=dtype)


@lowers("any", "any.dim", "any.dims")
def any_of(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    # Of uint8, torch makes uint8.
    result = torch.uint8 if torch_dtype(x) is torch.uint8 else torch.bool
    found = reduce(cast(x, torch.bool), dim, keepdim, lambda a, axes: jnp.any(a, axis=axes))
    return cast(found, result)


@lowers("all", "all.dim", "all.dims")
def all_of(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    result = torch.uint8 if torch_dtype(x) is torch.uint8 else torch.bool
    found = reduce(cast(x, torch.bool), dim, keepdim, lambda a, axes: jnp.all(a, axis=axes))
    return cast(found, result)


@lowers("count_nonzero.dim_IntList", "count_nonzero")
def count_nonzero(x: Array, dim: Dims = None) -> Array:
    return total(cast(x, torch.bool), dim)


# ------------------------------------------------------------------ extrema
@lowers("amax", "prims.amax")
def amax(x: Array, dim: Dims = (), keepdim: bool = False, **_: Any) -> Array:
    return reduce(x, dim, keepdim, lambda a, axes: jnp.max(a, axis=axes))


@lowers("amin", "prims.amin")
def amin(x: Array, dim: Dims = (), keepdim: bool = False, **_: Any) -> Array:
    return reduce(x, dim, keepdim, lambda a, axes: jnp.min(a, axis=axes))


@lowers("aminmax")
def aminmax(x: Array, *, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@lowers("max")
def max_all(x: Array) -> Array:
    return amax(x)


@lowers("min")
def min_all(x: Array) -> Array:
    return amin(x)


def _arg(x: Array, dim: int | None, keepdim: bool, *, largest: bool) -> Array:
    pick = jnp.argmax if largest else jnp.argmin
    if torch_dtype(x) is torch.bool:
        x = cast(x, torch.uint8)
    if dim is None:
        found = pick(lax.reshape(x, (x.size,)), axis=0)
        axes = tuple(range(x.ndim))
    elif x.ndim == 0:
        return full((), 0, torch.int64)
    else:
        axis = axis_of(dim, x.ndim)
        found, axes = pick(x, axis=axis), (axis,)
    return cast(kept(found, x.shape, axes, keepdim), torch.int64)


@lowers("argmax")
def argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _arg(x, dim, keepdim, largest=True)


@lowers("argmin")
def argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _arg(x, dim, keepdim, largest=False)


@lowers("max.dim")
def max_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return amax(x, [dim], keepdim), argmax(x, dim, keepdim)


@lowers("min.dim")
def min_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return amin(x, [dim], keepdim), argmin(x, dim, keepdim)


# ------------------------------------------------------------------ moments and norms
def _variance(x: Array, dim: Dims, correction: float | None, keepdim: bool) -> tuple[Array, Array]:
    dtype = torch_dtype(x)
    if dtype.is_complex:
        raise Unlowered("the variance of complex numbers")
    wide = cast(x, opmath(dtype))
    axes = axes_of(dim, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    middle = jnp.mean(wide, axis=axes, keepdims=True)
    squares = jnp.sum(lax.square(wide - middle), axis=axes)
    divisor = count - (1 if correction is None else correction)
    found = squares / np.maximum(divisor, 0).astype(squares.dtype)
    average = lax.reshape(middle, found.shape)
    return (
        kept(found, x.shape, axes, keepdim),
        cast(kept(average, x.shape, axes, keepdim), dtype),
    )


@lowers("var.correction", "prims.var")
def var(
    x: Array, dim: Dims = None, *args: Any, correction: float | None = None, keepdim: bool = False,
    **_: Any,
) -> Array:  # fmt: skip
    found, _mean = _variance(x, dim, args[0] if args else correction, keepdim)
    return cast(found, torch_dtype(x))


@lowers("std.correction")
def std(
    x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Array:
    return cast(lax.sqrt(_variance(x, dim, correction, keepdim)[0]), torch_dtype(x))


@lowers("var_mean.correction")
def var_mean(
    x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    found, average = _variance(x, dim, correction, keepdim)
    return cast(found, torch_dtype(x)), average


@lowers("std_mean.correction")
def std_mean(
    x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    found, average = _variance(x, dim, correction, keepdim)
    return cast(lax.sqrt(found), torch_dtype(x)), average


@lowers("linalg_vector_norm")
def vector_norm(
    x: Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Array:  # fmt: skip
    wanted = dtype or torch_dtype(x)
    result = float_of(wanted)
    size = lax.abs(cast(x, opmath(wanted)))

    def fn(a: Array, axes: tuple[int, ...]) -> Array:
        if ord == math.inf:
            return jnp.max(a, axis=axes)
        if ord == -math.inf:
            return jnp.min(a, axis=axes)
        if ord == 0:
            return jnp.sum((a != 0).astype(a.dtype), axis=axes)
        if ord == 1:
            return jnp.sum(a, axis=axes)
        if ord == 2:
            return lax.sqrt(jnp.sum(lax.square(a), axis=axes))
        power = jnp.sum(lax.pow(a, lax.full_like(a, ord)), axis=axes)
        return lax.pow(power, lax.full_like(power, 1.0 / ord))

    axes = axes_of(dim, x.ndim)
    return cast(kept(fn(size, axes), x.shape, axes, keepdim), result)


@lowers("logsumexp")
def logsumexp(x: Array, dim: Dims, keepdim: bool = False) -> Array:
    dtype = float_result(torch_dtype(x))
    wide = cast(x, opmath(dtype))
    if dtype.is_complex:
        raise Unlowered("logsumexp of complex numbers")
    axes = axes_of(dim, x.ndim)
    largest = jnp.max(wide, axis=axes, keepdims=True)
    largest = lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    found = lax.log(jnp.sum(lax.exp(wide - largest), axis=axes))
    found = found + lax.reshape(largest, found.shape)
    return cast(kept(found, x.shape, axes, keepdim), dtype)


# ------------------------------------------------------------------ scans
@lowers("cumsum")
def cumsum(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    own = torch_dtype(x)
    result = dtype or (torch.int64 if is_integral(own) else own)
    wide = cast(x, opmath(result) if is_floating(result) else result)
    return cast(lax.cumsum(wide, axis_of(dim, x.ndim)) if x.ndim else wide, result)


@lowers("cumprod")
def cumprod(x: Array, dim: int, *, dtype: torch.dtype | None = None) -> Array:
    own = torch_dtype(x)
    result = dtype or (torch.int64 if is_integral(own) else own)
    wide = cast(x, opmath(result) if is_floating(result) else result)
    return cast(lax.cumprod(wide, axis_of(dim, x.ndim)) if x.ndim else wide, result)


@lowers("logcumsumexp")
def logcumsumexp(x: Array, dim: int) -> Array:
    dtype = torch_dtype(x)
    if dtype.is_complex:
        raise Unlowered("logcumsumexp of complex numbers")
    if not x.ndim:
        return x
    return cast(lax.cumlogsumexp(cast(x, opmath(dtype)), axis_of(dim, x.ndim)), dtype)


def _running(x: Array, dim: int, *, largest: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, full((), 0, torch.int64)
    axis = axis_of(dim, x.ndim)
    position = iota(torch.int64, x.shape, axis)

    def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (x1, i1), (x2, i2) = a, b
        wins = (x2 >= x1) if largest else (x2 <= x1)
        if is_floating(torch_dtype(x)):
            wins = wins | (x2 != x2)
            wins = wins & ((x1 == x1) | (x2 != x2))
        return jnp.where(wins, x2, x1), jnp.where(wins, i2, i1)

    found = lax.associative_scan(later, (x, position), axis=axis)
    return found[0], found[1]


@lowers("cummax")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, largest=True)


@lowers("cummin")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, largest=False)


@lowers("_cdist_forward")
def cdist(x: Array, y: Array, p: float, compute_mode: int | None = None) -> Array:
    difference = lax.expand_dims(x, [x.ndim - 1]) - lax.expand_dims(y, [y.ndim - 2])
    return vector_norm(difference, p, [-1])


@lowers("trace")
def trace(x: Array) -> Array:
    return total(jnp.diagonal(x))


@lowers("sum_to_size")
def sum_to_size(x: Array, size: Sequence[int]) -> Array:
    missing = x.ndim - len(size)
    axes = [i for i in range(x.ndim) if i < missing or (size[i - missing] == 1 and x.shape[i] != 1)]
    return lax.reshape(total(x, axes) if axes else x, tuple(size))
