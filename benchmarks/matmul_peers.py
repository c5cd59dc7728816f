"""Cases of matrix products, and how XLA and the kernels of other packages compute them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: ``activation(x @ y.T + bias) + residual``, or its gated form.

    Attributes:
        name: Name in the rows.
        m: Rows of `x`.
        n: Rows of `y`, which is stored as weights are: [N, K].
        k: Columns of both.
        dtype: Of all operands.
        precision: For float32.
        bias: Whether there is one, [N].
        activation: Applied to the product and its bias.
        residual: Whether there is one, [M, N].
        gated: Whether a second product is multiplied with the activated first.
        transposed: False for `y` stored as [K, N].
    """

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    precision: str | None = None
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    gated: bool = False
    transposed: bool = True

    @property
    def operations(self) -> int:
        """Multiplications and additions, counted once for each element."""
        return 2 * self.m * self.n * self.k * (2 if self.gated else 1)

    @property
    def bytes(self) -> int:
        """Bytes that must be moved at least."""
        size = jnp.dtype(self.dtype).itemsize
        right = self.n * self.k * (2 if self.gated else 1)
        out = self.m * self.n * (2 if self.residual else 1)
        return size * (self.m * self.k + right + out)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """x, y, then up, bias, residual as far as there are any."""
        right = (self.n, self.k) if self.transposed else (self.k, self.n)
        shapes = [(self.m, self.k), right]
        shapes += [right] if self.gated else []
        shapes += [(self.n,)] if self.bias else []
        shapes += [(self.m, self.n)] if self.residual else []
        return [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]


CASES = {
    case.name: case
    for case in (
        Case("square/4096", 4096, 4096, 4096, transposed=False),
        Case("square/8192", 8192, 8192, 8192, transposed=False),
        Case("llama3-8b/prefill/gate_up", 8192, 28672, 4096),
        Case("llama3-8b/prefill/down", 8192, 4096, 14336),
        Case("llama3-8b/prefill/down+residual", 8192, 4096, 14336, residual=True),
        Case("llama3-8b/prefill/swiglu", 8192, 14336, 4096, activation="silu", gated=True),
        Case("mlp/bias+gelu", 8192, 16384, 4096, bias=True, activation="gelu"),
        Case("mlp/bias+gelu_tanh", 8192, 16384, 4096, bias=True, activation="gelu_tanh"),
        Case("mlp/bias", 8192, 16384, 4096, bias=True),
        Case("llama3-8b/decode_b1/gate_up", 1, 28672, 4096),
        Case("llama3-8b/decode_b16/gate_up", 16, 28672, 4096),
        Case("llama3-8b/decode_b16/o", 16, 4096, 4096),
        Case("llama3-8b/decode_b16/swiglu", 16, 14336, 4096, activation="silu", gated=True),
        *(
            Case(f"square/{size}_f32/{p}", size, size, size, "float32", p, transposed=False)
            for size in (2048, 4096)
            for p in ("default", "high", "highest")
        ),
    )
}


def by_xla(case: Case) -> Callable[..., jax.Array]:
    """The case in plain JAX."""
    precision = {"high": jax.lax.Precision.HIGH, "highest": jax.lax.Precision.HIGHEST}.get(
        case.precision or "", jax.lax.Precision.DEFAULT
    )

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        axes = (((1,), (1 if case.transposed else 0,)), ((), ()))
        return jax.lax.dot_general(
            x, y, axes, precision=precision, preferred_element_type=jnp.float32
        )

    def function(x: jax.Array, y: jax.Array, *more: jax.Array) -> jax.Array:
        rest = list(more)
        up = rest.pop(0) if case.gated else None
        total = product(x, y)
        if case.bias:
            total = total + rest.pop(0).astype(jnp.float32)
        if case.activation is not None:
            total = _ACTIVATIONS[case.activation](total)
        if up is not None:
            total = total * product(x, up)
        if case.residual:
            total = total + rest.pop(0).astype(jnp.float32)
        return total.astype(case.dtype)

    return function


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def peers(case: Case) -> Iterator[tuple[str, Callable[..., jax.Array]]]:
    """XLA, and Pallas' own kernel where it computes the case."""
    yield f"XLA (jax {jax.__version__})", by_xla(case)
    fused = case.bias or case.activation or case.residual or case.gated
    if not fused and not case.transposed and case.dtype == "bfloat16":
        yield "jax.experimental.pallas.ops.tpu.matmul", _pallas


def _pallas(x: jax.Array, y: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    return matmul(x, y, block_shape=(1024, 1024), block_k=512)
