"""Matrix products. Every contraction of the lowering goes through `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import (
    HALF,
    Array,
    cast,
    elementwise,
    is_integral,
    jax_dtype,
    operands,
    opmath,
    torch_dtype,
)

Pairs = tuple[Sequence[int], Sequence[int]]


def contract(a: Array, b: Array, contracting: Pairs, batch: Pairs = ((), ())) -> Array:
    """``lax.dot_general`` in torch's numerics: half precision accumulates in float32.

    Args:
        a: Left operand.
        b: Right operand, of the same dtype.
        contracting: Axes of each that are summed over.
        batch: Axes of each that run in parallel.

    Returns:
        The product in the operands' dtype.
    """
    dtype = torch_dtype(a)
    if dtype is torch.bool:
        raise Unlowered("a product of bool")
    wide = jax_dtype(opmath(dtype)) if dtype in HALF else None
    numbers = ((tuple(contracting[0]), tuple(contracting[1])), (tuple(batch[0]), tuple(batch[1])))
    found = lax.dot_general(a, b, numbers, preferred_element_type=wide)
    return cast(found, dtype)


@lowers("mm")
def mm(a: Array, b: Array) -> Array:
    return contract(a, b, ((1,), (0,)))


@lowers("bmm")
def bmm(a: Array, b: Array) -> Array:
    return contract(a, b, ((2,), (1,)), ((0,), (0,)))


@lowers("mv")
def mv(a: Array, b: Array) -> Array:
    return contract(a, b, ((1,), (0,)))


@lowers("dot")
def dot(a: Array, b: Array) -> Array:
    return contract(a, b, ((0,), (0,)))


@lowers("vdot")
def vdot(a: Array, b: Array) -> Array:
    return contract(lax.conj(a) if torch_dtype(a).is_complex else a, b, ((0,), (0,)))


@lowers("matmul")
def matmul(a: Array, b: Array) -> Array:
    if a.ndim == 1 or b.ndim == 1 or a.ndim == b.ndim == 2:
        if b.ndim > 2 and a.ndim == 1:
            return matmul(a[None], b)[..., 0, :]
        return contract(a, b, ((a.ndim - 1,), (max(b.ndim - 2, 0),)))
    if b.ndim == 2:
        return contract(a, b, ((a.ndim - 1,), (0,)))
    return jnp.matmul(a, b) if torch_dtype(a) not in HALF else _half_matmul(a, b)


def _half_matmul(a: Array, b: Array) -> Array:
    wide = jnp.matmul(a, b, preferred_element_type=jax_dtype(torch.float32))
    return cast(wide, torch_dtype(a))


@lowers("linear")
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    found = contract(x, weight, ((x.ndim - 1,), (weight.ndim - 1,)))
    return found if bias is None else _plus(found, bias)


def _plus(product: Array, bias: Array) -> Array:
    return elementwise(lax.add, product, bias)


def _combined(base: Array, product: Array, beta: Any, alpha: Any) -> Array:
    dtype = torch_dtype(product)
    if alpha != 1:
        product = lax.mul(*operands(product, alpha, dtype=dtype))
    if beta == 0:  # the base may hold NaN, which does not count then
        return product
    if beta != 1:
        base = lax.mul(*operands(base, beta, dtype=dtype))
    return lax.add(*operands(base, product, dtype=dtype))


def _whole(dtype: torch.dtype, number: Any) -> Any:
    return int(number) if is_integral(dtype) else number


@lowers("addmm")
def addmm(base: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    dtype = torch_dtype(a)
    return _accumulated(
        base, a, b, ((1,), (0,)), ((), ()), _whole(dtype, beta), _whole(dtype, alpha)
    )


@lowers("baddbmm")
def baddbmm(base: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    dtype = torch_dtype(a)
    axes = ((2,), (1,)), ((0,), (0,))
    return _accumulated(base, a, b, *axes, _whole(dtype, beta), _whole(dtype, alpha))


@lowers("addmv")
def addmv(base: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    dtype = torch_dtype(a)
    return _accumulated(
        base, a, b, ((1,), (0,)), ((), ()), _whole(dtype, beta), _whole(dtype, alpha)
    )


@lowers("addbmm")
def addbmm(base: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    dtype = torch_dtype(a)
    return _accumulated(
        base, a, b, ((0, 2), (0, 1)), ((), ()), _whole(dtype, beta), _whole(dtype, alpha)
    )


@lowers("addr")
def addr(base: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _combined(base, elementwise(lax.mul, a[:, None], b[None, :]), beta, alpha)


def _accumulated(
    base: Array, a: Array, b: Array, contracting: Pairs, batch: Pairs, beta: Any, alpha: Any
) -> Array:
    dtype = torch_dtype(a)
    if dtype not in HALF:
        return _combined(base, contract(a, b, contracting, batch), beta, alpha)
    # One rounding at the end, as torch's fused products do.
    numbers = ((tuple(contracting[0]), tuple(contracting[1])), (tuple(batch[0]), tuple(batch[1])))
    wide = lax.dot_general(a, b, numbers, preferred_element_type=jax_dtype(torch.float32))
    return cast(_combined(base, wide, beta, alpha), dtype)


@lowers("outer")
def outer(a: Array, b: Array) -> Array:
    return elementwise(lax.mul, a[:, None], b[None, :])


@lowers("kron")
def kron(a: Array, b: Array) -> Array:
    return jnp.kron(a, b)


@lowers("linalg_cross")
def cross(a: Array, b: Array, *, dim: int = -1) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.cross(a, b, axis=dim)
