"""Convolutions of one, two and three dimensions, transposed ones, and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import HALF, Array, cast, is_integral, jax_dtype, torch_dtype


def _repeated(values: Sequence[int], count: int) -> list[int]:
    return list(values) * count if len(values) == 1 else list(values)


def _convolution(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """The convolution of ``[batch, channels, *space]`` without bias."""
    dims = x.ndim - 2
    stride, padding = _repeated(stride, dims), _repeated(padding, dims)
    dilation, output_padding = _repeated(dilation, dims), _repeated(output_padding, dims)
    wide = jax_dtype(torch.float32) if torch_dtype(x) in HALF else None
    spatial = "DHW"[3 - dims :]
    numbers = lax.conv_dimension_numbers(
        x.shape, weight.shape, (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    )
    if not transposed:
        found = lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
            preferred_element_type=wide,
        )
        return cast(found, torch_dtype(x))
    # A transposed convolution is a convolution of the spread input with the flipped filter.
    inputs, outputs = weight.shape[0], weight.shape[1]
    filters = lax.reshape(weight, (groups, inputs // groups, outputs, *weight.shape[2:]))
    filters = jnp.swapaxes(filters, 1, 2)
    filters = lax.reshape(filters, (groups * outputs, inputs // groups, *weight.shape[2:]))
    filters = lax.rev(filters, tuple(range(2, 2 + dims)))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    found = lax.conv_general_dilated(
        x,
        filters,
        [1] * dims,
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=groups,
        preferred_element_type=wide,
    )
    return cast(found, torch_dtype(x))


@lowers("convolution", "convolution_overrideable", "_convolution")
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,
) -> Array:
    if is_integral(torch_dtype(x)):
        raise Unlowered("a convolution of integers")
    unbatched = x.ndim == weight.ndim - 1
    batched = x[None] if unbatched else x
    found = _convolution(
        batched, weight, stride, padding, dilation, transposed, output_padding, groups
    )
    if bias is not None:
        found = found + lax.reshape(bias, (1, bias.shape[0], *(1,) * (found.ndim - 2)))
    return found[0] if unbatched else found


@lowers("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(
    grad: Array, x: Array, weight: Array, *options: Any, **named: Any
) -> tuple[Array | None, Array | None, Array | None]:
    # The overrideable variant has no bias sizes.
    arguments = list(options)
    if len(arguments) + len(named) == 8:
        arguments.pop(0)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    every = (*names, "output_mask")
    named = {k: v for k, v in named.items() if k in every}
    values = {**dict(zip(every, arguments, strict=False)), **named}
    mask = values.pop("output_mask")
    settings = [values[name] for name in names]
    # Half precision is differentiated in float32: the rule for a product that widens is missing.
    dtype = torch_dtype(x)
    wide = torch.float32 if dtype in HALF else dtype
    a, b, g = cast(x, wide), cast(weight, wide), cast(grad, wide)
    of_x = of_weight = of_bias = None
    if mask[0]:
        fn = jax.linear_transpose(lambda u: _convolution(u, b, *settings), a)
        of_x = cast(fn(g)[0], dtype)
    if mask[1]:
        fn = jax.linear_transpose(lambda w: _convolution(a, w, *settings), b)
        of_weight = cast(fn(g)[0], torch_dtype(weight))
    if mask[2]:
        of_bias = cast(jnp.sum(g, axis=(0, *range(2, g.ndim))), dtype)
    return of_x, of_weight, of_bias
