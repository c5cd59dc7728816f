"""Random Pallas kernels for `fuzz_compiler.py`: some sound, most with something odd about them.

Everything follows from one number, so a case can be repeated: ``make(17)``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
DTYPES = (
    *("float32", "float32", "float32", "bfloat16", "bfloat16", "int32", "int32"),
    *("float16", "int8", "uint8", "int16", "uint32", "bool", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "int4", "float4_e2m1fn"),
)
SIZES = (1, 2, 3, 7, 8, 12, 16, 24, 64, 100, 128, 129, 200, 256, 384, 512, 1024)


@dataclass(frozen=True)
class Case:
    """One random kernel.

    Attributes:
        fn: Function of JAX arrays that calls the kernel.
        avals: Its arguments.
        target: What to compile it for.
        about: What it is, in one line.
        stuck: Whether tracing it never returns, or ends the process: only a worker may trace it.
    """

    fn: Callable[..., Any]
    avals: Sequence[Any]
    target: str
    about: str
    stuck: bool = False


def _cast(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(x).astype(x.dtype)


# Each body on a line of its own: that line is what a report has to name.
BODIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda x: x,
    "add": lambda x: x + jnp.asarray(1, x.dtype),
    "multiply": lambda x: x * x,
    "exp": lambda x: jnp.exp(x),
    "erf": lambda x: jax.lax.erf(x),
    "sin": lambda x: jnp.sin(x),
    "tan": lambda x: jnp.tan(x),
    "log1p": lambda x: jnp.log1p(x),
    "lgamma": lambda x: jax.lax.lgamma(x),
    "rsqrt": lambda x: jax.lax.rsqrt(x),
    "floor_divide": lambda x: x // jnp.asarray(3, x.dtype),
    "remainder": lambda x: x % jnp.asarray(3, x.dtype),
    "power": lambda x: x**3,
    "shift": lambda x: x << jnp.asarray(1, x.dtype),
    "popcount": lambda x: jax.lax.population_count(x),
    "where": lambda x: jnp.where(x > x.dtype.type(0), x, x + x),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "gelu": lambda x: jax.nn.gelu(x),
    "row_sum": _cast(lambda x: x - jnp.sum(x, axis=-1, keepdims=True)),
    "column_max": _cast(lambda x: x - jnp.max(x, axis=0, keepdims=True)),
    "full_sum": _cast(lambda x: x - jnp.sum(x)),
    "product": lambda x: x * jnp.prod(x, axis=-1, keepdims=True),
    "argmax": lambda x: x + jnp.argmax(x, axis=-1, keepdims=True).astype(x.dtype),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=-1),
    "flip": lambda x: x[::-1],
    "transpose_twice": lambda x: (x.T + x.T).T,
    "transpose_once": lambda x: x.T,
    "reshape": lambda x: (x.reshape(-1) * 2).reshape(x.shape),
    "reshape_wide": lambda x: (x.reshape(x.shape[0] // 2, -1) * 2).reshape(x.shape),
    "roll": lambda x: jnp.roll(x, 1, axis=-1),
    "tpu_roll": lambda x: pltpu.roll(x, 3, 0),
    "slice_add": lambda x: x + x[:1],
    "slice_odd": lambda x: x[:, 1:-1].sum(axis=1, keepdims=True) + x,
    "strided": lambda x: jnp.repeat(x[::2], 2, axis=0),
    "concatenate": lambda x: jnp.concatenate([x[: x.shape[0] // 2]] * 2, axis=0),
    "pad": lambda x: jnp.pad(x, ((1, 1), (0, 0)))[1:-1],
    "dot": lambda x: _fit(jnp.dot(x, x.T, preferred_element_type=jnp.float32), x),
    "dot_plain": lambda x: _fit(x @ x.T, x),
    "dot_high": lambda x: _fit(jnp.dot(x, x.T, precision="high"), x),
    "dot_left": lambda x: _fit(jax.lax.dot_general(x, x, (((0,), (0,)), ((), ()))), x),
    "einsum": lambda x: jnp.einsum("ab,cb->ac", x, x)[:, :1] + x,
    "take": lambda x: jnp.take(x, jnp.arange(x.shape[0]) // 2, axis=0),
    "scatter": lambda x: x.at[jnp.arange(2), 0].set(x[0, 0]),
    "dynamic_row": lambda x: x + jax.lax.dynamic_slice_in_dim(x, pl.program_id(0), 1, 0),
    "iota": lambda x: x + jnp.arange(x.shape[-1]).astype(x.dtype),
    "iota_2d": lambda x: x + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1).astype(x.dtype),
    "bitcast": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32).astype(x.dtype),
    "tpu_bitcast": lambda x: pltpu.bitcast(pltpu.bitcast(x, jnp.int16), x.dtype),
    "narrow": lambda x: x.astype(jnp.int8).astype(x.dtype),
    "eighth": lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype),
    "double": lambda x: x.astype(jnp.float16).astype(x.dtype),
    "loop": lambda x: jax.lax.fori_loop(0, 10, lambda i, v: v + x, x),
    "while": lambda x: jax.lax.while_loop(lambda v: jnp.max(v) < 9, lambda v: v + v, x),
    "scan": lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0], x)[1],
    "associative_scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=0),
    "cond": lambda x: jax.lax.cond(pl.program_id(0) == 0, lambda v: v + v, lambda v: v, x),
    "switch": lambda x: jax.lax.switch(pl.program_id(0) % 3, [jnp.abs, jnp.sign, jnp.ceil], x),
    "unrolled": lambda x: sum((x * i for i in range(300)), x),
    "random": lambda x: x + jax.random.uniform(jax.random.key(0), x.shape).astype(x.dtype),
    "hardware_random": lambda x: x + pltpu.prng_random_bits(x.shape).astype(x.dtype),
    "outer_constant": lambda x: x + jnp.asarray([[1.0, 2.0]] * 64).sum().astype(x.dtype),
    "python_error": lambda x: x + {}["missing"],
    "shape_error": lambda x: x + jnp.zeros((3, 5, 7), x.dtype),
    "python_if": lambda x: x if x[0, 0] > 0 else -x,
    "top_k": lambda x: x + jax.lax.top_k(x, 1)[0],
    "fft": lambda x: jnp.fft.fft(x).real.astype(x.dtype),
    "cholesky": lambda x: _fit(jnp.linalg.cholesky(x @ x.T), x),
    "convolution": lambda x: jnp.convolve(x[0], x[0], mode="same")[None] + x,
    "debug_print": lambda x: (jax.debug.print("{}", x), x)[1],
    "callback": lambda x: jax.pure_callback(lambda v: v, x, x),
    "nested_jit": lambda x: jax.jit(lambda v: v * 2)(x),
    "int_of_sum": lambda x: x + int(jnp.sum(x)),
}


def _fit(value: Any, like: Any) -> Any:
    """The value's first element, spread over the shape that the body has to store."""
    return jnp.broadcast_to(value[:1, :1], like.shape).astype(like.dtype)


def _forever(*indices: Any) -> tuple[Any, ...]:
    while True:
        pass


def _abort(*indices: Any) -> tuple[Any, ...]:
    os.abort()


def _leave(*indices: Any) -> tuple[Any, ...]:
    raise SystemExit(3)


def _hungry(*indices: Any) -> tuple[Any, ...]:
    kept = [bytearray(1 << 28)]
    while True:
        kept.append(bytearray(b"x" * (1 << 28)))


STUCK = {"forever": _forever, "abort": _abort, "exit": _leave, "hungry": _hungry}

INDEX_MAPS: dict[str, Callable[..., Any]] = {
    "swapped": lambda *i: i[::-1],
    "constant": lambda *i: (0,) * len(i),
    "far": lambda *i: tuple(j + 1000 for j in i),
    "negative": lambda *i: tuple(j - 1 for j in i),
    "short": lambda *i: i[:-1],
    "long": lambda *i: (*i, 0),
    "float": lambda *i: tuple(j * 0.5 for j in i),
    "none": lambda *i: None,
    "raises": lambda *i: i[7],
    "looping": lambda *i: tuple(jax.lax.while_loop(lambda v: v < 1, lambda v: v * 1, j) for j in i),
    "remainder": lambda *i: tuple(j % 2 for j in i),
    "array": lambda *i: tuple(jnp.arange(4)[j] for j in i),
}


def make(seed: int) -> Case:
    """Return the case of a number.

    Args:
        seed: Any integer; equal numbers give equal cases.
    """
    draw = random.Random(seed)
    target = draw.choice(CHIPS)
    kind = draw.choices(
        ("plain", "blocks", "maps", "spaces", "scratch", "grids", "stuck"),
        (40, 20, 12, 10, 8, 6, 2),
    )[0]
    return {
        "plain": _plain,
        "blocks": _blocks,
        "maps": _maps,
        "spaces": _spaces,
        "scratch": _scratch,
        "grids": _grids,
        "stuck": _stuck,
    }[kind](draw, target)


def _aval(draw: random.Random, *, rank: int = 2, legal: bool = False) -> Any:
    sizes = (8, 16, 64, 128, 256, 512) if legal else SIZES
    shape = [draw.choice(sizes) for _ in range(rank)]
    if legal and rank:
        shape[-1] = draw.choice((128, 256, 512))
    return jax.ShapeDtypeStruct(tuple(shape), draw.choice(DTYPES))


def _kernel(
    body: str,
    x: Any,
    target: str,
    about: str,
    *,
    stuck: bool = False,
    scratch: Sequence[Any] = (),
    **options: Any,
) -> Case:
    operation = BODIES[body]

    def inside(a: Any, o: Any, *_: Any) -> None:
        o[...] = operation(a[...])

    def fn(value: Any) -> Any:
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        call = pl.pallas_call(inside, out_shape=shape, scratch_shapes=scratch, **options)
        return call(value)

    told = f"{body} of {x.dtype}{list(x.shape)}, {about}"
    return Case(fn, [x], target, told, stuck)


def _plain(draw: random.Random, target: str) -> Case:
    x = _aval(draw, legal=draw.random() < 0.8)
    return _kernel(draw.choice(list(BODIES)), x, target, "whole array")


def _blocks(draw: random.Random, target: str) -> Case:
    rank = draw.choices((0, 1, 2, 3, 4), (1, 3, 8, 3, 1))[0]
    x = _aval(draw, rank=rank)
    odd = (None, 0, -8, 1, 4, 8, 16, 100, 128, 256, 4096)
    block = tuple(draw.choice(odd) for _ in range(rank))
    if draw.random() < 0.1:
        block = (*block, 8)
    spec = pl.BlockSpec(block, lambda *i: i)
    grid = tuple(draw.choice((1, 2, 3)) for _ in range(rank))
    body = draw.choice(("copy", "add", "row_sum", "exp", "transpose_twice"))
    return _kernel(body, x, target, f"blocks {block}", grid=grid, in_specs=[spec], out_specs=spec)


def _maps(draw: random.Random, target: str) -> Case:
    x = jax.ShapeDtypeStruct((64, 512), draw.choice(("float32", "bfloat16", "int32")))
    name = draw.choice(list(INDEX_MAPS))
    odd, good = pl.BlockSpec((16, 128), INDEX_MAPS[name]), pl.BlockSpec((16, 128), lambda *i: i)
    specs = (odd, good) if draw.random() < 0.5 else (good, odd)
    return _kernel(
        *("add", x, target, f"index map {name}"),
        grid=(4, 4),
        in_specs=[specs[0]],
        out_specs=specs[1],
    )


def _spaces(draw: random.Random, target: str) -> Case:
    spaces = {
        "smem": pltpu.SMEM,
        "vmem": pltpu.VMEM,
        "any": pl.ANY,
        "hbm": pltpu.HBM,
        "semaphore": pltpu.SEMAPHORE,
    }
    first, second = draw.choice(list(spaces)), draw.choice(list(spaces))
    x = _aval(draw, rank=draw.choice((1, 2, 2, 3)), legal=True)
    return _kernel(
        *(draw.choice(("copy", "add", "full_sum")), x, target, f"{first} to {second}"),
        in_specs=[pl.BlockSpec(memory_space=spaces[first])],
        out_specs=pl.BlockSpec(memory_space=spaces[second]),
    )


def _scratch(draw: random.Random, target: str) -> Case:
    rows = draw.choice((0, 1, 5, 8, 1000, 10_000, 100_000, 3_000_000))
    space = draw.choice((pltpu.VMEM, pltpu.SMEM))
    dtype = draw.choice(DTYPES)
    limit = draw.choice((None, None, 1, 1 << 20, 100 << 20, 1 << 40, -5))
    return _kernel(
        "add",
        jax.ShapeDtypeStruct((8, 128), jnp.float32),
        target,
        f"scratch {space} {dtype}[{rows},128], limit {limit}",
        scratch=[space((rows, 128), jnp.dtype(dtype))],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
    )


def _grids(draw: random.Random, target: str) -> Case:
    grid = draw.choice(((0,), (-1,), (1 << 20,), (1 << 33,), (1.5,), ("two",), (2,) * 9))
    semantics = draw.choice((None, ("parallel",), ("arbitrary",), ("parallel", "magic")))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    spec = pl.BlockSpec((8, 128), lambda *i: (0, 0))
    params = None
    if semantics is not None:
        params = pltpu.CompilerParams(dimension_semantics=semantics)
    return _kernel(
        *("add", x, target, f"grid {grid}, {semantics}"),
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
        compiler_params=params,
    )


def _stuck(draw: random.Random, target: str) -> Case:
    name = draw.choice(list(STUCK))
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    spec = pl.BlockSpec((8, 128), STUCK[name])
    about = f"index map {name}"
    return _kernel(
        *("add", x, target, about), stuck=True, grid=(2, 2), in_specs=[spec], out_specs=spec
    )
