"""Normalisation layers and their backward; statistics in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import Array, cast, full, opmath, torch_dtype


def _wide(x: Array) -> Array:
    return cast(x, opmath(torch_dtype(x)))


def _moments(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(lax.square(x - mean), axis=axes, keepdims=True)


@lowers("native_layer_norm")
def layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    dtype, axes = torch_dtype(x), tuple(range(x.ndim - len(shape), x.ndim))
    wide = cast(x, opmath(dtype))
    mean, variance = _moments(wide, axes)
    rstd = lax.rsqrt(variance + eps)
    found = (wide - mean) * rstd
    if weight is not None:
        found = found * cast(weight, torch_dtype(wide))
    if bias is not None:
        found = found + cast(bias, torch_dtype(wide))
    # torch keeps the statistics in the parameters' dtype where it mixes them, else in the input's.
    kept = dtype if weight is None else torch_dtype(weight)
    return cast(found, dtype), cast(mean, kept), cast(rstd, kept)


@lowers("native_layer_norm_backward")
def layer_norm_backward(
    grad: Array,
    x: Array,
    shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    dtype, inner = torch_dtype(x), tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    g, wide = _wide(grad), _wide(x)
    centred = (wide - cast(mean, torch_dtype(wide))) * cast(rstd, torch_dtype(wide))
    scaled = g if weight is None else g * cast(weight, torch_dtype(wide))
    of_x = of_weight = of_bias = None
    if mask[0]:
        of_x = scaled - jnp.mean(scaled, axis=inner, keepdims=True)
        of_x = of_x - centred * jnp.mean(scaled * centred, axis=inner, keepdims=True)
        of_x = cast(of_x * cast(rstd, torch_dtype(wide)), dtype)
    if mask[1] and weight is not None:
        of_weight = cast(jnp.sum(g * centred, axis=outer), torch_dtype(weight))
    if mask[2] and bias is not None:
        of_bias = cast(jnp.sum(g, axis=outer), torch_dtype(bias))
    return of_x, of_weight, of_bias


@lowers("_fused_rms_norm")
def rms_norm(
    x: Array, shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    dtype, axes = torch_dtype(x), tuple(range(x.ndim - len(shape), x.ndim))
    wide = cast(x, opmath(dtype))
    # The smallest step of the dtype that torch computes in.
    small = torch.finfo(opmath(dtype)).eps if eps is None else eps
    rstd = lax.rsqrt(jnp.mean(lax.square(wide), axis=axes, keepdims=True) + small)
    found = wide * rstd
    if weight is not None:
        found = found * cast(weight, torch_dtype(wide))
    return cast(found, dtype), rstd


@lowers("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Array,
    x: Array,
    shape: Sequence[int],
    rstd: Array,
    weight: Array | None,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None]:
    dtype, inner = torch_dtype(x), tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    g, wide = _wide(grad), _wide(x)
    scale = cast(rstd, torch_dtype(wide))
    normal = wide * scale
    scaled = g if weight is None else g * cast(weight, torch_dtype(wide))
    of_x = of_weight = None
    if mask[0]:
        middle = jnp.mean(scaled * normal, axis=inner, keepdims=True)
        of_x = cast((scaled - normal * middle) * scale, dtype)
    if mask[1] and weight is not None:
        of_weight = cast(jnp.sum(g * normal, axis=outer), torch_dtype(weight))
    return of_x, of_weight


@lowers("native_group_norm")
def group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    batch: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    dtype = torch_dtype(x)
    grouped = lax.reshape(cast(x, opmath(dtype)), (batch, groups, channels // groups * size))
    mean, variance = _moments(grouped, (2,))
    rstd = lax.rsqrt(variance + eps)
    found = lax.reshape((grouped - mean) * rstd, (batch, channels, size))
    if weight is not None:
        found = found * cast(weight, torch_dtype(found))[None, :, None]
    if bias is not None:
        found = found + cast(bias, torch_dtype(found))[None, :, None]
    kept = dtype if weight is None else torch_dtype(weight)
    shape = (batch, groups)
    return (
        lax.reshape(cast(found, dtype), x.shape),
        cast(lax.reshape(mean, shape), kept),
        cast(lax.reshape(rstd, shape), kept),
    )


# ------------------------------------------------------------------ batch norm
def _per_channel(x: Array, value: Array) -> Array:
    return lax.reshape(value, (1, value.shape[0], *(1,) * (x.ndim - 2)))


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    dtype = torch_dtype(x)
    axes = (0, *range(2, x.ndim))
    wide = cast(x, opmath(dtype))
    inner = torch_dtype(wide)
    new_mean, new_var = running_mean, running_var
    if training:
        mean = jnp.mean(wide, axis=axes)
        variance = jnp.mean(lax.square(wide - _per_channel(x, mean)), axis=axes)
        count = math.prod(x.shape[a] for a in axes)
        if running_mean is not None:
            kept = torch_dtype(running_mean)
            new_mean = cast(mean * momentum + running_mean * (1 - momentum), kept)
        if running_var is not None:
            unbiased = variance * (count / max(count - 1, 1))
            kept = torch_dtype(running_var)
            new_var = cast(unbiased * momentum + running_var * (1 - momentum), kept)
        rstd = lax.rsqrt(variance + eps)
        saved = cast(mean, inner), cast(rstd, inner)
    else:
        if running_mean is None or running_var is None:
            raise Unlowered("batch norm without statistics")
        mean, variance = cast(running_mean, inner), cast(running_var, inner)
        rstd = lax.rsqrt(variance + eps)
        nothing = full((0,), 0, torch_dtype(running_mean))
        saved = nothing, nothing
    found = (wide - _per_channel(x, mean)) * _per_channel(x, rstd)
    if weight is not None:
        found = found * _per_channel(x, cast(weight, inner))
    if bias is not None:
        found = found + _per_channel(x, cast(bias, inner))
    return cast(found, dtype), *saved, new_mean, new_var


@lowers("_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@lowers("_native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Array, Array, Array]:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


@lowers("_native_batch_norm_legit_no_training")
def batch_norm_no_training(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@lowers("native_batch_norm_backward")
def batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_rstd: Array | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    dtype = torch_dtype(x)
    axes = (0, *range(2, x.ndim))
    g, wide = _wide(grad), _wide(x)
    inner = torch_dtype(wide)
    if train:
        if save_mean is None or save_rstd is None:
            raise Unlowered("batch norm without statistics")
        mean, rstd = cast(save_mean, inner), cast(save_rstd, inner)
    else:
        if running_mean is None or running_var is None:
            raise Unlowered("batch norm without statistics")
        mean = cast(running_mean, inner)
        rstd = lax.rsqrt(cast(running_var, inner) + eps)
    normal = (wide - _per_channel(x, mean)) * _per_channel(x, rstd)
    total, dotted = jnp.sum(g, axis=axes), jnp.sum(g * normal, axis=axes)
    of_x = of_weight = of_bias = None
    if mask[0]:
        scale = rstd if weight is None else rstd * cast(weight, inner)
        of_x = g
        if train:
            count = math.prod(x.shape[a] for a in axes)
            of_x = g - _per_channel(x, total / count) - normal * _per_channel(x, dotted / count)
        of_x = cast(of_x * _per_channel(x, scale), dtype)
    kept = inner if weight is None else torch_dtype(weight)
    if mask[1]:
        of_weight = cast(dotted, kept)
    if mask[2]:
        of_bias = cast(total, kept)
    return of_x, of_weight, of_bias
