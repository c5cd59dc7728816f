"""Activations and their derivatives, in float32 where tensors are in half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.rules import lowers
from tpu_kernels.lowering.values import (
    Array,
    broadcast,
    cast,
    elementwise,
    operands,
    torch_dtype,
)

_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715


def _own(fn: Callable[..., Array], *values: Array) -> Array:
    """Compute in the operands' promoted dtype, half precision in float32."""
    return elementwise(fn, *values, precise=True)


@lowers("relu")
def relu(x: Array) -> Array:
    return lax.max(x, lax.full_like(x, 0))


@lowers("relu6")
def relu6(x: Array) -> Array:
    return hardtanh(x, 0, 6)


@lowers("threshold")
def threshold(x: Array, threshold: Any, value: Any) -> Array:
    return _own(
        lambda y: jnp.where(y <= threshold, lax.full_like(y, value), y),
        x,
    )


@lowers("threshold_backward")
def threshold_backward(grad: Array, x: Array, threshold: Any) -> Array:
    grad, x = broadcast(grad, x)
    return lax.select(lax.le(x, lax.full_like(x, threshold)), lax.full_like(grad, 0), grad)


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        inner = _TANH_SCALE * (x + _TANH_CUBIC * x * x * x)
        return 0.5 * x * (1 + lax.tanh(inner))
    return 0.5 * x * (1 + lax.erf(x * _SQRT_HALF))


@lowers("gelu")
def gelu(x: Array, *, approximate: str = "none") -> Array:
    return _own(lambda y: _gelu(y, approximate), x)


@lowers("gelu_backward")
def gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    def fn(g: Array, y: Array) -> Array:
        if approximate == "tanh":
            inner = _TANH_SCALE * (y + _TANH_CUBIC * y * y * y)
            tanh = lax.tanh(inner)
            slope = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * y * y)
            return g * (0.5 * (1 + tanh) + 0.5 * y * (1 - tanh * tanh) * slope)
        density = lax.exp(-0.5 * y * y) * (_TANH_SCALE * 0.5)
        return g * (0.5 * (1 + lax.erf(y * _SQRT_HALF)) + y * density)

    return _own(fn, grad, x)


@lowers("silu")
def silu(x: Array) -> Array:
    return _own(lambda y: y * lax.logistic(y), x)


@lowers("silu_backward")
def silu_backward(grad: Array, x: Array) -> Array:
    def fn(g: Array, y: Array) -> Array:
        s = lax.logistic(y)
        return g * s * (1 + y * (1 - s))

    return _own(fn, grad, x)


@lowers("sigmoid_backward")
def sigmoid_backward(grad: Array, out: Array) -> Array:
    return _own(lambda g, s: g * (lax.conj(s * (1 - s)) if jnp.iscomplexobj(s) else s * (1 - s)),
                grad, out)  # fmt: skip


@lowers("tanh_backward")
def tanh_backward(grad: Array, out: Array) -> Array:
    return _own(lambda g, s: g * (lax.conj(1 - s * s) if jnp.iscomplexobj(s) else 1 - s * s),
                grad, out)  # fmt: skip


@lowers("hardtanh")
def hardtanh(x: Array, min_val: Any = -1, max_val: Any = 1) -> Array:
    low, high = cast(min_val, torch_dtype(x)), cast(max_val, torch_dtype(x))
    return lax.min(lax.max(x, jnp.broadcast_to(low, x.shape)), jnp.broadcast_to(high, x.shape))


@lowers("hardtanh_backward")
def hardtanh_backward(grad: Array, x: Array, min_val: Any, max_val: Any) -> Array:
    return _own(lambda g, y: jnp.where((y <= min_val) | (y >= max_val), 0.0, g), grad, x)


@lowers("leaky_relu")
def leaky_relu(x: Array, slope: Any = 0.01) -> Array:
    return _own(lambda y: jnp.where(y > 0, y, y * slope), x)


@lowers("leaky_relu_backward")
def leaky_relu_backward(grad: Array, x: Array, slope: Any, self_is_result: bool) -> Array:
    return _own(lambda g, y: jnp.where(y > 0, g, g * slope), grad, x)


@lowers("elu")
def elu(x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    return _own(
        lambda y: jnp.where(y > 0, y * scale, lax.expm1(y * input_scale) * (alpha * scale)), x
    )


@lowers("elu_backward")
def elu_backward(
    grad: Array, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Array
) -> Array:
    negative = input_scale * alpha * scale

    def fn(g: Array, y: Array) -> Array:
        if is_result:
            return jnp.where(y <= 0, g * input_scale * (y + alpha * scale), g * scale)
        return jnp.where(y <= 0, g * negative * lax.exp(y * input_scale), g * scale)

    return _own(fn, grad, x)


@lowers("softplus")
def softplus(x: Array, beta: Any = 1, threshold: Any = 20) -> Array:
    return _own(
        lambda y: jnp.where(
            y * beta > threshold, y, lax.log1p(lax.exp(jnp.minimum(y * beta, threshold))) / beta
        ),
        x,
    )


@lowers("softplus_backward")
def softplus_backward(grad: Array, x: Array, beta: Any, threshold: Any) -> Array:
    return _own(
        lambda g, y: jnp.where(y * beta > threshold, g, g * lax.logistic(y * beta)), grad, x
    )


@lowers("hardsigmoid")
def hardsigmoid(x: Array) -> Array:
    return _own(lambda y: jnp.clip(y + 3, 0, 6) / 6, x)


@lowers("hardsigmoid_backward")
def hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return _own(lambda g, y: jnp.where((y > -3) & (y < 3), g / 6, 0.0), grad, x)


@lowers("hardswish")
def hardswish(x: Array) -> Array:
    return _own(lambda y: y * jnp.clip(y + 3, 0, 6) / 6, x)


@lowers("hardswish_backward")
def hardswish_backward(grad: Array, x: Array) -> Array:
    return _own(
        lambda g, y: jnp.where(y <= -3, 0.0, jnp.where(y < 3, g * (y / 3 + 0.5), g)), grad, x
    )


@lowers("mish")
def mish(x: Array) -> Array:
    return _own(lambda y: y * lax.tanh(jnp.logaddexp(y, 0.0)), x)


@lowers("log_sigmoid_forward")
def log_sigmoid_forward(x: Array) -> tuple[Array, Array]:
    found = _own(lambda y: jnp.minimum(y, 0) - lax.log1p(lax.exp(-lax.abs(y))), x)
    # The second result is scratch space; the backward computes from the input.
    buffer = _own(lambda y: lax.exp(-lax.abs(y)), x)
    return found, buffer


@lowers("log_sigmoid_backward")
def log_sigmoid_backward(grad: Array, x: Array, buffer: Array) -> Array:
    return _own(lambda g, y: g * lax.logistic(-y), grad, x)


@lowers("softshrink")
def softshrink(x: Array, lambd: Any = 0.5) -> Array:
    return _own(
        lambda y: jnp.where(y > lambd, y - lambd, jnp.where(y < -lambd, y + lambd, y * 0)), x
    )


@lowers("hardshrink")
def hardshrink(x: Array, lambd: Any = 0.5) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), lax.full_like(x, 0), x)


@lowers("softshrink_backward", "hardshrink_backward")
def shrink_backward(grad: Array, x: Array, lambd: Any) -> Array:
    inside = (x >= -lambd) & (x <= lambd)
    return jnp.where(inside, lax.full_like(grad, 0), grad)


@lowers("_prelu_kernel")
def prelu(x: Array, weight: Array) -> Array:
    return _own(lambda y, w: jnp.where(y > 0, y, y * w), x, weight)


@lowers("glu")
def glu(x: Array, dim: int = -1) -> Array:
    a, b = jnp.split(x, 2, axis=dim)
    return _own(lambda u, v: u * lax.logistic(v), a, b)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    x, mask = broadcast(x, cast(mask, torch.bool))
    (filled,) = operands(value, dtype=torch_dtype(x))
    return lax.select(mask, jnp.broadcast_to(filled, x.shape), x)


# ------------------------------------------------------------------ softmax
def _softmax_dtype(x: Array, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else torch_dtype(x)


@lowers("_softmax")
def softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    result = _softmax_dtype(x, half_to_float)
    if not x.ndim:
        return cast(lax.full_like(x, 1), result)
    return cast(_normalised(_wide(x), dim), result)


def _normalised(x: Array, dim: int) -> Array:
    largest = lax.stop_gradient(jnp.max(x, axis=dim, keepdims=True))
    weights = lax.exp(x - largest)
    return weights / jnp.sum(weights, axis=dim, keepdims=True)


def _wide(x: Array) -> Array:
    return cast(x, torch.float32) if torch_dtype(x).itemsize < 4 else x


@lowers("_safe_softmax")
def safe_softmax(x: Array, dim: int, dtype: torch.dtype | None = None) -> Array:
    result = dtype or torch_dtype(x)
    wide = _wide(cast(x, result))
    hidden = jnp.all(wide == -math.inf, axis=dim, keepdims=True)
    return cast(jnp.where(hidden, 0.0, _normalised(jnp.where(hidden, 0.0, wide), dim)), result)


@lowers("_log_softmax")
def log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    result = _softmax_dtype(x, half_to_float)
    if not x.ndim:
        return cast(lax.full_like(x, 0), result)
    wide = _wide(x)
    shifted = wide - lax.stop_gradient(jnp.max(wide, axis=dim, keepdims=True))
    return cast(shifted - lax.log(jnp.sum(lax.exp(shifted), axis=dim, keepdims=True)), result)


@lowers("_softmax_backward_data")
def softmax_backward(grad: Array, out: Array, dim: int, dtype: torch.dtype) -> Array:
    if not out.ndim:
        return cast(lax.full_like(grad, 0), dtype)
    g, y = _wide(grad), _wide(out)
    scaled = g * y
    return cast(scaled - y * jnp.sum(scaled, axis=dim, keepdims=True), dtype)


@lowers("_log_softmax_backward_data")
def log_softmax_backward(grad: Array, out: Array, dim: int, dtype: torch.dtype) -> Array:
    if not out.ndim:
        return cast(lax.full_like(grad, 0), dtype)
    g, y = _wide(grad), _wide(out)
    return cast(g - lax.exp(y) * jnp.sum(g, axis=dim, keepdims=True), dtype)
