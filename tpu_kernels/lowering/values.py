"""torch's dtypes in JAX: promotion as torch does it, casts, scalars, broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_kernels.dsl import dtypes

Array = Any

_NARROW = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
HALF = frozenset({torch.bfloat16, torch.float16})
_FLOAT_OF_COMPLEX = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}
_COMPLEX_OF_FLOAT = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}


def wide() -> bool:
    """Whether 64-bit types stay 64 bits wide in the program that is being traced."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype that a torch dtype has in the program: narrow where the program is.

    Raises:
        DTypeError: JAX has no such dtype.
    """
    return dtypes.to_jax(dtype if wide() else _NARROW.get(dtype, dtype))


def torch_dtype(value: Any) -> torch.dtype:
    """The torch dtype of an array."""
    return dtypes.to_torch(value.dtype)


def is_array(value: Any) -> bool:
    """Whether a value is an array (a tensor of the graph), not a Python number."""
    return isinstance(value, (jax.Array, np.ndarray))


def cast(value: Any, dtype: torch.dtype) -> Array:
    """An array or number as an array of a torch dtype.

    Complex to real keeps the real part; to bool, whether it is not zero.
    """
    wanted = jax_dtype(dtype)
    if not is_array(value):
        return jnp.asarray(np.asarray(value).astype(wanted))
    if value.dtype == wanted:
        return value
    if jnp.issubdtype(value.dtype, jnp.complexfloating) and not jnp.issubdtype(
        wanted, jnp.complexfloating
    ):
        if wanted == np.bool_:
            return lax.ne(value, lax.full_like(value, 0))
        value = lax.real(value)
    return lax.convert_element_type(value, wanted)


def float_of(dtype: torch.dtype) -> torch.dtype:
    """The real dtype of a complex one; others unchanged."""
    return _FLOAT_OF_COMPLEX.get(dtype, dtype)


def complex_of(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype with a real one's precision; complex ones unchanged."""
    return _COMPLEX_OF_FLOAT.get(dtype, dtype)


def is_floating(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating or complex."""
    return dtype.is_floating_point or dtype.is_complex


def is_integral(dtype: torch.dtype) -> bool:
    """Whether a dtype is an integer or bool."""
    return not is_floating(dtype)


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes what it stores in a dtype."""
    return torch.float32 if dtype in HALF else dtype


def _of_number(value: Any) -> torch.dtype:
    if isinstance(value, (bool, np.bool_)):
        return torch.bool
    if isinstance(value, (int, np.integer)):
        return torch.int64
    if isinstance(value, complex):
        return complex_of(torch.get_default_dtype())
    return torch.get_default_dtype()


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """What a more important category makes of a less important one's dtype."""
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return complex_of(higher) if lower.is_complex else higher
    if higher is torch.bool or is_floating(lower):
        return torch.promote_types(higher, lower)
    return higher


def result_type(*values: Any) -> torch.dtype:
    """The dtype that torch promotes operands to; numbers and 0-d tensors count less than others.

    Args:
        *values: Arrays, Python numbers; None is left out.

    Example:
        >>> result_type(jnp.ones(2, jnp.bfloat16), 2.5), result_type(jnp.ones(2, jnp.int32), True)
        (torch.bfloat16, torch.int32)
    """
    categories: list[torch.dtype | None] = [None, None, None]
    for value in values:
        if value is None:
            continue
        if is_array(value):
            place, dtype = (0 if value.ndim else 1), torch_dtype(value)
        else:
            place, dtype = 2, _of_number(value)
        before = categories[place]
        categories[place] = dtype if before is None else torch.promote_types(before, dtype)
    found = _combine(categories[0], _combine(categories[1], categories[2]))
    if found is None:
        raise TypeError("no operand has a dtype")
    return found


def float_result(dtype: torch.dtype) -> torch.dtype:
    """The dtype of functions that make floats of integers."""
    return dtype if is_floating(dtype) else torch.get_default_dtype()


def broadcast(*arrays: Array) -> list[Array]:
    """Arrays broadcast against each other."""
    shapes = [a.shape for a in arrays]
    if all(shape == shapes[0] for shape in shapes):
        return list(arrays)
    shape = np.broadcast_shapes(*shapes)
    return [expand(a, shape) for a in arrays]


def expand(array: Array, shape: Sequence[int]) -> Array:
    """An array broadcast to a shape."""
    shape = tuple(shape)
    if array.shape == shape:
        return array
    missing = len(shape) - array.ndim
    return lax.broadcast_in_dim(
        _without_ones(array), shape, [i + missing for i, n in enumerate(array.shape) if n != 1]
    )


def _without_ones(array: Array) -> Array:
    return lax.reshape(array, [n for n in array.shape if n != 1]) if 1 in array.shape else array


def operands(*values: Any, dtype: torch.dtype) -> list[Array]:
    """Operands of an elementwise function: one dtype, one shape."""
    return broadcast(*[cast(v, dtype) for v in values])


def elementwise(
    fn: Callable[..., Array],
    *values: Any,
    to_float: bool = False,
    precise: bool = False,
    result: torch.dtype | None = None,
) -> Array:
    """Apply an elementwise function as torch does.

    Args:
        fn: Function of arrays of one dtype and shape.
        *values: Arrays and numbers.
        to_float: Whether integers become floats.
        precise: Whether half precision is computed in float32.
        result: Dtype of the result; by default the promoted one.
    """
    common = result_type(*values)
    if to_float:
        common = float_result(common)
    inner = opmath(common) if precise else common
    out = fn(*operands(*values, dtype=inner))
    return cast(out, common if result is None else result)


def axis_of(dim: int, ndim: int) -> int:
    """A dimension counted from the front; 0-d arrays have a dimension 0 in torch."""
    return dim % max(ndim, 1)


def axes_of(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front, sorted; all of them for None or an empty sequence."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted(axis_of(d, ndim) for d in dims)) if ndim else ()


def iota(dtype: torch.dtype, shape: Sequence[int], axis: int) -> Array:
    """Positions along an axis."""
    return lax.broadcasted_iota(jax_dtype(dtype), tuple(shape), axis)


def full(shape: Sequence[int], value: Any, dtype: torch.dtype) -> Array:
    """An array of one value."""
    return expand(cast(value, dtype), tuple(shape))
