"""The primitives that torch's reference decompositions end in. Their operands agree in dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.families.reductions import summed
from tpu_kernels.lowering.rules import Unlowered, find, lowers, overload
from tpu_kernels.lowering.values import Array, elementwise, expand, is_integral, torch_dtype

# Primitives that mean what an ATen operator means.
_SAME = {
    "abs": "abs", "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh",
    "atan": "atan", "atanh": "atanh", "bessel_i0": "i0", "bessel_i0e": "special_i0e",
    "bessel_i1": "special_i1", "bessel_i1e": "special_i1e", "bitwise_not": "bitwise_not",
    "ceil": "ceil", "cos": "cos", "cosh": "cosh", "digamma": "digamma", "erf": "erf",
    "erf_inv": "erfinv", "erfc": "erfc", "exp": "exp", "exp2": "exp2", "expm1": "expm1",
    "floor": "floor", "lgamma": "lgamma", "log": "log", "log10": "log10", "log1p": "log1p",
    "log2": "log2", "ndtri": "special_ndtri", "neg": "neg", "reciprocal": "reciprocal",
    "round": "round", "rsqrt": "rsqrt", "sign": "sgn", "sin": "sin", "sinh": "sinh",
    "sqrt": "sqrt", "tan": "tan", "tanh": "tanh", "trunc": "trunc",
    "add": "add.Tensor", "atan2": "atan2", "bitwise_and": "bitwise_and.Tensor",
    "bitwise_or": "bitwise_or.Tensor", "bitwise_xor": "bitwise_xor.Tensor", "eq": "eq.Tensor",
    "fmax": "fmax", "fmin": "fmin", "fmod": "fmod.Tensor", "gcd": "gcd", "ge": "ge.Tensor",
    "gt": "gt.Tensor", "hypot": "hypot", "igamma": "igamma", "igammac": "igammac",
    "le": "le.Tensor", "lt": "lt.Tensor", "maximum": "maximum", "minimum": "minimum",
    "mul": "mul.Tensor", "ne": "ne.Tensor", "nextafter": "nextafter", "pow": "pow.Tensor_Tensor",
    "remainder": "remainder.Tensor", "shift_left": "bitwise_left_shift.Tensor",
    "shift_right_arithmetic": "bitwise_right_shift.Tensor", "sub": "sub.Tensor",
    "where": "where.self", "zeta": "special_zeta",
}  # fmt: skip


def _enter(name: str, same_as: str) -> None:
    @lowers(f"prims.{name}")
    def rule(*args: Any, **kwargs: Any) -> Any:
        found = find(overload(same_as))
        if found is None:
            raise Unlowered(f"no rule for {same_as}")
        return found(*args, **kwargs)


for _name, _same_as in _SAME.items():
    _enter(_name, _same_as)


@lowers("prims.div")
def div(x: Any, y: Any) -> Array:
    return elementwise(lax.div, x, y, precise=True)


@lowers("prims.cbrt")
def cbrt(x: Array) -> Array:
    return elementwise(lax.cbrt, x, to_float=True, precise=True)


@lowers("prims.erfcx")
def erfcx(x: Array) -> Array:
    def fn(y: Array) -> Array:
        # erfc underflows for large arguments; there the leading terms of its series serve.
        direct = lax.exp(y * y) * lax.erfc(y)
        inverse = 1 / y
        series = inverse * (0.5641895835477563 - 0.28209479177387814 * inverse * inverse)
        return jnp.where(y > 9, series, direct)

    return elementwise(fn, x, to_float=True, precise=True)


def _reduction(fn: Callable[..., Array]) -> Callable[..., Array]:
    def rule(
        x: Array, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None
    ) -> Array:
        axes = tuple(range(x.ndim)) if dims is None else tuple(dims)
        return fn(x, axes) if axes else x

    return rule


lowers("prims.sum")(_reduction(summed))
lowers("prims.prod")(_reduction(lambda x, axes: jnp.prod(x, axis=axes, dtype=x.dtype)))
lowers("prims.amax")(_reduction(lambda x, axes: jnp.max(x, axis=axes)))
lowers("prims.amin")(_reduction(lambda x, axes: jnp.min(x, axis=axes)))


@lowers("prims.scalar_tensor", "prims.full")
def scalar(*args: Any, **kwargs: Any) -> Array:
    name = "scalar_tensor" if len(args) == 1 else "full"
    kwargs.pop("requires_grad", None)
    rule = find(overload(name))
    if rule is None:
        raise Unlowered(f"no rule for {name}")
    return rule(*args, **kwargs)


@lowers("prims.full_like")
def full_like(x: Array, value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    rule = find(overload("full_like"))
    if rule is None:
        raise Unlowered("no rule for full_like")
    return rule(x, value, dtype=dtype)


@lowers("prims.copy_to")
def copy_to(x: Array, source: Array) -> Array:
    return expand(lax.convert_element_type(source, x.dtype), x.shape)


@lowers("special_erfcx")
def special_erfcx(x: Array) -> Array:
    return erfcx(x)


@lowers("special_spherical_bessel_j0")
def spherical_bessel_j0(x: Array) -> Array:
    def fn(y: Array) -> Array:
        small = jnp.abs(y) < 0.5
        square = y * y
        # Near zero the quotient loses digits; torch uses the same series there.
        series = 1 - square / 6 + square**2 / 120 - square**3 / 5040 + square**4 / 362880
        return jnp.where(small, series, lax.sin(y) / jnp.where(small, 1, y))

    if is_integral(torch_dtype(x)):
        x = x.astype(jnp.float32)
    return elementwise(fn, x, precise=True)
