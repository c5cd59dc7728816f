"""Pooling: windows over the last dimensions."""

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
from tpu_kernels.lowering.values import Array, cast, full, is_integral, torch_dtype


def _per_dimension(values: Sequence[int] | int | None, dims: int, default: Any) -> list[int]:
    if values is None or (not isinstance(values, int) and len(values) == 0):
        return list(default)
    if isinstance(values, int):
        return [values] * dims
    return list(values) * dims if len(values) == 1 else list(values)


def _output_size(
    size: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool
) -> int:
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    found = (-(-reach // stride) if ceil_mode else reach // stride) + 1
    # A window must begin inside the input or its left padding.
    return found - 1 if ceil_mode and (found - 1) * stride >= size + pad else found


class Window:
    """The windows of a pooling over the last `dims` dimensions of an input."""

    def __init__(
        self,
        shape: Sequence[int],
        kernel: Sequence[int],
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        dims: int,
    ) -> None:
        self.dims = dims
        self.kernel = _per_dimension(kernel, dims, ())
        self.stride = _per_dimension(stride, dims, self.kernel)
        self.padding = _per_dimension(padding, dims, [0] * dims)
        self.dilation = _per_dimension(dilation, dims, [1] * dims)
        self.size = list(shape[len(shape) - dims :])
        self.output = [
            _output_size(*each, ceil_mode)
            for each in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        self.lead = len(shape) - dims

    def pads(self) -> list[tuple[int, int]]:
        """Padding of every dimension, so that exactly the output's windows fit."""
        found = [(0, 0)] * self.lead
        for n, k, s, p, d, out in zip(
            self.size, self.kernel, self.stride, self.padding, self.dilation, self.output,
            strict=True,
        ):  # fmt: skip
            found.append((p, (out - 1) * s + d * (k - 1) + 1 - n - p))
        return found

    def reduce(self, x: Array, init: Any, fn: Callable[..., Any]) -> Any:
        """`lax.reduce_window` over the windows."""
        ones = (1,) * self.lead
        pads = self.pads()
        # Negative padding (rows that no window reaches) is a slice.
        if any(high < 0 for _, high in pads):
            shape = jax.tree.leaves(x)[0].shape
            index = tuple(
                slice(0, n + min(high, 0)) for n, (_, high) in zip(shape, pads, strict=True)
            )
            x = jax.tree.map(lambda a: a[index], x)
            pads = [(low, max(high, 0)) for low, high in pads]
        return lax.reduce_window(
            x, init, fn, (*ones, *self.kernel), (*ones, *self.stride), pads,
            window_dilation=(*ones, *self.dilation),
        )  # fmt: skip


def _max_pool(x: Array, window: Window) -> tuple[Array, Array]:
    """Largest elements and their positions in the flattened window dimensions."""
    dtype = torch_dtype(x)
    if is_integral(dtype):
        least: Any = torch.iinfo(dtype).min
    else:
        least = -math.inf
    flat = np.arange(math.prod(window.size)).reshape(window.size)
    place = jnp.broadcast_to(jnp.asarray(flat, jnp.int32), x.shape)

    def larger(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (x1, i1), (x2, i2) = a, b
        wins = (x2 > x1) | ((x2 == x1) & (i2 < i1))
        if not is_integral(dtype):
            # The first NaN wins.
            nan1, nan2 = x1 != x1, x2 != x2
            wins = jnp.where(nan1 | nan2, nan2 & (~nan1 | (i2 < i1)), wins)
        return lax.select(wins, x2, x1), lax.select(wins, i2, i1)

    init = (lax.full((), least, x.dtype), lax.full((), 2**31 - 1, jnp.int32))
    values, places = window.reduce((x, place), init, larger)
    return values, cast(places, torch.int64)


def _max_pool_rule(dims: int) -> Callable[..., tuple[Array, Array]]:
    def rule(
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        window = Window(x.shape, kernel_size, stride, padding, dilation, ceil_mode, dims)
        return _max_pool(x, window)

    return rule


lowers("max_pool2d_with_indices")(_max_pool_rule(2))
lowers("max_pool3d_with_indices")(_max_pool_rule(3))


def _unpooled(grad: Array, x: Array, places: Array, dims: int) -> Array:
    """Sums of the gradients at the positions that they came from."""
    lead = x.shape[: x.ndim - dims]
    rows, size = math.prod(lead), math.prod(x.shape[x.ndim - dims :])
    dtype = torch_dtype(grad)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    count = math.prod(grad.shape[grad.ndim - dims :])
    flat = full((rows, size), 0, wide)
    row = lax.broadcasted_iota(jnp.int32, (rows, count), 0)
    column = lax.reshape(cast(places, torch.int32), (rows, count))
    flat = flat.at[row, column].add(cast(lax.reshape(grad, (rows, count)), wide))
    return lax.reshape(cast(flat, dtype), x.shape)


@lowers("max_pool2d_with_indices_backward")
def max_pool2d_backward(grad: Array, x: Array, *options: Any, **named: Any) -> Array:
    return _unpooled(grad, x, named.get("indices", options[-1] if options else None), 2)


@lowers("max_pool3d_with_indices_backward")
def max_pool3d_backward(grad: Array, x: Array, *options: Any, **named: Any) -> Array:
    return _unpooled(grad, x, named.get("indices", options[-1] if options else None), 3)


# ------------------------------------------------------------------ averages
def _avg_pool(
    x: Array,
    kernel_size: Sequence[int],
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    dims: int,
) -> Array:
    dtype = torch_dtype(x)
    if is_integral(dtype):
        raise Unlowered("an average of integers")
    window = Window(x.shape, kernel_size, stride, padding, 1, ceil_mode, dims)
    wide = cast(x, torch.float32) if dtype.itemsize < 4 else x
    # A zero that JAX sees while it traces: it knows the transpose of no other sum.
    total = window.reduce(wide, np.zeros((), wide.dtype), lax.add)
    if divisor_override is not None:
        counts: Any = divisor_override
    else:
        # How many elements each window has: the same for every row, so computed here and now.
        per_axis = [
            _window_counts(n, k, s, p, out, count_include_pad)
            for n, k, s, p, out in zip(
                window.size, window.kernel, window.stride, window.padding, window.output,
                strict=True,
            )
        ]  # fmt: skip
        counts = np.ones((), np.float64)
        for each in per_axis:
            counts = counts[..., None] * each
        counts = counts.astype(wide.dtype)
    return cast(total / counts, dtype)


def _window_counts(
    size: int, kernel: int, stride: int, pad: int, output: int, include_pad: bool
) -> np.ndarray[Any, Any]:
    start = np.arange(output) * stride - pad
    end = np.minimum(start + kernel, size + pad)
    if include_pad:
        return end - start
    return np.minimum(end, size) - np.maximum(start, 0)


def _avg_pool_rules(dims: int) -> tuple[Callable[..., Array], Callable[..., Array]]:
    def rule(
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        return _avg_pool(
            x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, dims
        )

    def backward(
        grad: Array,
        x: Array,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Array:
        settings = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        _, transpose = jax.vjp(lambda y: _avg_pool(y, *settings, dims), x)
        return transpose(grad)[0]

    return rule, backward


for _dims in (1, 2, 3):
    _forward, _backward = _avg_pool_rules(_dims)
    lowers(f"avg_pool{_dims}d")(_forward)
    if _dims > 1:
        lowers(f"avg_pool{_dims}d_backward")(_backward)


def _adaptive_matrix(size: int, output: int) -> np.ndarray[Any, Any]:
    """``[output, size]``: the weight that each input element has in each average."""
    found = np.zeros((output, size))
    for i in range(output):
        start, end = i * size // output, -(-(i + 1) * size // output)
        found[i, start:end] = 1.0 / (end - start)
    return found


def _adaptive(x: Array, output_size: Sequence[int], dims: int) -> Array:
    dtype = torch_dtype(x)
    wide = cast(x, torch.float32) if dtype.itemsize < 4 else x
    for i, output in enumerate(output_size):
        axis = x.ndim - dims + i
        size = x.shape[axis]
        if size % output == 0:
            shape = (*wide.shape[:axis], output, size // output, *wide.shape[axis + 1 :])
            wide = jnp.mean(lax.reshape(wide, shape), axis=axis + 1)
        else:
            weights = jnp.asarray(_adaptive_matrix(size, output), wide.dtype)
            wide = jnp.moveaxis(jnp.tensordot(wide, weights, axes=((axis,), (1,))), -1, axis)
    return cast(wide, dtype)


@lowers("_adaptive_avg_pool2d", "adaptive_avg_pool2d")
def adaptive_avg_pool2d(x: Array, output_size: Sequence[int]) -> Array:
    return _adaptive(x, output_size, 2)


@lowers("_adaptive_avg_pool3d", "adaptive_avg_pool3d")
def adaptive_avg_pool3d(x: Array, output_size: Sequence[int]) -> Array:
    return _adaptive(x, output_size, 3)


@lowers("adaptive_avg_pool1d")
def adaptive_avg_pool1d(x: Array, output_size: Sequence[int]) -> Array:
    return _adaptive(x, output_size, 1)


def _adaptive_backward(grad: Array, x: Array, dims: int) -> Array:
    _, transpose = jax.vjp(lambda y: _adaptive(y, grad.shape[grad.ndim - dims :], dims), x)
    return transpose(grad)[0]


@lowers("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad: Array, x: Array) -> Array:
    return _adaptive_backward(grad, x, 2)


@lowers("_adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(grad: Array, x: Array) -> Array:
    return _adaptive_backward(grad, x, 3)
