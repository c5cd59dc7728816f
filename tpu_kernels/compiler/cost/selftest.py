"""Does the cost model still understand the compiler? A check of two known kernels.

The listings that it reads are no documented format. After an upgrade of libtpu, this compiles a
matrix product and an addition, and compares what the simulation counts with what is known on paper
and what an earlier version gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpu_kernels.compiler.chips import Target, resolve
from tpu_kernels.compiler.compile import compile_function
from tpu_kernels.compiler.cost.figures import KernelEstimate

_SIZE, _BLOCK = 2048, 512
_ROWS, _COLUMNS, _BLOCK_ROWS = 8192, 1024, 256
_CYCLES_TOLERANCE = 0.05
# Simulated cycles with libtpu 0.0.52.
_MATMUL_CYCLES = {"v4": 196310, "v5e": 209144, "v5p": 188604, "v6e": 130835}
_HALF, _SINGLE = 2, 4  # bytes of bfloat16 and float32


def selftest(target: str | Target) -> list[str]:
    """Compare simulated figures of two kernels with the known ones.

    Args:
        target: What to compile for. On tpu7x XLA moves the operands before the kernel runs, so only
            the matrix units can be checked there.

    Returns:
        What does not agree, in words; empty if all is well.
    """
    aimed = resolve(target)
    problems: list[str] = []
    matmul = _kernel(_matmul, aimed, "selftest_matmul", problems)
    add = _kernel(_add, aimed, "selftest_add", problems)
    chip = aimed.chip
    if matmul is not None:
        products = (_SIZE // _BLOCK) ** 3 * _BLOCK**3 // (16 * chip.mxu_size**2)
        _expect(problems, "matrix instructions", matmul.units.get("mxu", 0), products)
        if chip.name in _MATMUL_CYCLES:
            steps = (_SIZE // _BLOCK) ** 3
            moved = steps * 2 * _BLOCK**2 * _HALF + _SIZE**2 * _SINGLE
            _expect(problems, "bytes of the product", matmul.hbm_bytes, moved)
            known = _MATMUL_CYCLES[chip.name]
            if abs(matmul.cycles / known - 1) > _CYCLES_TOLERANCE:
                problems.append(f"cycles of the product: {matmul.cycles:.0f}, earlier {known}")
    if add is not None and chip.name != "tpu7x":
        _expect(problems, "bytes of the sum", add.hbm_bytes, 2 * _ROWS * _COLUMNS * _SINGLE)
    return problems


def _expect(problems: list[str], what: str, found: int, expected: int) -> None:
    if found != expected:
        problems.append(f"{what}: {found}, expected {expected}")


def _kernel(
    make: Callable[[], tuple[Callable[..., Any], list[Any]]],
    target: Target,
    name: str,
    problems: list[str],
) -> KernelEstimate | None:
    fn, avals = make()
    report = compile_function(fn, avals, target, name=name)
    if report.estimate is None or not report.estimate.kernels:
        problems.append(report.text)
        return None
    return max(report.estimate.kernels, key=lambda kernel: kernel.us)


def _matmul() -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def body(a: Any, b: Any, o: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            o[...] = jnp.zeros_like(o)

        o[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def matmul(x: jax.Array, y: jax.Array) -> Any:
        block = (_BLOCK, _BLOCK)
        return pl.pallas_call(
            body,
            grid=(_SIZE // _BLOCK,) * 3,
            in_specs=[
                pl.BlockSpec(block, lambda i, j, step: (i, step)),
                pl.BlockSpec(block, lambda i, j, step: (step, j)),
            ],
            out_specs=pl.BlockSpec(block, lambda i, j, step: (i, j)),
            out_shape=jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32),
        )(x, y)

    aval = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.bfloat16)
    return matmul, [aval, aval]


def _add() -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def body(a: Any, o: Any) -> None:
        o[...] = a[...] + 1

    def add(x: jax.Array) -> Any:
        spec = pl.BlockSpec((_BLOCK_ROWS, _COLUMNS), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(_ROWS // _BLOCK_ROWS,),
            in_specs=[spec],
            out_specs=spec,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x)

    return add, [jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32)]
