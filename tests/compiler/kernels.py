"""Small kernels, most of them with one mistake each, for the tests of the compiler layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def aval(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def whole(body, shape, dtype):
    """One grid step over whole arrays."""
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(shape, dtype))


def increment(x):
    def body(a, o):
        o[...] = a[...] + jnp.asarray(1, a.dtype)

    return whole(body, x.shape, x.dtype)(x)


def matmul(x, y, acc=jnp.float32, precision=None):
    def body(a, b, o):
        o[...] = jnp.dot(a[...], b[...], preferred_element_type=acc, precision=precision)  # matmul

    return whole(body, (x.shape[0], y.shape[1]), acc)(x, y)


def tiled_matmul(x, y, block=512):
    def body(a, b, o):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        body,
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, step: (i, step)),
            pl.BlockSpec((block, block), lambda i, j, step: (step, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, step: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
    )(x, y)


def blocked(x, block):
    def body(a, o):
        o[...] = a[...] + 1

    spec = pl.BlockSpec(block, lambda *indices: indices)
    grid = tuple(pl.cdiv(size, step) for size, step in zip(x.shape, block, strict=True))
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)  # blocked


def rows(x, rows, limit=None):
    def body(a, o):
        o[...] = a[...] + 1

    spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // rows,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
    )(x)


def scalar_store(x):
    def body(a, o):
        o[0, 0] = a[0, 0] + 1  # scalar_store

    return whole(body, x.shape, x.dtype)(x)


def store_shape(x):
    def body(a, o):
        o[...] = a[...].T  # store_shape

    return whole(body, x.shape, x.dtype)(x)


def store_dtype(x):
    def body(a, o):
        o[...] = a[...].astype(jnp.int32)  # store_dtype

    return whole(body, x.shape, x.dtype)(x)


def rank_0(x):
    def body(a, o):
        o[...] = a[...] + 1

    return whole(body, (), x.dtype)(x)


def unaligned_slice(x):
    def body(a, o):
        o[...] = a[:, pl.ds(pl.program_id(0) * 3, 128)]  # unaligned_slice

    return pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[pl.BlockSpec((64, 256), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((64, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((64, 128), x.dtype),
    )(x)


def sort(x):
    def body(a, o):
        o[...] = jnp.sort(a[...], axis=0)  # sort

    return whole(body, x.shape, x.dtype)(x)


def gather(x):
    def body(a, o):
        o[...] = jnp.take(a[...], jnp.arange(8) * 2, axis=0)  # gather

    return whole(body, (8, 128), x.dtype)(x)


def captured_constant(x):
    outside = jnp.arange(128.0)

    def body(a, o):
        o[...] = a[...] + outside

    return whole(body, x.shape, x.dtype)(x)


def floor_divide(x):
    def body(a, o):
        o[...] = a[...] // 3  # floor_divide

    return whole(body, x.shape, x.dtype)(x)


def double(x):
    def body(a, o):
        o[...] = a[...] * 2  # double

    return whole(body, x.shape, x.dtype)(x)


def debug_print(x):
    def body(a, o):
        jax.debug.print("{}", a[0, 0])  # debug_print
        o[...] = a[...]

    return whole(body, x.shape, x.dtype)(x)


def large_prefetch(indices, x):
    def body(s, a, o):
        o[...] = a[...] + s[0]

    spec = pl.BlockSpec((8, 128), lambda i, s: (0, 0))
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(1,), in_specs=[spec], out_specs=spec
        ),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32),
    )(indices, x)


def dynamic_grid(x, steps):
    """Fine on a TPU: the number of grid steps is an argument."""

    def body(a, o):
        o[...] = a[...] + 1

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        body,
        grid=(steps[0],),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


def gram(x):
    return jnp.dot(x, x.T)


def asks_for_the_chip(x):
    """A kernel whose block depends on the target."""
    return blocked(x, (8, pltpu.get_tpu_info().mxu_column_size))


def scan_outputs(x):
    def body(a, o):
        o[...] = jax.lax.scan(lambda c, r: (c + r, c), a[0], a[...])[1]  # scan_outputs

    return whole(body, x.shape, x.dtype)(x)


def strided(x):
    def body(a, o):
        o[...] = a[...][::2]  # strided

    return whole(body, (8, 128), x.dtype)(x)


def prefix_sum(x):
    def body(a, o):
        o[...] = jax.lax.associative_scan(jnp.add, a[...], axis=0)  # prefix_sum

    return whole(body, x.shape, x.dtype)(x)


def twice(x):
    def body(a, o):
        o[...] = a[...] + a[...]

    return whole(body, x.shape, x.dtype)(x)


def contract_two(x):
    def body(a, o):
        o[...] = jnp.einsum("abc,dbc->ad", a[...], a[...])  # contract_two

    return whole(body, (4, 4), x.dtype)(x)


def selected_rows(indices, x):
    """Each grid step copies the block that a prefetched index names; an index of -1 is skipped."""

    def body(s, a, o):
        @pl.when(s[pl.program_id(0)] >= 0)
        def _():
            o[...] = a[...] * 2

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(indices.shape[0],),
            in_specs=[pl.BlockSpec((8, 128), lambda i, s: (jnp.maximum(s[i], 0), 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, s: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((indices.shape[0] * 8, 128), x.dtype),
    )(indices, x)


def grid_of(x, grid, semantics=None):
    """One block for every step of whatever grid is given."""

    def body(a, o):
        o[...] = a[...] + 1

    spec = pl.BlockSpec((8, 128), lambda *_: (0, 0))
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )(x)


def mapped(x, index_map, block=(8, 128)):
    def body(a, o):
        o[...] = a[...] + 1

    return pl.pallas_call(
        body,
        grid=(1,),
        in_specs=[pl.BlockSpec(block, index_map)],
        out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
    )(x)


def one_result(x):
    return mapped(x, lambda i: (i,))  # one_result


def float_result(x):
    return mapped(x, lambda i: (i * 0.5, 0))  # float_result


def in_space(x, space):
    def body(a, o):
        o[...] = a[...] + 1  # in_space

    return pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=space)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


def program_id(x):
    def body(a, o):
        o[...] = a[...] + pl.program_id(0)  # program_id

    return whole(body, x.shape, x.dtype)(x)


def unaligned_copy(x):
    def body(a, o, semaphore):
        pltpu.make_async_copy(a.at[:, pl.ds(3, 64)], o, semaphore).start()  # unaligned_copy

    return pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 64), x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )(x)


def reshaped(x):
    def body(a, o):
        o[...] = a[...].reshape(x.shape[1], x.shape[0])  # reshaped

    return whole(body, x.shape[::-1], x.dtype)(x)


def reduced(x, operation):
    def body(a, o):
        o[...] = operation(a[...], axis=1, keepdims=True).astype(x.dtype)  # reduced

    return whole(body, (x.shape[0], 1), x.dtype)(x)


def gram_plain(x):
    def body(a, o):
        o[...] = jnp.dot(a[...], a[...].T)  # gram_plain

    return whole(body, (x.shape[0],) * 2, x.dtype)(x)


def python_branch(x):
    def body(a, o):
        o[...] = a[...] if a[0, 0] > 0 else -a[...]  # python_branch

    return whole(body, x.shape, x.dtype)(x)


def python_number(x):
    def body(a, o):
        o[...] = a[...] + int(a[0, 0])  # python_number

    return whole(body, x.shape, x.dtype)(x)
