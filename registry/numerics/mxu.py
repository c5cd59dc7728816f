"""What the MXU makes of a float32 product, in torch.

It multiplies bfloat16 and adds in float32. By the precision that was asked for, a float32 product
is one, three or six of those:

=============  ======  =============================================================
torch          passes  operands
=============  ======  =============================================================
``"medium"``   1       rounded to bfloat16
``"high"``     3       two bfloat16 each; low x low is left out
``"highest"``  6       three bfloat16 each; products below 2^-24 are left out
=============  ======  =============================================================

The halves of three and six passes are cut off, not rounded, and added from small to large: so does
the TPU compiler. Not known without a TPU, and assumed here: that the MXU rounds float32 operands to
the nearest, and adds without rounding to less than float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpu_kernels.registry.engine import current_mode

JAX_PRECISION = {"medium": "default", "high": "high", "highest": "highest"}
"""JAX's name for each precision of `torch.set_float32_matmul_precision`."""

_TOP_HALF = -65536  # 0xFFFF0000 of a float32: the bits that a bfloat16 has


def matmul_precision() -> str:
    """What ``torch.tpu.precision`` says where it is in force, else
    `torch.get_float32_matmul_precision`."""
    return current_mode().products or torch.get_float32_matmul_precision()


def jax_precision() -> str:
    """`matmul_precision` as JAX names it."""
    return JAX_PRECISION[matmul_precision()] if _asked is None else _asked()


_asked: Callable[[], str] | None = None


def ask_precision(function: Callable[[], str]) -> None:
    """Ask a device with settings of its own: TorchTPU has one for each thread too.

    Args:
        function: Returns ``"default"``, ``"high"`` or ``"highest"``.
    """
    global _asked
    _asked = function


def product(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """A product of float32 tensors as the MXU computes it.

    Args:
        multiply: Any function that is linear in both arguments: a matrix product, a convolution.
        x: Left operand, float32.
        y: Right operand, float32.

    Returns:
        ``multiply(x, y)``, rounded by the current `matmul_precision`.

    Example:
        >>> third = torch.full((1, 1), 1 / 3)
        >>> before = torch.get_float32_matmul_precision()
        >>> torch.set_float32_matmul_precision("medium")
        >>> product(torch.mm, third, torch.ones(1, 1)).item()
        0.333984375
        >>> torch.set_float32_matmul_precision(before)
    """
    *small, large = _pairs(x, y, matmul_precision())
    if not small:
        return multiply(*large)
    low = multiply(*small[0])
    for pair in small[1:]:
        low = low.add_(multiply(*pair))
    # An infinite operand has NaN for its lower parts, and infinity x 0 is NaN; the product of the
    # upper parts is right there.
    return low.masked_fill_(low.isnan(), 0.0).add_(multiply(*large))


def _pairs(
    x: torch.Tensor, y: torch.Tensor, precision: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is multiplied with what, in the order in which the TPU compiler adds the products."""
    if precision == "medium":
        return [(_rounded(x), _rounded(y))]
    (x1, xr), (y1, yr) = _cut(x), _cut(y)
    if precision == "high":
        return [(_rounded(xr), y1), (x1, _rounded(yr)), (x1, y1)]
    (x2, x3), (y2, y3) = _cut(xr), _cut(yr)
    x3, y3 = _top_half(x3), _top_half(y3)
    return [(x3, y1), (x1, y3), (_rounded(xr), _rounded(yr)), (x2, y1), (x1, y2), (x1, y1)]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _top_half(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & _TOP_HALF).view(torch.float32)


def _cut(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper half of the bits, and what is left."""
    top = _top_half(x)
    return top, x - top
