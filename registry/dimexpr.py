"""JAX dimension expressions evaluated on torch's symbolic integers, without installing guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpu_kernels import _compat_jax

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


def evaluate(dimension: Any, sizes: Mapping[str, Any]) -> Any:
    """The value of a JAX dimension, with torch sizes for its variables.

    Args:
        dimension: An int, or a symbolic dimension of `jax.export`.
        sizes: An int or `torch.SymInt` for each variable.

    Returns:
        An int or `torch.SymInt`.

    Raises:
        KeyError: The expression uses an operation that is not known here.

    Example:
        >>> from jax import export
        >>> (n,) = export.symbolic_shape("8*floordiv(b + 7, 8) + max(b, 3)")
        >>> evaluate(n, {"b": 10})
        26
    """
    if isinstance(dimension, int):
        return dimension
    total: Any = 0
    for factors, coefficient in _compat_jax.dimension_terms(dimension):
        product: Any = coefficient
        for leaf, exponent in factors:
            if isinstance(leaf, str):
                value = sizes[leaf]
            else:
                operation, operands = leaf
                value = _OPERATIONS[operation](*(evaluate(o, sizes) for o in operands))
            for _ in range(exponent):
                product = value if isinstance(product, int) and product == 1 else product * value
        total = product if isinstance(total, int) and total == 0 else total + product
    return total
