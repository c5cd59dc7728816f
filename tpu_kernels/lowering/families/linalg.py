"""Factorisations and what is made of them."""

from __future__ import annotations

import jax.numpy as jnp
import jax.scipy.linalg as scipy
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import Array, cast, full


def _no_info(x: Array) -> Array:
    """A status for each matrix: nothing went wrong (a program cannot tell)."""
    return full(x.shape[:-2], 0, torch.int32)


@lowers("linalg_cholesky_ex")
def cholesky_ex(
    x: Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[Array, Array]:
    return cholesky(x, upper), _no_info(x)


@lowers("cholesky")
def cholesky(x: Array, upper: bool = False) -> Array:
    found = lax.linalg.cholesky(x, symmetrize_input=False)
    return (
        lax.conj(jnp.swapaxes(found, -1, -2))
        if upper and jnp.iscomplexobj(x)
        else (jnp.swapaxes(found, -1, -2) if upper else found)
    )


@lowers("linalg_inv_ex")
def inv_ex(x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    return jnp.linalg.inv(x), _no_info(x)


@lowers("_linalg_solve_ex")
def solve_ex(
    a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    lu, pivots, _ = lax.linalg.lu(a)
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    right = b[..., None] if vector else b
    if not left:
        right = jnp.swapaxes(right, -1, -2)
        found = jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(a, -1, -2), right), -1, -2)
    else:
        found = jnp.linalg.solve(*_batched(a, right))
    return found[..., 0] if vector else found, lu, cast(pivots + 1, torch.int32), _no_info(a)


def _batched(a: Array, b: Array) -> tuple[Array, Array]:
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (
        jnp.broadcast_to(a, (*lead, *a.shape[-2:])),
        jnp.broadcast_to(b, (*lead, *b.shape[-2:])),
    )


@lowers("linalg_solve_triangular")
def solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    a, b = _batched(a, b)
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lowers("triangular_solve")
def triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    a, b = _batched(a, b)
    found = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return found, a


@lowers("cholesky_solve")
def cholesky_solve(b: Array, a: Array, upper: bool = False) -> Array:
    a, b = _batched(a, b)
    return scipy.cho_solve((a, not upper), b)


@lowers("linalg_qr")
def qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    if mode == "r":
        return full((0,), 0, _dtype(x)), jnp.linalg.qr(x, mode="r")
    return tuple(jnp.linalg.qr(x, mode=mode))


def _dtype(x: Array) -> torch.dtype:
    from tpu_kernels.lowering.values import torch_dtype

    return torch_dtype(x)


@lowers("_linalg_eigh")
def eigh(x: Array, UPLO: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False)
    return values, vectors if compute_v else full((0,), 0, _dtype(x))


@lowers("_linalg_svd")
def svd(
    x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    if not compute_uv:
        none = full((0,), 0, _dtype(x))
        return none, jnp.linalg.svd(x, compute_uv=False), none
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


@lowers("_linalg_det")
def det(x: Array) -> tuple[Array, Array, Array]:
    lu, pivots, _ = lax.linalg.lu(x)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    swaps = jnp.sum(pivots != jnp.arange(pivots.shape[-1], dtype=pivots.dtype), axis=-1)
    sign = jnp.where(swaps % 2 == 1, -1, 1).astype(x.dtype)
    return sign * jnp.prod(diagonal, axis=-1), lu, cast(pivots + 1, torch.int32)


@lowers("_linalg_slogdet")
def slogdet(x: Array) -> tuple[Array, Array, Array, Array]:
    lu, pivots, _ = lax.linalg.lu(x)
    sign, logabs = jnp.linalg.slogdet(x)
    return sign, logabs, lu, cast(pivots + 1, torch.int32)


@lowers("linalg_lu_factor_ex")
def lu_factor_ex(
    x: Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array]:
    if not pivot:
        raise Unlowered("a factorisation without pivots")
    lu, pivots, _ = lax.linalg.lu(x)
    return lu, cast(pivots + 1, torch.int32), _no_info(x)


@lowers("_linalg_check_errors")
def check_errors(info: Array, api_name: str, *, is_matrix: bool) -> None:
    """Nothing: programs do not look at what a factorisation reports."""
