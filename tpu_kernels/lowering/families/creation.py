"""Tensors out of nothing: constants, ranges, conversions of dtype, copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import (
    Array,
    cast,
    expand,
    full,
    iota,
    is_integral,
    jax_dtype,
    torch_dtype,
)


def _default(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def dtype_of_number(value: Any) -> torch.dtype:
    """The dtype of a tensor that is made of a Python number."""
    return torch.tensor(value).dtype


@lowers("full")
def make_full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None) -> Array:
    return full(size, value, dtype_of_number(value) if dtype is None else dtype)


@lowers("zeros")
def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None) -> Array:
    return full(size, 0, _default(dtype))


@lowers("ones")
def ones(size: Sequence[int], *, dtype: torch.dtype | None = None) -> Array:
    return full(size, 1, _default(dtype))


# What is not initialised is zero: a program has no memory with earlier contents.
@lowers("empty.memory_format", "prims.empty")
def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return full(size, 0, _default(dtype))


@lowers("empty_strided", "prims.empty_strided", "prims.empty_permuted", "empty_permuted")
def empty_strided(
    size: Sequence[int], order: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Array:
    return full(size, 0, _default(dtype))


@lowers("empty_like", "zeros_like")
def zeros_like(x: Array, *, dtype: torch.dtype | None = None) -> Array:
    return full(x.shape, 0, dtype or torch_dtype(x))


@lowers("ones_like")
def ones_like(x: Array, *, dtype: torch.dtype | None = None) -> Array:
    return full(x.shape, 1, dtype or torch_dtype(x))


@lowers("full_like")
def full_like(x: Array, value: Any, *, dtype: torch.dtype | None = None) -> Array:
    return full(x.shape, value, dtype or torch_dtype(x))


@lowers("new_zeros", "new_empty")
def new_zeros(x: Array, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Array:
    return full(size, 0, dtype or torch_dtype(x))


@lowers("new_empty_strided")
def new_empty_strided(
    x: Array, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None
) -> Array:
    return full(size, 0, dtype or torch_dtype(x))


@lowers("new_ones")
def new_ones(x: Array, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Array:
    return full(size, 1, dtype or torch_dtype(x))


@lowers("new_full")
def new_full(
    x: Array, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None
) -> Array:
    return full(size, value, dtype or torch_dtype(x))


@lowers("scalar_tensor")
def scalar_tensor(value: Any, *, dtype: torch.dtype | None = None) -> Array:
    return cast(value, _default(dtype))


@lowers("arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None) -> Array:
    if dtype is None:
        whole = all(isinstance(v, int) for v in (start, end, step))
        dtype = torch.int64 if whole else torch.get_default_dtype()
    if dtype.is_floating_point:
        size = int(np.ceil((float(end) - float(start)) / float(step)))
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        return cast(iota(wide, (size,), 0) * step + start, dtype)
    start, end, step = int(start), int(end), int(step)
    size = max(0, -(-(end - start) // step))
    return cast(iota(torch.int64, (size,), 0) * step + start, dtype)


@lowers("arange")
def arange_to(end: Any, *, dtype: torch.dtype | None = None) -> Array:
    return arange(0, end, 1, dtype=dtype)


@lowers("arange.start")
def arange_from(start: Any, end: Any, *, dtype: torch.dtype | None = None) -> Array:
    return arange(start, end, 1, dtype=dtype)


@lowers("prims.iota")
def prims_iota(
    length: int, *, start: int, step: int, dtype: torch.dtype, requires_grad: bool = False
) -> Array:
    return cast(iota(torch.int64, (length,), 0) * step + start, dtype)


@lowers("linspace")
def linspace(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None) -> Array:
    dtype = _default(dtype)
    if is_integral(dtype) or dtype.is_complex:
        raise Unlowered("linspace of this dtype")
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    position = iota(wide, (steps,), 0)
    if steps == 1:
        return full((1,), start, dtype)
    step = (end - start) / (steps - 1)
    # From the nearer end, as torch does: both ends are exact.
    back = lax.sub(lax.full_like(position, steps - 1), position)
    return cast(jnp.where(position < steps / 2, start + step * position, end - step * back), dtype)


@lowers("eye", "eye.m")
def eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None) -> Array:
    return jnp.eye(n, n if m is None else m, dtype=jax_dtype(_default(dtype)))


@lowers("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None) -> Array:
    found = np.stack(np.tril_indices(row, offset, col))
    return cast(jnp.asarray(found), dtype or torch.int64)


@lowers("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None) -> Array:
    found = np.stack(np.triu_indices(row, offset, col))
    return cast(jnp.asarray(found), dtype or torch.int64)


# ------------------------------------------------------------------ copies and conversions
@lowers("_to_copy")
def to_copy(x: Array, *, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Array:
    return x if dtype is None else cast(x, dtype)


@lowers("prims.convert_element_type")
def convert_element_type(x: Array, dtype: torch.dtype) -> Array:
    return cast(x, dtype)


@lowers("prims.device_put")
def device_put(x: Array, device: Any, non_blocking: bool = False) -> Array:
    return x


@lowers(
    "alias",
    "alias_copy",
    "clone",
    "contiguous",
    "detach",
    "detach_copy",
    "lift",
    "lift_fresh",
    "lift_fresh_copy",
    "prims.clone",
    "prims.view_of",
)
def same(x: Array) -> Array:
    return x


@lowers("copy")
def copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    return expand(cast(source, torch_dtype(x)), x.shape)


@lowers("fill.Scalar", "fill.Tensor", "prims.fill")
def fill(x: Array, value: Any) -> Array:
    return full(x.shape, value, torch_dtype(x))


@lowers("zero")
def zero(x: Array) -> Array:
    return full(x.shape, 0, torch_dtype(x))
