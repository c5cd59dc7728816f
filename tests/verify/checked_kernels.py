"""Kernels for the tests of `check`: sound ones, and one for each mistake that a pass knows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import tpu_kernels as tk

TILE = (8, 128)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _whole(body: Any, x: jax.Array, **options: Any) -> jax.Array:
    return pl.pallas_call(body, out_shape=_like(x), **options)(x)  # type: ignore[no-any-return]


@jax.custom_vjp
def _triple(x: jax.Array) -> jax.Array:
    def body(a: Any, o: Any) -> None:
        o[...] = 3 * a[...]

    block = pl.BlockSpec(TILE, lambda i: (i, 0))
    grid = (pl.cdiv(x.shape[0], TILE[0]),)
    call = pl.pallas_call(body, grid=grid, in_specs=[block], out_specs=block, out_shape=_like(x))
    return call(x)  # type: ignore[no-any-return]


_triple.defvjp(lambda x: (_triple(x), None), lambda _, g: (_triple(g),))


@tk.tpu_kernel("check_test::triple", reference=lambda x: 3 * x)
def triple(x: jax.Array) -> jax.Array:
    """Sound in every way."""
    return _triple(x)


@tk.tpu_kernel("check_test::off", reference=lambda x: 3.001 * x)
def off(x: jax.Array) -> jax.Array:
    """Is off by a thousandth."""
    return _triple(x)


@jax.custom_vjp
def _badly_differentiated(x: jax.Array) -> jax.Array:
    return _triple(x)


_badly_differentiated.defvjp(lambda x: (_triple(x), None), lambda _, g: (2 * g,))


@tk.tpu_kernel("check_test::bad_gradient", reference=lambda x: 3 * x)
def bad_gradient(x: jax.Array) -> jax.Array:
    """Has the right value and the wrong gradient."""
    return _badly_differentiated(x)


@tk.tpu_kernel("check_test::column_sum")
def column_sum(x: jax.Array, *, order: str = "last", parallel: str = "no") -> jax.Array:
    """Sum groups of 8 rows; `order` says where the reduction axis sits in the grid."""
    first = order == "first"
    rows, columns = x.shape[0] // 8, x.shape[1] // 128

    def body(a: Any, o: Any) -> None:
        @pl.when(pl.program_id(0 if first else 1) == 0)
        def _() -> None:
            o[...] = jnp.zeros_like(o)

        o[...] += a[...]

    semantics = ("parallel", "parallel") if parallel == "yes" else ("parallel", "arbitrary")
    return pl.pallas_call(  # type: ignore[no-any-return]
        body,
        grid=(rows, columns) if first else (columns, rows),
        in_specs=[pl.BlockSpec(TILE, (lambda k, j: (k, j)) if first else (lambda j, k: (k, j)))],
        out_specs=pl.BlockSpec(TILE, (lambda k, j: (0, j)) if first else (lambda j, k: (0, j))),
        out_shape=jax.ShapeDtypeStruct((8, x.shape[1]), x.dtype),
        compiler_params=None if first else pltpu.CompilerParams(dimension_semantics=semantics),
    )(x)


@tk.tpu_kernel("check_test::row_sum")
def row_sum(x: jax.Array, *, mask: str = "none") -> jax.Array:
    """Sum rows in blocks of 128 columns, the last of which may overhang."""
    columns = x.shape[1]

    def body(a: Any, o: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            o[...] = jnp.zeros_like(o)

        value = a[...]
        inside = pl.program_id(0) * 128 + jax.lax.broadcasted_iota(jnp.int32, TILE, 1) < columns
        if mask == "select":
            value = jnp.where(inside, value, 0)
        if mask == "multiply":
            value = value * inside.astype(value.dtype)
        o[...] += jnp.sum(value, axis=1, keepdims=True)

    return pl.pallas_call(  # type: ignore[no-any-return]
        body,
        grid=(pl.cdiv(columns, 128),),
        in_specs=[pl.BlockSpec(TILE, lambda j: (0, j))],
        out_specs=pl.BlockSpec((8, 1), lambda j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 1), x.dtype),
    )(x)


@tk.tpu_kernel("check_test::out_of_bounds")
def out_of_bounds(x: jax.Array) -> jax.Array:
    """Read a third block of eight rows of sixteen."""

    def body(a: Any, o: Any) -> None:
        o[...] = a[pl.ds(pl.program_id(0) * 8, 8), :]

    return pl.pallas_call(  # type: ignore[no-any-return]
        body,
        grid=(3,),
        in_specs=[pl.BlockSpec((16, 128), lambda i: (0, 0))],
        out_specs=pl.BlockSpec(TILE, lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((24, 128), x.dtype),
    )(x)


@tk.tpu_kernel("check_test::uninitialised")
def uninitialised(x: jax.Array) -> jax.Array:
    """Add to scratch memory that nobody has cleared."""

    def body(a: Any, o: Any, total: Any) -> None:
        total[...] += a[...]
        o[...] = total[...]

    return _whole(body, x, scratch_shapes=[pltpu.VMEM(TILE, jnp.float32)])


@tk.tpu_kernel("check_test::race")
def race(x: jax.Array, *, early: str = "no") -> jax.Array:
    """Copy by DMA; with `early`, read the copy before it has arrived, or never wait for it."""

    def body(a: Any, o: Any, buffer: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_copy(a, buffer, semaphore)
        copy.start()
        if early == "yes":
            o[...] = buffer[...]
            copy.wait()
        elif early == "never":
            o[...] = jnp.ones_like(o)
        else:
            copy.wait()
            o[...] = buffer[...]

    scratch = [pltpu.VMEM(TILE, jnp.float32), pltpu.SemaphoreType.DMA]
    return _whole(body, x, in_specs=[pl.BlockSpec(memory_space=pl.ANY)], scratch_shapes=scratch)


@tk.tpu_kernel("check_test::leak")
def leak(x: jax.Array) -> jax.Array:
    """Signal a semaphore that nobody waits for."""

    def body(a: Any, o: Any, semaphore: Any) -> None:
        pl.semaphore_signal(semaphore, 1)
        o[...] = a[...]

    return _whole(body, x, scratch_shapes=[pltpu.SemaphoreType.REGULAR])


@tk.tpu_kernel("check_test::deadlock", reference=lambda x: x)
def deadlock(x: jax.Array) -> jax.Array:
    """Wait for a semaphore that nobody signals."""

    def body(a: Any, o: Any, semaphore: Any) -> None:
        pl.semaphore_wait(semaphore, 1)
        o[...] = a[...]

    return _whole(body, x, scratch_shapes=[pltpu.SemaphoreType.REGULAR])


@tk.tpu_kernel("check_test::endless_map")
def endless_map(x: jax.Array) -> jax.Array:
    """Has an index map that does not end."""

    def endless(i: Any) -> Any:
        while True:
            pass

    return _whole(lambda a, o: None, x, grid=(1,), in_specs=[pl.BlockSpec(TILE, endless)])


@tk.tpu_kernel("check_test::transposed", reference=lambda x: x)
def transposed(x: jax.Array) -> jax.Array:
    """Store a value of the wrong shape."""

    def body(a: Any, o: Any) -> None:
        o[...] = a[...].T

    return _whole(body, x)


@tk.tpu_kernel("check_test::copy_blocks")
def copy_blocks(x: jax.Array, *, rows: int) -> jax.Array:
    """Copy in blocks of `rows` rows."""

    def body(a: Any, o: Any) -> None:
        o[...] = a[...]

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    grid = (x.shape[0] // rows,)
    return _whole(body, x, grid=grid, in_specs=[block], out_specs=block)


@tk.tpu_kernel("check_test::wrong_fake")
def wrong_fake(x: jax.Array) -> jax.Array:
    """Has a fake kernel that disagrees with the real one."""
    return x + 1


@wrong_fake.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.float64)


@tk.tpu_kernel("check_test::hang")
def hang(x: jax.Array) -> jax.Array:
    """Never end."""

    def body(a: Any, o: Any) -> None:
        # A recurrence that stays at 1: of a loop without one, LLVM may assume that it ends.
        o[...] = jax.lax.while_loop(lambda v: v[0, 0] < 2, lambda v: v * 0.5 + 0.5, a[...])

    block = pl.BlockSpec(TILE, lambda i: (i, 0))
    return _whole(body, x, grid=(2,), in_specs=[block], out_specs=block)
