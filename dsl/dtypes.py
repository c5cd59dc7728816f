"""The dtypes that torch and JAX share, and how a value crosses from one to the other.

Most dtypes cross as they are: same bits, same meaning. A few exist in torch only as packed bytes
(``float4_e2m1fn_x2`` holds two 4-bit floats); they cross by a view as ``uint8`` and a bitcast, see
`PACKED`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from tpu_kernels.errors import DTypeError

# torch name -> jax/ml_dtypes name, where both mean the same bits
_SAME_BITS = {
    "bool": "bool",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}

WIDE = frozenset({torch.int64, torch.uint64, torch.float64, torch.complex128})
"""The dtypes that a TPU does not compute in; the `int64` policy of a kernel decides about them."""

NARROW = {torch.int64: torch.int32, torch.uint64: torch.uint32}
"""What the policy ``"narrow_checked"`` turns a wide dtype into. Floats have no entry: narrowing
always rounds."""


@functools.cache
def _tables() -> tuple[dict[torch.dtype, np.dtype[Any]], dict[np.dtype[Any], torch.dtype]]:
    import ml_dtypes

    to_jax: dict[torch.dtype, np.dtype[Any]] = {}
    for torch_name, jax_name in _SAME_BITS.items():
        scalar = getattr(ml_dtypes, jax_name, None) or jax_name
        to_jax[getattr(torch, torch_name)] = np.dtype(scalar)
    return to_jax, {value: key for key, value in to_jax.items()}


def to_jax(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy/JAX dtype with the same bits as a torch dtype.

    Args:
        dtype: A torch dtype.

    Returns:
        The `numpy.dtype` (from `ml_dtypes` for bfloat16 and float8).

    Raises:
        DTypeError: JAX has no such dtype.

    Example:
        >>> to_jax(torch.bfloat16).name
        'bfloat16'
    """
    try:
        return _tables()[0][dtype]
    except KeyError:
        raise DTypeError(
            f"JAX has no dtype with the bits of {dtype}", hint=f"supported: {', '.join(_SAME_BITS)}"
        ) from None


def to_torch(dtype: Any) -> torch.dtype:
    """The torch dtype with the same bits as a JAX dtype.

    Args:
        dtype: Anything that `numpy.dtype` accepts.

    Returns:
        The torch dtype.

    Raises:
        DTypeError: torch has no such dtype.

    Example:
        >>> to_torch("float8_e4m3fn")
        torch.float8_e4m3fn
    """
    dtype = np.dtype(dtype)
    try:
        return _tables()[1][dtype]
    except KeyError:
        raise DTypeError(
            f"torch has no dtype with the bits of JAX's {dtype.name}",
            hint="convert the kernel's output to one of: " + ", ".join(_SAME_BITS),
        ) from None


def is_supported(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be passed to a kernel.

    Example:
        >>> is_supported(torch.bfloat16), is_supported(torch.quint8)
        (True, False)
    """
    return dtype in _tables()[0]


def normalize(value: Any) -> torch.dtype:
    """A torch, NumPy or JAX dtype, or its name, as a torch dtype (for arguments declared as a
    dtype).

    Example:
        >>> normalize(np.float32), normalize("bfloat16")
        (torch.float32, torch.bfloat16)
    """
    if isinstance(value, torch.dtype):
        return value
    import ml_dtypes

    if isinstance(value, str) and hasattr(ml_dtypes, value):
        value = getattr(ml_dtypes, value)
    return to_torch(value)
