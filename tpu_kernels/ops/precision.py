"""Matrix products inside a kernel at a chosen precision.

The MXU multiplies bfloat16 and adds in float32. A float32 product is therefore one of three things:

=============  ======  ==================================  =========================================
precision      passes  error against float64, normal data  how
=============  ======  ==================================  =========================================
"default"      1       2e-3                                operands rounded to bfloat16 on their way
"high"         3       5e-6                                written out below: Mosaic has no HIGH
"highest"      6       5e-7                                Mosaic's own HIGHEST
=============  ======  ==================================  =========================================

None means "default". bfloat16 operands are exact in one pass, so `precision` changes nothing there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_kernels.errors import ArgumentError

PRECISIONS = (None, "default", "high", "highest")

Contraction = tuple[tuple[int, ...], tuple[int, ...]]


def check_precision(precision: str | None, kernel: str) -> None:
    """Refuse a precision that no kernel knows.

    Args:
        precision: The value passed by the caller.
        kernel: Name of the kernel, for the message.

    Raises:
        ArgumentError: It is none of None, "default", "high", "highest".

    Example:
        >>> check_precision("high", "tpu::matmul")
    """
    if precision not in PRECISIONS:
        raise ArgumentError(
            f"kernel {kernel!r}: argument 'precision' is {precision!r}",
            hint="pass one of " + ", ".join(repr(p) for p in PRECISIONS),
        )


def dot(x: jax.Array, y: jax.Array, contract: Contraction, precision: str | None) -> jax.Array:
    """Multiply two tiles and accumulate in float32.

    Args:
        x: Left tile, 2-d, bfloat16 or float32.
        y: Right tile, 2-d, of the same dtype.
        contract: The contracted dimension of each, as in `jax.lax.dot_general`;
            ``((1,), (0,))`` is ``x @ y``.
        precision: None, "default", "high" or "highest".

    Returns:
        The float32 product: the free dimension of `x`, then that of `y`.

    Example:
        >>> dot(jnp.ones((2, 3)), jnp.ones((3, 4)), ((1,), (0,)), "high").shape
        (2, 4)
    """
    if x.dtype == jnp.float32 and precision == "high":
        return _three_passes(x, y, contract)
    exact = x.dtype == jnp.float32 and precision == "highest"
    # Always a value, never None: None would let `jax.default_matmul_precision` of the calling
    # process leak into the kernel, and HIGHEST on bfloat16 operands is not what Mosaic expects.
    return _pass(x, y, contract, jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT)


def _pass(
    x: jax.Array, y: jax.Array, contract: Contraction, precision: jax.lax.Precision
) -> jax.Array:
    return jax.lax.dot_general(
        x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _three_passes(x: jax.Array, y: jax.Array, contract: Contraction) -> jax.Array:
    """bf16_3x: two bfloat16 halves per operand; low x low is left out, 2^-16 of the product."""
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    one = jax.lax.Precision.DEFAULT
    low = _pass(x_low, y_high, contract, one) + _pass(x_high, y_low, contract, one)
    # An infinite element has the low half inf - inf, and inf x 0 arises in the mixed passes: both
    # are NaN where float32 says inf. high x high alone is right there, NaN included.
    low = jnp.where(jnp.isnan(low), 0.0, low)
    return low + _pass(x_high, y_high, contract, one)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Rounding to nearest even; cutting the low bits off instead would triple the error and bias it.
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
