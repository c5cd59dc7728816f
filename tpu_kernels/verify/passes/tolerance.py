"""How far a result in few bits may lie from the float64 reference, and where it lies furthest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tpu_kernels import _compat_jax
from tpu_kernels.dsl.dtypes import PACKED

_REDUCTIONS = ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "reduce_and", "reduce_or")
_ROUNDINGS = 4  # half a unit for inputs, intermediate results and output each, and some to spare
# Error of one float32 product on the MXU by its precision, of the largest value (docs/numerics.md).
_PRODUCTS = {"DEFAULT": 2.6e-3, "HIGH": 1.3e-5, "HIGHEST": 5e-7}
_SUM_FACTOR = 16  # of the random walk of rounding errors, at the unlucky element of many


def reduction_size(jaxpr: Any) -> int:
    """Number of terms in the longest sum that a traced program forms.

    Args:
        jaxpr: A closed jaxpr.

    Returns:
        The largest product of contracted sizes, trip counts and grid steps around one reduction, at
        least 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4, 256), "float32")
        >>> reduction_size(jax.make_jaxpr(lambda x: jnp.sum(x, axis=1))(x))
        256
    """
    longest = 1
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            longest = max(longest, math.prod(eqn.invars[0].aval.shape[a] for a in contracted))
        elif name in _REDUCTIONS:
            taken, left = eqn.invars[0].aval.size, max(eqn.outvars[0].aval.size, 1)
            longest = max(longest, taken // left if taken > left else 1)
        else:
            inner = max((reduction_size(j) for j in _compat_jax.inner_jaxprs(eqn)), default=1)
            longest = max(longest, inner * _trips(eqn))
    return int(longest)


def _trips(eqn: Any) -> int:
    """How often an equation's body may add to the same result."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "pallas_call":
        mapping = eqn.params["grid_mapping"]
        steps = math.prod(size for size in mapping.grid if isinstance(size, int))
        blocks = 1
        for block in mapping.block_mappings[mapping.num_inputs :]:
            sizes = [getattr(s, "block_size", s) for s in block.block_shape]
            ratio = math.prod(block.array_aval.shape) / max(
                1, math.prod(s for s in sizes if isinstance(s, int))
            )
            blocks = max(blocks, math.ceil(ratio))
        return max(1, steps // blocks)
    return 1


def product_precision(jaxpr: Any) -> str | None:
    """The coarsest precision of the float32 products of a traced program, None if it has none.

    Args:
        jaxpr: A closed jaxpr.

    Returns:
        ``"DEFAULT"``, ``"HIGH"`` or ``"HIGHEST"``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> product_precision(jax.make_jaxpr(lambda x: jnp.dot(x, x, precision="high"))(x))
        'HIGH'
    """
    from tpu_kernels.registry.numerics import jaxpr as products

    found: list[str] = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = [product_precision(j) for j in _compat_jax.inner_jaxprs(eqn)]
        found += [name for name in (products.product_precision(eqn), *inner) if name in _PRODUCTS]
    return max(found, key=_PRODUCTS.__getitem__, default=None)


def tolerance(dtypes: Sequence[torch.dtype], terms: int, product: str | None = None) -> float:
    """Error to accept, relative to the largest magnitude of the reference.

    Rounding once costs half a unit of the coarsest dtype involved, a handful of times in a kernel.
    A sum of K terms in float32 drifts by about sqrt(K) units; the largest of many elements by
    several times that. A wrong mask, block or index is off by orders more.

    Args:
        dtypes: Dtypes of inputs and outputs.
        terms: `reduction_size` of the program.
        product: `product_precision` of the program, where products are rounded as on a TPU.

    Returns:
        The tolerance, 0 where nothing is rounded.

    Example:
        >>> f"{tolerance([torch.bfloat16], 1):.3f}", f"{tolerance([torch.float32], 1024):.0e}"
        ('0.031', '6e-05')
    """
    inexact = [d.to_real() if d.is_complex else d for d in dtypes]
    inexact = [d for d in inexact if d.is_floating_point and d not in PACKED]  # those are only read
    if not inexact:
        return 0.0
    coarsest = max(torch.finfo(d).eps for d in inexact)
    sums = torch.finfo(torch.float32).eps if coarsest > 1e-10 else coarsest
    rounded = _PRODUCTS[product] if product is not None else 0.0
    return float(_ROUNDINGS * (coarsest + rounded) + _SUM_FACTOR * sums * math.sqrt(terms))


def largest_error(got: torch.Tensor, wanted: torch.Tensor, accepted: float) -> tuple[float, str]:
    """Compare a result with the reference.

    Args:
        got: The result.
        wanted: The reference, of the same shape.
        accepted: The tolerance; only used to decide whether a place is worth naming.

    Returns:
        The largest error relative to the largest magnitude of the reference (infinite where one is
        NaN or infinite and the other is not), and words that name the element.

    Example:
        >>> largest_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]), 0.1)
        (0.25, 'element [1] is 3, the reference 4')
    """
    if got.numel() == 0:
        return 0.0, ""
    wide = torch.complex128 if got.is_complex() or wanted.is_complex() else torch.float64
    a, b = got.detach().cpu().to(wide), wanted.detach().cpu().to(wide)
    strange = ~((a == b) | (a.isnan() & b.isnan())) & ~(a.isfinite() & b.isfinite())
    if bool(strange.any()):
        index = int(strange.reshape(-1).nonzero()[0])
        return math.inf, _named(a, b, index)
    error = torch.where(a.isfinite() & b.isfinite(), (a - b).abs(), 0.0)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    index = int(error.argmax())
    worst = float(error.reshape(-1)[index])
    relative = worst / scale if scale else (math.inf if worst else 0.0)
    return relative, _named(a, b, index) if relative > accepted else ""


def _named(a: torch.Tensor, b: torch.Tensor, flat: int) -> str:
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)]
    got, wanted = (t.reshape(-1)[flat].item() for t in (a, b))
    return f"element {index} is {got:.6g}, the reference {wanted:.6g}"
