"""Interpolation to another size: every kind but `nearest` is a small matrix per dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import Array, cast, is_integral, torch_dtype

_CUBIC = -0.75


def _ratio(size: int, output: int, scale: float | None, align: bool) -> np.float32:
    """Input steps for an output step, in float32 as torch computes it."""
    if align:
        return np.float32((size - 1) / (output - 1)) if output > 1 else np.float32(0)
    if scale is not None and scale > 0:
        return np.float32(1.0 / scale)
    return np.float32(size) / np.float32(output)


def _centres(size: int, output: int, scale: float | None, align: bool) -> np.ndarray[Any, Any]:
    ratio, place = _ratio(size, output, scale, align), np.arange(output, dtype=np.float32)
    return ratio * place if align else ratio * (place + np.float32(0.5)) - np.float32(0.5)


def linear_matrix(size: int, output: int, scale: float | None, align: bool) -> np.ndarray[Any, Any]:
    """``[output, input]`` weights of linear interpolation."""
    centre = np.maximum(_centres(size, output, scale, align), 0)
    low = np.minimum(centre.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    weight = np.clip(centre - low, 0, 1)
    found = np.zeros((output, size))
    rows = np.arange(output)
    np.add.at(found, (rows, low), 1 - weight)
    np.add.at(found, (rows, high), weight)
    return found


def cubic_matrix(size: int, output: int, scale: float | None, align: bool) -> np.ndarray[Any, Any]:
    """``[output, input]`` weights of cubic interpolation."""
    centre = _centres(size, output, scale, align).astype(np.float64)
    low = np.floor(centre).astype(np.int64)
    part = centre - low
    found = np.zeros((output, size))
    rows = np.arange(output)
    for offset in range(-1, 3):
        distance = np.abs(part - offset)
        near = (_CUBIC + 2) * distance**3 - (_CUBIC + 3) * distance**2 + 1
        far = _CUBIC * (distance**3 - 5 * distance**2 + 8 * distance - 4)
        np.add.at(
            found,
            (rows, np.clip(low + offset, 0, size - 1)),
            np.where(distance <= 1, near, far),
        )
    return found


def _nearest_index(
    size: int, output: int, scale: float | None, exact: bool
) -> np.ndarray[Any, Any]:
    ratio, place = _ratio(size, output, scale, False), np.arange(output, dtype=np.float32)
    found = np.floor(ratio * (place + np.float32(0.5)) if exact else ratio * place)
    index: np.ndarray[Any, Any] = np.minimum(found.astype(np.int64), size - 1)
    return index


Resize = Callable[[Array, Sequence[int], Sequence[float | None]], Array]


def _nearest(dims: int, *, exact: bool) -> Resize:
    def resize(x: Array, output: Sequence[int], scales: Sequence[float | None]) -> Array:
        for i, (n, scale) in enumerate(zip(output, scales, strict=True)):
            axis = x.ndim - dims + i
            x = jnp.take(x, _nearest_index(x.shape[axis], n, scale, exact), axis=axis)
        return x

    return resize


def _matrices(dims: int, matrix: Callable[..., np.ndarray[Any, Any]], align: bool) -> Resize:
    def resize(x: Array, output: Sequence[int], scales: Sequence[float | None]) -> Array:
        dtype = torch_dtype(x)
        if is_integral(dtype):
            raise Unlowered("an interpolation of integers")
        wide = cast(x, torch.float32) if dtype.itemsize < 4 else x
        for i, (n, scale) in enumerate(zip(output, scales, strict=True)):
            axis = x.ndim - dims + i
            weights = jnp.asarray(matrix(x.shape[axis], n, scale, align), wide.dtype)
            product = lax.dot_general(
                wide, weights, (((axis,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
            )
            wide = jnp.moveaxis(product, -1, axis)
        return cast(wide, dtype)

    return resize


def _backward(resize: Resize, grad: Array, size: Sequence[int], scales: Sequence[Any]) -> Array:
    dims, dtype = len(scales), torch_dtype(grad)
    like = jax.ShapeDtypeStruct(tuple(size), grad.dtype)
    if dtype.itemsize < 4:
        like = jax.ShapeDtypeStruct(tuple(size), jnp.float32)
        grad = cast(grad, torch.float32)
    output = grad.shape[grad.ndim - dims :]
    transpose = jax.linear_transpose(lambda x: resize(x, output, scales), like)
    return cast(transpose(grad)[0], dtype)


def _padded(scales: Sequence[Any], dims: int) -> list[Any]:
    return [*scales, *[None] * (dims - len(scales))]


def _enter_nearest(name: str, dims: int, *, exact: bool) -> None:
    resize = _nearest(dims, exact=exact)

    @lowers(name)
    def forward(x: Array, output_size: Sequence[int], *scales: float | None) -> Array:
        return resize(x, output_size, _padded(scales, dims))

    @lowers(f"{name}.vec")
    def vector(x: Array, output_size: Any, scale_factors: Any) -> Array:
        return resize(x, *_sizes(x, output_size, scale_factors, dims))

    @lowers(f"{name}_backward")
    def backward(
        grad: Array, output_size: Any, input_size: Sequence[int], *scales: float | None
    ) -> Array:
        return _backward(resize, grad, input_size, _padded(scales, dims))


def _enter_matrix(name: str, dims: int, matrix: Callable[..., np.ndarray[Any, Any]]) -> None:
    @lowers(name)
    def forward(x: Array, output_size: Sequence[int], align: bool, *scales: float | None) -> Array:
        return _matrices(dims, matrix, align)(x, output_size, _padded(scales, dims))

    @lowers(f"{name}.vec")
    def vector(x: Array, output_size: Any, align: bool, scale_factors: Any) -> Array:
        return _matrices(dims, matrix, align)(x, *_sizes(x, output_size, scale_factors, dims))

    @lowers(f"{name}_backward")
    def backward(
        grad: Array, output_size: Any, size: Sequence[int], align: bool, *scales: float | None
    ) -> Array:
        resize = _matrices(dims, matrix, align)
        return _backward(resize, grad, size, _padded(scales, dims))


def _sizes(
    x: Array, output_size: Any, scale_factors: Any, dims: int
) -> tuple[list[int], list[float | None]]:
    if output_size is not None:
        return list(output_size), [None] * dims
    spatial = x.shape[x.ndim - dims :]
    sizes = [math.floor(n * s) for n, s in zip(spatial, scale_factors, strict=True)]
    return sizes, list(scale_factors)


for _dims in (1, 2, 3):
    _enter_nearest(f"upsample_nearest{_dims}d", _dims, exact=False)
    _enter_nearest(f"_upsample_nearest_exact{_dims}d", _dims, exact=True)
_enter_matrix("upsample_linear1d", 1, linear_matrix)
_enter_matrix("upsample_bilinear2d", 2, linear_matrix)
_enter_matrix("upsample_trilinear3d", 3, linear_matrix)
_enter_matrix("upsample_bicubic2d", 2, cubic_matrix)
