"""Lowering for a TPU without a TPU and without its compiler."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from tpu_kernels.compiler import chips, locations, resolve
from tpu_kernels.compiler.lowering import lower

TILE = jax.ShapeDtypeStruct((64, 256), jnp.float32)


@pytest.mark.parametrize("chip", list(chips()))
def test_a_kernel_sees_the_chip_that_it_is_lowered_for(chip: str, kernels: ModuleType) -> None:
    program = lower(kernels.asks_for_the_chip, [TILE], resolve(chip))
    size = chips()[chip].mxu_size
    assert f"memref<8x{size}xf32" in program.kernels[0].mosaic()


def test_a_kernel_knows_the_line_that_calls_it(kernels: ModuleType) -> None:
    program = lower(lambda x: kernels.blocked(x, (8, 128)), [TILE], resolve("v6e"))
    (kernel,) = program.kernels
    assert kernel.where is not None
    assert kernel.where.file.endswith("kernels.py")
    assert "pallas_call" in kernel.op_name


def test_kernels_inside_loops_and_branches_are_found(kernels: ModuleType) -> None:
    def fn(x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, 3, lambda _, v: kernels.increment(v), x)
        return jax.lax.cond(x[0, 0] > 0, kernels.double, kernels.increment, x)

    program = lower(fn, [jax.ShapeDtypeStruct((8, 128), jnp.float32)], resolve("v6e"))
    assert len(program.kernels) == 3


SOURCE = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
def f(x):
    def body(a, o):
        o[...] = a[...] {op}
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
"""


def _program(source: str) -> object:
    scope: dict[str, object] = {}
    exec(compile(source, "author.py", "exec"), scope)
    return lower(scope["f"], [TILE], resolve("v6e"))  # type: ignore[arg-type]


def test_moving_a_kernel_to_other_lines_keeps_its_digest() -> None:
    first, moved = _program(SOURCE.format(op="+ 1")), _program("\n\n" + SOURCE.format(op="+ 1"))
    assert first.digest == moved.digest
    assert first.place_digest != moved.place_digest


def test_another_constant_in_a_kernel_is_another_program() -> None:
    assert _program(SOURCE.format(op="+ 1")).digest != _program(SOURCE.format(op="+ 2")).digest


def test_lowering_starts_no_backend_and_does_not_load_the_compiler() -> None:
    script = (
        "import jax, jax.numpy as jnp\n"
        "from tpu_kernels.compiler.lowering import lower\n"
        "from tpu_kernels.compiler import resolve\n"
        "lower(jnp.sin, [jax.ShapeDtypeStruct((8, 128), jnp.float32)], resolve('v6e'))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "assert 'libtpu.so' not in open('/proc/self/maps').read()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _place(fn: object, *avals: jax.ShapeDtypeStruct) -> locations.SourceLine:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any exception of JAX: its place matters)
        lower(fn, avals, resolve("v6e"))  # type: ignore[arg-type]
    place = locations.from_exception(caught.value)
    assert place is not None
    assert place.file.endswith("kernels.py")
    return place


TILE_8 = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@pytest.mark.parametrize("name", ["scalar_store", "store_shape", "sort", "scan_outputs", "gather"])
def test_a_mistake_in_a_body_is_found_in_its_line(name: str, kernels: ModuleType) -> None:
    rows = 16 if name == "gather" else 8
    aval = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    assert f"# {name}" in _place(getattr(kernels, name), aval).text


def test_the_place_is_the_kernels_and_not_its_callers(kernels: ModuleType) -> None:
    def caller(x: jax.Array) -> jax.Array:
        return jax.jit(kernels.sort)(x)

    assert "# sort" in _place(caller, TILE_8).text


def test_an_error_that_no_author_wrote_has_no_place() -> None:
    assert locations.from_exception(ValueError("raised nowhere")) is None


@pytest.mark.parametrize(
    ("file", "authors"),
    [
        (jax.__file__, False),
        (locations.__file__, False),
        (subprocess.__file__, False),
        (pytest.__file__, False),
        ("<frozen importlib>", False),
        ("<ipython-input-3-abc>", True),
        (__file__, True),
    ],
)
def test_libraries_and_plumbing_are_not_the_authors(file: str, authors: bool) -> None:
    assert locations.is_authors(file) is authors


def test_shipped_kernels_are_their_authors_own() -> None:
    plumbing = locations.__file__
    shipped = plumbing.replace("compiler/locations.py", "ops/matmul.py")
    assert locations.is_authors(shipped)
