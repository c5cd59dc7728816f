"""The dtypes that torch and JAX share, and how a value crosses from one to the other.

Most dtypes cross as they are: same bits, same meaning. One exists in torch only as packed bytes:
``float4_e2m1fn_x2`` holds two 4-bit floats, the first in the low half. A tensor of it crosses as
``uint8``; in the program it is an array of ``float4_e2m1fn`` with a last dimension twice as long.
JAX's 4-bit and 2-bit integers have no counterpart: torch's dtypes of those names say nothing about
where the bits lie, and no operator but ``view`` takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    "float4_e2m1fn_x2": "float4_e2m1fn",
}

PACKED = {torch.float4_e2m1fn_x2: 2}
"""Values in one element, for the dtypes where that is not one."""

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
    dtype = _numpy_dtype(dtype)
    try:
        return _tables()[1][dtype]
    except KeyError:
        raise DTypeError(
            f"torch has no dtype with the bits of JAX's {dtype.name}",
            hint="convert the kernel's output to one of: " + ", ".join(_SAME_BITS),
        ) from None


def array_shape(shape: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """The shape of the array that a tensor becomes in a program.

    Example:
        >>> array_shape((2, 3), torch.float4_e2m1fn_x2), array_shape((2, 3), torch.int8)
        ((2, 6), (2, 3))
    """
    values = PACKED.get(dtype, 1)
    return tuple(shape) if values == 1 else (*shape[:-1], values * shape[-1])


def tensor_shape(shape: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """The shape of the tensor that an array becomes (the inverse of `array_shape`).

    Raises:
        DTypeError: The array does not fill whole elements of the tensor.

    Example:
        >>> tensor_shape((2, 6), torch.float4_e2m1fn_x2)
        (2, 3)
    """
    values = PACKED.get(dtype, 1)
    if values == 1:
        return tuple(shape)
    if not shape or shape[-1] % values != 0:
        raise DTypeError(
            f"an array of shape {tuple(shape)} cannot be a tensor of {dtype}, which holds {values} "
            "values in each element",
            hint=f"give the result a last dimension that is a multiple of {values}, or convert it "
            "to a wider dtype",
        )
    return (*shape[:-1], shape[-1] // values)


def can_leave(shape: Sequence[Any], dtype: Any) -> bool:
    """Whether an array can become a tensor.

    Example:
        >>> can_leave((3,), "float32"), can_leave((3,), "float4_e2m1fn"), can_leave((3,), "int4")
        (True, False, False)
    """
    try:
        tensor_shape(shape, to_torch(_numpy_dtype(dtype)))
    except DTypeError:
        return False
    return True


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
    return value if isinstance(value, torch.dtype) else to_torch(value)


def _numpy_dtype(value: Any) -> np.dtype[Any]:
    """A NumPy dtype, also by a name that only `ml_dtypes` knows."""
    import ml_dtypes

    if isinstance(value, str) and hasattr(ml_dtypes, value):
        value = getattr(ml_dtypes, value)
    dtype: np.dtype[Any] = np.dtype(value)
    return dtype


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's logical values as a NumPy array of the dtype that JAX uses for it.

    Example:
        >>> to_numpy(torch.ones(2, 3, dtype=torch.bfloat16).T).shape
        (3, 2)
        >>> to_numpy(torch.tensor([0x21], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)).tolist()
        [0.5, 1.0]
    """
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # NumPy has no bfloat16 of its own, so torch hands over bytes.
    flat = host.reshape(-1).view(torch.uint8).numpy()
    if tensor.dtype in PACKED:  # NumPy's own 4-bit values take a byte each
        flat = np.stack([flat & 15, flat >> 4], axis=-1).reshape(-1)
    shape = array_shape(host.shape, host.dtype)
    return flat.view(to_jax(tensor.dtype)).reshape(shape).copy()


def from_bytes(data: bytes, shape: Sequence[int], dtype: Any) -> torch.Tensor:
    """The tensor of a NumPy array that was turned into bytes.

    Args:
        data: The array's bytes.
        shape: The array's shape.
        dtype: The array's dtype, or its name.

    Example:
        >>> from_bytes(bytes([1, 2]), (2,), "float4_e2m1fn").view(torch.uint8)
        tensor([33], dtype=torch.uint8)
    """
    wanted = normalize(dtype)
    if not data:
        return torch.empty(tensor_shape(shape, wanted), dtype=wanted)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if wanted in PACKED:
        flat = flat[0::2] | flat[1::2] << 4
    return flat.view(wanted).reshape(tensor_shape(shape, wanted))
