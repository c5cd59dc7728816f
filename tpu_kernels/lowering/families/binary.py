"""Elementwise functions of two and three operands."""

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
    broadcast,
    cast,
    elementwise,
    is_array,
    is_integral,
    operands,
    result_type,
    torch_dtype,
)

Number = Any


# ------------------------------------------------------------------ arithmetic
@lowers("add.Tensor", "add.Scalar")
def add(x: Any, y: Any, alpha: Number = 1) -> Array:
    dtype = result_type(x, y)
    if alpha != 1:
        y = lax.mul(*operands(y, alpha, dtype=dtype))
    if dtype is torch.bool:
        return lax.bitwise_or(*operands(x, y, dtype=dtype))
    return lax.add(*operands(x, y, dtype=dtype))


@lowers("sub.Tensor", "sub.Scalar")
def sub(x: Any, y: Any, alpha: Number = 1) -> Array:
    dtype = result_type(x, y)
    if alpha != 1:
        y = lax.mul(*operands(y, alpha, dtype=dtype))
    return lax.sub(*operands(x, y, dtype=dtype))


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(x: Any, y: Any, alpha: Number = 1) -> Array:
    dtype = result_type(x, y)
    if alpha != 1:
        x = lax.mul(*operands(x, alpha, dtype=dtype))
    return lax.sub(*operands(y, x, dtype=dtype))


@lowers("mul.Tensor", "mul.Scalar")
def mul(x: Any, y: Any) -> Array:
    dtype = result_type(x, y)
    fn = lax.bitwise_and if dtype is torch.bool else lax.mul
    return fn(*operands(x, y, dtype=dtype))


@lowers("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(x: Any, y: Any) -> Array:
    return elementwise(lax.div, x, y, to_float=True, precise=True)


@lowers("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x: Any, y: Any, *, rounding_mode: str | None) -> Array:
    if rounding_mode is None:
        return div(x, y)
    dtype = result_type(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    if is_integral(dtype):
        return elementwise(lax.div, x, y)
    return elementwise(lambda a, b: jnp.trunc(lax.div(a, b)), x, y, precise=True)


@lowers("floor_divide", "floor_divide.Scalar")
def floor_divide(x: Any, y: Any) -> Array:
    def floats(a: Array, b: Array) -> Array:
        # By way of the remainder: the quotient may round up to the next integer. As torch does.
        rest = lax.rem(a, b)
        quotient = lax.div(lax.sub(a, rest), b)
        zero = lax.full_like(a, 0)
        lower = (rest != zero) & ((b < zero) != (rest < zero))
        quotient = jnp.where(lower, quotient - 1, quotient)
        floor = lax.floor(quotient)
        floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
        floor = jnp.where(quotient == zero, jnp.copysign(zero, lax.div(a, b)), floor)
        return jnp.where(b == zero, lax.div(a, b), floor)

    if is_integral(result_type(x, y)):
        return elementwise(jnp.floor_divide, x, y)
    return elementwise(floats, x, y, precise=True)


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(x: Any, y: Any) -> Array:
    def fn(a: Array, b: Array) -> Array:
        rest = lax.rem(a, b)
        zero = lax.full_like(a, 0)
        other = (rest != zero) & ((rest < zero) != (b < zero))
        return jnp.where(other, rest + b, rest)

    return elementwise(fn, x, y, precise=True)


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(x: Any, y: Any) -> Array:
    return elementwise(lax.rem, x, y, precise=True)


@lowers("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar", "float_power.Tensor_Tensor")
def power(x: Any, y: Any) -> Array:
    dtype = result_type(x, y)
    if not is_array(y) and not dtype.is_complex and float(y) in (0.5, 1.0, 2.0, 3.0, -1.0, -2.0):
        return elementwise(_power_by(float(y)), cast(x, dtype), precise=True)
    if is_integral(dtype):
        if not is_array(y) and y < 0:
            raise Unlowered("integers to a negative power")
        return elementwise(_whole_power, x, y)
    if not is_array(y) and float(y).is_integer() and abs(y) <= 64 and not dtype.is_complex:
        return elementwise(lambda a: lax.integer_pow(a, int(y)), cast(x, dtype), precise=True)
    return elementwise(lax.pow, x, y, precise=True)


def _whole_power(x: Array, y: Array) -> Array:
    """Integers to integers: products wrap around; to negative powers, only 1 and -1 give any."""
    one, zero = lax.full_like(x, 1), lax.full_like(x, 0)

    def step(_: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        result, base, rest = state
        odd = lax.bitwise_and(rest, one) == one
        return (
            jnp.where(odd, result * base, result),
            base * base,
            lax.shift_right_logical(rest, one),
        )

    bits = 8 * x.dtype.itemsize
    found = lax.fori_loop(0, bits, step, (one, x, y))[0]
    minus = jnp.where(lax.bitwise_and(y, one) == one, lax.neg(one), one)
    negative = jnp.where(x == one, one, jnp.where(x == lax.neg(one), minus, zero))
    return jnp.where(y < zero, negative, found)


def _power_by(exponent: float) -> Callable[[Array], Array]:
    """The powers that torch computes by simpler operations."""
    if exponent == 0.5:
        return lax.sqrt
    return lambda x: lax.integer_pow(x, int(exponent))


# float to an integer power: the base is a float already
_TO_FLOAT: dict[str, Callable[..., Array]] = {
    "atan2": lax.atan2,
    "special_zeta": special.zeta,
    "special_xlog1py": special.xlog1py,
    "xlogy.Tensor": special.xlogy,
    "xlogy.Scalar_Self": special.xlogy,
    "xlogy.Scalar_Other": special.xlogy,
}
_PROMOTED: dict[str, Callable[..., Array]] = {
    "copysign.Tensor": jnp.copysign,
    "copysign.Scalar": jnp.copysign,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "gcd": jnp.gcd,
    "lcm": jnp.lcm,
    "hypot": jnp.hypot,
    "igamma": lax.igamma,
    "igammac": lax.igammac,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "maximum": lax.max,
    "minimum": lax.min,
    "nextafter": lax.nextafter,
    "bitwise_and.Tensor": lax.bitwise_and,
    "bitwise_and.Scalar": lax.bitwise_and,
    "bitwise_or.Tensor": lax.bitwise_or,
    "bitwise_or.Scalar": lax.bitwise_or,
    "bitwise_xor.Tensor": lax.bitwise_xor,
    "bitwise_xor.Scalar": lax.bitwise_xor,
}
_COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
}
_EXACT_IN_HALF = frozenset({"maximum", "minimum", "fmax", "fmin", "nextafter", "copysign"})


def _promoted(fn: Callable[..., Array], *, to_float: bool, precise: bool) -> Callable[..., Array]:
    def rule(x: Any, y: Any) -> Array:
        return elementwise(fn, x, y, to_float=to_float, precise=precise)

    return rule


for _name, _fn in _TO_FLOAT.items():
    lowers(_name)(_promoted(_fn, to_float=True, precise=True))
for _name, _fn in _PROMOTED.items():
    _precise = _name.partition(".")[0] not in _EXACT_IN_HALF
    lowers(_name)(_promoted(_fn, to_float=_name.startswith("copysign"), precise=_precise))


def _comparison(fn: Callable[..., Array]) -> Callable[..., Array]:
    def rule(x: Any, y: Any) -> Array:
        return elementwise(fn, x, y, result=torch.bool)

    return rule


for _name, _fn in _COMPARISONS.items():
    lowers(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_fn))


def _logical(fn: Callable[..., Array]) -> Callable[..., Array]:
    def rule(x: Any, y: Any) -> Array:
        return fn(*broadcast(cast(x, torch.bool), cast(y, torch.bool)))

    return rule


lowers("logical_and")(_logical(lax.bitwise_and))
lowers("logical_or")(_logical(lax.bitwise_or))
lowers("logical_xor")(_logical(lax.bitwise_xor))


def _shift(fn: Callable[..., Array]) -> Callable[..., Array]:
    def rule(x: Any, y: Any) -> Array:
        return elementwise(fn, x, y)

    return rule


_LEFT = ("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "__lshift__.Scalar")
_RIGHT = ("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "__rshift__.Scalar")
lowers(*_LEFT, "__lshift__.Tensor")(_shift(lax.shift_left))
lowers(*_RIGHT, "__rshift__.Tensor")(
    _shift(
        lambda x, y: (
            lax.shift_right_arithmetic(x, y)
            if jnp.issubdtype(x.dtype, jnp.signedinteger)
            else lax.shift_right_logical(x, y)
        )
    )
)


@lowers("heaviside")
def heaviside(x: Array, value: Array) -> Array:
    x, value = operands(x, value, dtype=torch_dtype(x))
    zero = lax.full_like(x, 0)
    found = jnp.where(x == zero, value, jnp.where(x > zero, lax.full_like(x, 1), zero))
    return cast(found, torch_dtype(x))


@lowers("ldexp.Tensor")
def ldexp(x: Array, exponent: Array) -> Array:
    return mul(x, elementwise(lax.exp2, exponent, to_float=True))


# ------------------------------------------------------------------ three operands
@lowers("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(condition: Array, x: Any, y: Any) -> Array:
    dtype = result_type(x, y)
    condition, x, y = broadcast(cast(condition, torch.bool), cast(x, dtype), cast(y, dtype))
    return lax.select(condition, x, y)


@lowers("clamp", "clamp.Tensor", "clip", "clip.Tensor")
def clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    dtype = result_type(x, min, max)
    nan = None
    if not is_array(min) and min is not None and math.isnan(min):
        nan = min
    if not is_array(max) and max is not None and math.isnan(max):
        nan = max
    x = cast(x, dtype)
    if nan is not None and dtype.is_floating_point:
        return lax.full_like(x, math.nan)
    if min is not None:
        x = lax.max(*operands(x, min, dtype=dtype))
    if max is not None:
        x = lax.min(*operands(x, max, dtype=dtype))
    return x


@lowers("clamp_min", "clamp_min.Tensor")
def clamp_min(x: Array, min: Any) -> Array:
    return clamp(x, min)


@lowers("clamp_max", "clamp_max.Tensor")
def clamp_max(x: Array, max: Any) -> Array:
    return clamp(x, None, max)


@lowers("addcmul")
def addcmul(x: Array, a: Array, b: Array, *, value: Number = 1) -> Array:
    return elementwise(lambda u, v, w: u + lax.full_like(u, value) * v * w, x, a, b, precise=True)


@lowers("addcdiv")
def addcdiv(x: Array, a: Array, b: Array, *, value: Number = 1) -> Array:
    return elementwise(lambda u, v, w: u + lax.full_like(u, value) * v / w, x, a, b, precise=True)


@lowers("lerp.Scalar", "lerp.Tensor")
def lerp(start: Array, end: Array, weight: Any) -> Array:
    dtype = torch_dtype(start)

    def fn(a: Array, b: Array, w: Array) -> Array:
        span = b - a
        # From the nearer end, as torch does: exact at both.
        return jnp.where(jnp.abs(w) < 0.5, a + w * span, b - span * (1 - w))

    inner = torch.float32 if dtype.itemsize < 4 else dtype
    return cast(fn(*operands(start, end, weight, dtype=inner)), dtype)


@lowers("isclose")
def isclose(
    x: Array, y: Array, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Array:
    return jnp.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)
