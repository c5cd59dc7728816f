"""A file as a user would give it to ``--import``: three kernels, one of which no TPU can take."""

from __future__ import annotations

import jax
from jax.experimental import pallas as pl

import tpu_kernels as tk


def _copy_blocks(x: jax.Array, rows: int, scale: float, interpret: bool) -> jax.Array:
    def body(x_ref, out_ref):  # type: ignore[no-untyped-def]
        out_ref[...] = x_ref[...] * scale

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    result: jax.Array = pl.pallas_call(
        body,
        grid=(pl.cdiv(x.shape[0], rows),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x)
    return result


@tk.tpu_kernel("cli_test::scale", configs={"rows": [8, 16]})
def scale(
    x: jax.Array, factor: float = 2.0, *, rows: int = 8, interpret: bool = False
) -> jax.Array:
    """Return factor * x."""
    return _copy_blocks(x, rows, factor, interpret)


@tk.tpu_kernel("cli_test::too_large")
def too_large(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Copy everything in one block, whatever its size."""
    return _copy_blocks(x, x.shape[0], 1.0, interpret)


@tk.tpu_kernel("cli_test::total")
def total(xs: list[jax.Array], bias: jax.Array | None = None) -> jax.Array:
    """Return the sum of a list of arrays."""
    result = sum(xs[1:], start=xs[0])
    return result if bias is None else result + bias
