"""Kernels of a user for the tests of bundles; the process that loads them lacks this file."""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl

import tpu_kernels as tk

SCALE = 3.0


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


def helper(x: jax.Array) -> jax.Array:
    return x * SCALE


def body(x_ref: jax.Array, out_ref: jax.Array) -> None:
    out_ref[...] = helper(x_ref[...])


@tk.tpu_kernel("bundled::pallas", sharding="b h -> b h", reference=lambda x: x * 3.0)
def pallas(x: jax.Array) -> jax.Array:
    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out, grid=(x.shape[0],), in_specs=[row], out_specs=row)(x)


def caller_reference(
    x: torch.Tensor, y: torch.Tensor | None = None, mode: Mode = Mode.ADD
) -> torch.Tensor:
    x = x * SCALE
    if y is None:
        return x
    return x + y if mode is Mode.ADD else x * y


# JAX does not differentiate a Pallas call with a grid.
@tk.tpu_kernel("bundled::caller", reference=caller_reference, backward="reference")
@functools.partial(jax.jit, static_argnames=("mode",))
def caller(x: jax.Array, y: jax.Array | None = None, mode: Mode = Mode.ADD) -> jax.Array:
    x = pallas(x)
    if y is None:
        return x
    return x + y if mode is Mode.ADD else x * y


@tk.tpu_kernel("bundled::by_hand", backward=None, vmap=None)
def by_hand(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@by_hand.backward
def _(grad: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": grad * 100}


@tk.tpu_kernel("bundled::writes", mutates_args=("out",))
def writes(out: jax.Array, x: jax.Array):  # type: ignore[no-untyped-def]
    return {"out": out + x}
