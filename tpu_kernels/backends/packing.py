"""Arrays of values that torch packs into bytes, at the border of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels.dsl import dtypes


def on_bytes(
    function: Callable[..., tuple[Any, ...]], avals: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """A program that takes and returns ``uint8`` where another has arrays of a packed dtype.

    Args:
        function: ``fn(*tensor_arguments, *dynamic_scalars)``: arrays, None or tuples of arrays.
        avals: The abstract values of its arrays, in order.

    Returns:
        The function itself if neither its arguments nor its results have such a dtype.
    """
    packed = {dtypes.to_jax(dtype): dtype for dtype in dtypes.PACKED}

    @functools.wraps(function)
    def wrapped(*args: Any) -> tuple[Any, ...]:
        expected = iter(avals)

        def enter(leaf: Any) -> Any:
            aval = next(expected, None)  # dynamic scalars come last, and have none
            return leaf if aval is None or aval.dtype not in packed else unpack(leaf, aval.dtype)

        def leave(leaf: Any) -> Any:
            return pack(leaf, packed[leaf.dtype]) if leaf.dtype in packed else leaf

        import jax

        tree_map = jax.tree_util.tree_map
        return tree_map(leave, function(*tree_map(enter, args)))  # type: ignore[no-any-return]

    return wrapped


def unpack(array: Any, dtype: Any) -> Any:
    """The values that bytes hold: ``uint8[..., k]`` to ``dtype[..., n * k]``."""
    import jax

    values = jax.lax.bitcast_convert_type(array, dtype)
    return values.reshape(*array.shape[:-1], values.shape[-1] * array.shape[-1])


def pack(array: Any, dtype: torch.dtype) -> Any:
    """The bytes that hold values, the inverse of `unpack`."""
    import jax
    import jax.numpy as jnp

    shape = dtypes.tensor_shape(array.shape, dtype)
    return jax.lax.bitcast_convert_type(array.reshape(*shape, dtypes.PACKED[dtype]), jnp.uint8)
