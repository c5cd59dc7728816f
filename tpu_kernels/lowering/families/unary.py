"""Elementwise functions of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.scipy.special as special
import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, lowers
from tpu_kernels.lowering.values import (
    Array,
    cast,
    elementwise,
    float_of,
    full,
    is_floating,
    is_integral,
    torch_dtype,
)

_LOG2, _LOG10 = math.log(2.0), math.log(10.0)


def _log_base(base: float) -> Callable[[Array], Array]:
    def log(x: Array) -> Array:
        return lax.div(lax.log(x), lax.full_like(x, math.log(base)))

    return log


# Integers become floats; half precision is computed in float32, as torch does on the CPU.
_TO_FLOAT: dict[str, Callable[[Array], Array]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": lax.cos,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "i0": special.i0,
    "lgamma": lax.lgamma,
    "log": lax.log,
    "log10": _log_base(10.0),
    "log1p": lax.log1p,
    "log2": _log_base(2.0),
    "reciprocal": lambda x: lax.div(lax.full_like(x, 1), x),
    "rsqrt": lax.rsqrt,
    "sigmoid": lambda x: lax.logistic(x),
    "sin": lax.sin,
    "sinc": jnp.sinc,
    "sinh": lax.sinh,
    "special_entr": special.entr,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtri": special.ndtri,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "rad2deg": lambda x: x * (180.0 / math.pi),
}


def _rule(fn: Callable[[Array], Array]) -> Callable[..., Array]:
    def rule(x: Array) -> Array:
        return elementwise(fn, x, to_float=True, precise=True)

    return rule


for _name, _fn in _TO_FLOAT.items():
    lowers(_name)(_rule(_fn))


# Integers are their own results.
_ROUNDING: dict[str, Callable[[Array], Array]] = {
    "ceil": lax.ceil,
    "floor": lax.floor,
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "trunc": lambda x: lax.select(lax.lt(x, lax.full_like(x, 0)), lax.ceil(x), lax.floor(x)),
}


def _rounding(fn: Callable[[Array], Array]) -> Callable[..., Array]:
    def rule(x: Array) -> Array:
        return x if is_integral(torch_dtype(x)) else fn(x)

    return rule


for _name, _fn in _ROUNDING.items():
    lowers(_name)(_rounding(_fn))


@lowers("round.decimals")
def round_decimals(x: Array, *, decimals: int) -> Array:
    if is_integral(torch_dtype(x)):
        return x
    if decimals == 0:
        return _ROUNDING["round"](x)
    scale = 10.0 ** abs(decimals)
    dtype = torch_dtype(x)
    wide = cast(x, torch.float32) if dtype.itemsize < 4 else x
    factor = lax.full_like(wide, scale)
    scaled = lax.mul(wide, factor) if decimals > 0 else lax.div(wide, factor)
    rounded = _ROUNDING["round"](scaled)
    return cast(
        lax.div(rounded, factor) if decimals > 0 else lax.mul(rounded, factor),
        dtype,
    )


@lowers("abs")
def absolute(x: Array) -> Array:
    dtype = torch_dtype(x)
    return x if dtype is torch.bool or not dtype.is_signed else lax.abs(x)


@lowers("neg")
def neg(x: Array) -> Array:
    return lax.neg(x)


@lowers("positive")
def positive(x: Array) -> Array:
    return x


@lowers("square")
def square(x: Array) -> Array:
    return elementwise(lax.mul, x, x) if torch_dtype(x) is not torch.bool else x


@lowers("sign")
def sign(x: Array) -> Array:
    if torch_dtype(x) is torch.bool:
        return x
    zero = lax.full_like(x, 0)  # NaN has the sign 0 in torch
    return lax.sub(lax.gt(x, zero).astype(x.dtype), lax.lt(x, zero).astype(x.dtype))


@lowers("sgn")
def sgn(x: Array) -> Array:
    if not torch_dtype(x).is_complex:
        return sign(x)
    size = lax.abs(x)
    safe = jnp.where(size == 0, jnp.ones_like(size), size)
    return jnp.where(size == 0, jnp.zeros_like(x), x / safe.astype(x.dtype))


@lowers("angle")
def angle(x: Array) -> Array:
    if torch_dtype(x).is_complex:
        return lax.atan2(lax.imag(x), lax.real(x))
    wide = elementwise(lambda y: y, x, to_float=True)
    zero = lax.full_like(wide, 0)
    found = jnp.where(lax.lt(wide, zero), lax.full_like(wide, math.pi), zero)
    return jnp.where(wide != wide, wide, found)


@lowers("logical_not")
def logical_not(x: Array) -> Array:
    return lax.bitwise_not(cast(x, torch.bool))


@lowers("bitwise_not")
def bitwise_not(x: Array) -> Array:
    return lax.bitwise_not(x)


@lowers("isnan")
def isnan(x: Array) -> Array:
    return lax.ne(x, x) if is_floating(torch_dtype(x)) else full(x.shape, False, torch.bool)


@lowers("isinf")
def isinf(x: Array) -> Array:
    return jnp.isinf(x) if is_floating(torch_dtype(x)) else full(x.shape, False, torch.bool)


@lowers("isfinite", "prims.isfinite")
def isfinite(x: Array) -> Array:
    return jnp.isfinite(x) if is_floating(torch_dtype(x)) else full(x.shape, True, torch.bool)


@lowers("isposinf")
def isposinf(x: Array) -> Array:
    if is_integral(torch_dtype(x)):
        return full(x.shape, False, torch.bool)
    return lax.eq(x, lax.full_like(x, math.inf))


@lowers("isneginf")
def isneginf(x: Array) -> Array:
    if is_integral(torch_dtype(x)):
        return full(x.shape, False, torch.bool)
    return lax.eq(x, lax.full_like(x, -math.inf))


@lowers("signbit", "prims.signbit")
def signbit(x: Array) -> Array:
    if torch_dtype(x) is torch.bool:
        return full(x.shape, False, torch.bool)
    return jnp.signbit(x) if is_floating(torch_dtype(x)) else lax.lt(x, lax.full_like(x, 0))


@lowers("frac")
def frac(x: Array) -> Array:
    return lax.sub(x, _ROUNDING["trunc"](x))


@lowers("logit")
def logit(x: Array, eps: float | None = None) -> Array:
    def fn(y: Array) -> Array:
        if eps is not None:
            y = jnp.clip(y, eps, 1 - eps)
        return lax.log(y / (1 - y))

    return elementwise(fn, x, to_float=True, precise=True)


def _trigamma(x: Array) -> Array:
    # By reflection left of 1/2, where the series of zeta does not converge.
    left = x < 0.5
    found = lax.zeta(lax.full_like(x, 2), jnp.where(left, 1 - x, x))
    return jnp.where(left, lax.square(math.pi / lax.sin(math.pi * x)) - found, found)


@lowers("polygamma")
def polygamma(n: int, x: Array) -> Array:
    if n == 0:
        return elementwise(lax.digamma, x, to_float=True, precise=True)
    if n == 1:
        return elementwise(_trigamma, x, to_float=True, precise=True)
    raise Unlowered("polygamma of a higher order")


@lowers("nan_to_num")
def nan_to_num(
    x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    if is_integral(torch_dtype(x)):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


# ------------------------------------------------------------------ complex
@lowers("real", "prims.real")
def real(x: Array) -> Array:
    return lax.real(x) if torch_dtype(x).is_complex else x


@lowers("imag", "prims.imag")
def imag(x: Array) -> Array:
    return lax.imag(x)


@lowers("_conj", "_conj_physical", "conj_physical", "prims.conj", "prims.conj_physical")
def conj(x: Array) -> Array:
    return lax.conj(x) if torch_dtype(x).is_complex else x


@lowers("resolve_conj", "resolve_neg")
def resolve(x: Array) -> Array:
    return x


@lowers("_neg_view")
def neg_view(x: Array) -> Array:
    return lax.neg(x)


@lowers("view_as_real", "view_as_real_copy")
def view_as_real(x: Array) -> Array:
    return jnp.stack([lax.real(x), lax.imag(x)], axis=-1)


@lowers("view_as_complex", "view_as_complex_copy")
def view_as_complex(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowers("complex")
def make_complex(x: Array, y: Array) -> Array:
    x, y = jnp.broadcast_arrays(x, y)
    return lax.complex(x, y)


@lowers("polar")
def polar(size: Array, phase: Array) -> Array:
    size, phase = jnp.broadcast_arrays(size, phase)
    return lax.complex(size * lax.cos(phase), size * lax.sin(phase))


@lowers("frexp.Tensor", "prims.frexp")
def frexp(x: Array) -> tuple[Any, Any]:
    mantissa, exponent = jnp.frexp(x)
    return mantissa, cast(exponent, torch.int32)


def magnitude_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of absolute values."""
    return float_of(dtype)
