"""The same memory seen from two devices: a DLPack capsule with its device field rewritten.

A CPU tensor exported with DLPack carries ``kDLCPU`` in its capsule. With that field set to
``kDLExtDev``, torch imports it again as a tensor on the PrivateUse1 device: an ordinary
`torch.Tensor`, on the same memory, which keeps the original allocation alive. The way back is the
same with the field set the other way. Both ways copy nothing and take about 1 µs.

The two offsets used here (the pointer inside a capsule object, the device type inside DLPack's
struct) are verified by `selftest.check_capsule` before anything relies on them.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from tpu_kernels._compat_torch import from_dlpack, negative_view, storage_id, to_dlpack
from tpu_kernels.backends.device.layouts import unsupported
from tpu_kernels.errors import DeviceError

CAPSULE_POINTER_OFFSET = 16  # PyCapsule: the object header, then `void *pointer`
DEVICE_TYPE_OFFSET = 8  # DLTensor: `void *data`, then `int32 device_type, int32 device_id`
KDL_CPU = 1
KDL_EXT_DEV = 12

# Reading the pointer out of the capsule object costs a third of calling PyCapsule_GetPointer.
_uint64_at = ctypes.c_uint64.from_address
_int32_at = ctypes.c_int32.from_address

# Recorded calls that have not run (deferred mode), by whatever identifies their owner. Each has
# `settle(storage)`, which runs them if they concern a storage, and `flush()`.
ACTIVE: dict[int, Any] = {}


class _Unsettled(threading.local):
    on = False


UNSETTLED = _Unsettled()
"""Whether the calling thread looks at sizes only, so that values need not be there."""


def settle(storage: int) -> None:
    """Run what was recorded about a storage, so that its memory holds its value."""
    if not UNSETTLED.on:
        for owner in tuple(ACTIVE.values()):
            owner.settle(storage)


def settle_all() -> None:
    """Run everything that was recorded, by any thread."""
    for owner in tuple(ACTIVE.values()):
        owner.flush()


def mark_tpu(capsule: Any) -> None:
    """Declare a fresh DLPack capsule of CPU memory to be on the simulated device, in place.

    Args:
        capsule: An unconsumed ``"dltensor"`` capsule, from torch or from any other library.

    Raises:
        DeviceError: If the capsule holds memory of a device other than the CPU.
    """
    field = _int32_at(_uint64_at(id(capsule) + 16).value + 8)
    if field.value != 1:
        raise _foreign(field.value)
    field.value = 12


def mark_cpu(capsule: Any) -> None:
    """Declare a fresh DLPack capsule of a simulated-device tensor to be CPU memory, in place.

    Args:
        capsule: An unconsumed ``"dltensor"`` capsule of a tensor on the simulated device.

    Raises:
        DeviceError: If the capsule holds memory of any other device.
    """
    field = _int32_at(_uint64_at(id(capsule) + 16).value + 8)
    if field.value != 12:
        raise _foreign(field.value)
    field.value = 1


# `wrap` and `unwrap` repeat the two functions above: a call saved is a tenth of an operator's cost.


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor's memory as a device tensor: `to_tpu` for kernels.

    Does without lazy bits; the CPU tensor must be a temporary, or stay on its memory.
    """
    try:
        capsule = to_dlpack(tensor)
    except (RuntimeError, BufferError) as error:
        raise _without_memory(tensor, error) from error
    field = _int32_at(_uint64_at(id(capsule) + 16).value + 8)
    if field.value != 1:
        raise _foreign(field.value)
    field.value = 12
    return from_dlpack(capsule)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """Return a device tensor's memory as a CPU tensor: `to_cpu` for kernels.

    Does without lazy bits; the result must not outlive the kernel's call.
    """
    if ACTIVE:
        settle(storage_id(tensor))
    capsule = to_dlpack(tensor)
    field = _int32_at(_uint64_at(id(capsule) + 16).value + 8)
    if field.value != 12:
        raise _foreign(field.value)
    field.value = 1
    return from_dlpack(capsule)


def _without_memory(tensor: torch.Tensor, error: Exception) -> Exception:
    if tensor.layout is torch.strided and not tensor.is_quantized:
        return error
    return unsupported("quantized" if tensor.is_quantized else str(tensor.layout))


def _foreign(device_type: int) -> DeviceError:
    return DeviceError(
        f"expected memory of the CPU or of the simulated tpu device, found DLPack device type "
        f"{device_type}",
        hint="move the tensor to 'cpu' or 'tpu' first",
    )


def to_tpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a CPU tensor's memory on the simulated device, without copying.

    Args:
        tensor: CPU tensor of any shape, strides and dtype. A tensor that is already on the
            simulated device is returned as it is.

    Returns:
        A tensor on ``tpu:0`` with the same shape, strides and memory, detached from autograd.

    Example:
        >>> import torch, tpu_kernels.device
        >>> c = torch.zeros(2)
        >>> t = to_tpu(c)
        >>> _ = t.add_(1)
        >>> t.device, c.tolist()
        (device(type='tpu', index=0), [1.0, 1.0])
    """
    if tensor.get_device() >= 0:
        return tensor
    # An export keeps alive the tensor, not its storage: a tensor that is later given other memory
    # (`set_`, `.data =`) would leave the import dangling. Nobody can do that to a detached alias.
    return with_lazy_bits(wrap(tensor.detach()), tensor)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a simulated-device tensor's memory on the CPU, without copying.

    Args:
        tensor: Tensor on the simulated device, of any shape, strides and dtype. A CPU tensor is
            returned as it is.

    Returns:
        A CPU tensor with the same shape, strides and memory, detached from autograd.

    Example:
        >>> import torch, tpu_kernels.device
        >>> t = torch.zeros(2, device="tpu")
        >>> _ = to_cpu(t).add_(1)
        >>> t.tolist()
        [1.0, 1.0]
    """
    if tensor.get_device() < 0:
        return tensor
    return with_lazy_bits(unwrap(tensor.detach()), tensor)


def with_lazy_bits(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return an import with the lazy conjugation and negation of its source, unknown to DLPack."""
    if source.is_conj():
        result = result.conj()
    if source.is_neg():
        result = negative_view(result)
    return result
