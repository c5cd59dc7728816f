"""Kernels in JAX programs of the user's own, and compiled by torch without a function around."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

import tpu_kernels as tk


def _double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


@tk.tpu_kernel("within::silent")
def silent(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@tk.tpu_kernel("within::told")
def told(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double, out_shape=out, interpret=interpret)(x)


@tk.tpu_kernel("within::plain")
def plain(x: jax.Array) -> jax.Array:
    return x * 2


@tk.tpu_kernel("within::all")
def all_of_them(x: jax.Array) -> jax.Array:
    return silent(told(plain(x)))


SHAPE = (8, 128)
STRUCT = jax.ShapeDtypeStruct(SHAPE, jnp.float32)


@pytest.mark.parametrize(
    ("kernel", "factor"), [(silent, 2), (told, 2), (plain, 2), (all_of_them, 8)]
)
def test_kernels_run_on_jax_arrays_eagerly_jitted_and_batched(kernel: Any, factor: int) -> None:
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    for function in (kernel, jax.jit(kernel), jax.vmap(kernel)):
        np.testing.assert_array_equal(function(jnp.asarray(x)), x * factor)
    torch.testing.assert_close(kernel(torch.from_numpy(x)), torch.from_numpy(x * factor))


@pytest.mark.parametrize(
    ("kernel", "calls"), [(silent, 1), (told, 1), (plain, 0), (all_of_them, 2)]
)
def test_the_platform_that_a_program_is_lowered_for_decides(kernel: Any, calls: int) -> None:
    traced = jax.jit(kernel).trace(STRUCT)
    for platform, expected in (("tpu", calls), ("cpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("tpu_custom_call") == expected, platform


def test_kernels_without_pallas_calls_are_traced_as_they_are() -> None:
    assert [str(e.primitive) for e in jax.make_jaxpr(plain)(STRUCT).eqns] == ["mul"]


def test_no_backend_of_jax_is_started() -> None:
    code = """
import jax, torch
from jax._src.xla_bridge import backends_are_initialized
from tests.registry.test_within_jax import STRUCT, all_of_them
all_of_them(torch.ones(8, 128))
jax.make_jaxpr(all_of_them)(STRUCT)
print(backends_are_initialized())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False"


def _shifted(i: int) -> Any:
    @tk.tpu_kernel(f"within::shift{i}")
    def shift(x: jax.Array, by: float = 1.0) -> jax.Array:
        return x + by * i

    return shift


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_many_kernels_are_compiled_by_torch_directly(device: str) -> None:
    torch._dynamo.reset()
    count = torch._dynamo.config.recompile_limit + 4
    x = torch.ones(4, device=device)
    for i in range(count):
        compiled = torch.compile(_shifted(i), backend="eager", fullgraph=True)
        assert compiled(x).tolist() == [1.0 + i] * 4
        assert compiled(x, by=2.0).tolist() == [1.0 + 2 * i] * 4
