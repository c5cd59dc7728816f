"""The MXU's rounding inside JAX programs, Pallas kernels included.

XLA on a CPU and Pallas' interpreters ignore ``precision``: every float32 product is exact there. A
program is traced, and each product of float32 operands in it is replaced by the passes that the TPU
compiler would make of it (see `mxu` for what these are).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_kernels import _compat_jax

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_RANK = {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}
# Names of `DotAlgorithmPreset` that the MXU has no other way to carry out than these.
_ALGORITHMS = {
    "BF16_BF16_F32": "DEFAULT",
    "BF16_BF16_F32_X3": "HIGH",
    "BF16_BF16_F32_X6": "HIGHEST",
}
_TOP_HALF = 0xFFFF0000  # of a float32: the bits that a bfloat16 has


def emulated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function whose float32 products are rounded as on a TPU.

    Args:
        function: Of arrays in nested tuples and lists. Its derivatives are to be taken inside of
            it: the rounding has none.

    Returns:
        A function of the same arguments, to be compiled by `jax.jit`.

    Example:
        >>> third = jnp.full((1, 1), 1 / 3)
        >>> float(emulated(jnp.dot)(third, jnp.ones((1, 1)))[0, 0])
        0.333984375
    """

    @functools.wraps(function)
    def program(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        rewritten = _compat_jax.replace_equations(closed, _rule)
        flat = jax.tree_util.tree_leaves(args)
        outputs = jax.extend.core.jaxpr_as_fun(rewritten)(*flat)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shapes), outputs)

    return program


def product_precision(equation: Any) -> str | None:
    """The MXU precision of an equation of a jaxpr; None if it multiplies no float32 matrices.

    Returns:
        ``"DEFAULT"`` (one pass), ``"HIGH"`` (three) or ``"HIGHEST"`` (six).
    """
    if equation.primitive.name not in _PRODUCTS:
        return None
    dtypes = [v.aval.dtype for v in equation.invars[:2]]
    if jnp.float32 not in dtypes or not set(dtypes) <= {jnp.dtype("float32"), jnp.bfloat16}:
        return None
    asked = equation.params.get("precision")
    each = asked if isinstance(asked, tuple) else (asked,)
    names = [_ALGORITHMS.get(n, n) for n in (getattr(p, "name", "DEFAULT") for p in each)]
    return max(names, key=lambda name: _RANK.get(name, 2))


def _rule(equation: Any) -> Callable[..., Any] | None:
    precision = product_precision(equation)
    if precision is None:
        return None
    params = dict(equation.params)
    params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    params["preferred_element_type"] = jnp.dtype("float32")
    (result,) = (v.aval for v in equation.outvars)

    def multiply(x: jax.Array, y: jax.Array, *rest: jax.Array) -> jax.Array:
        total: jax.Array = equation.primitive.bind(
            x.astype(jnp.float32), y.astype(jnp.float32), *rest, **params
        )
        return total

    def passes(x: jax.Array, y: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        *small, (a, b) = _pairs(x, y, precision)
        total = multiply(a, b, *rest)
        if small:
            terms = [multiply(a, b, *rest) for a, b in small]
            low = functools.reduce(jnp.add, terms)
            # An infinite operand has NaN for its lower parts, and infinity x 0 is NaN; the product
            # of the upper parts is right there.
            total = jnp.where(jnp.isnan(low), 0.0, low) + total
        return [total.astype(result.dtype)]

    return passes


def _pairs(x: jax.Array, y: jax.Array, precision: str) -> Sequence[tuple[jax.Array, jax.Array]]:
    """What is multiplied with what, in the order in which the TPU compiler adds the products."""
    if precision == "DEFAULT":
        return [(_rounded(x), _rounded(y))]
    (x1, xr), (y1, yr) = _cut(x), _cut(y)
    if precision == "HIGH":
        x2, y2 = _rounded(xr), _rounded(yr)
        return [(x2, y1), (x1, y2), (x1, y1)]
    (x2, x3), (y2, y3) = _cut(xr), _cut(yr)
    x3, y3 = _top_half(x3), _top_half(y3)
    return [(x3, y1), (x1, y3), (_rounded(xr), _rounded(yr)), (x2, y1), (x1, y2), (x1, y1)]


def _rounded(x: jax.Array) -> jax.Array:
    # Not a pair of casts: XLA may leave these out.
    return x if x.dtype == jnp.bfloat16 else lax.reduce_precision(x, 8, 7)


def _top_half(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(_TOP_HALF)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _cut(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper half of the bits, and what is left."""
    x = x.astype(jnp.float32)
    top = _top_half(x)
    return top, x - top
