"""Tensors on the device whose memory does not exist yet.

A placeholder's storage has the right size and points to memory that all placeholders share, which
can only be read (as zeros). Nothing reads it: every kernel of the device first runs what it needs.
When the value is there, the storages swap their memory, so that all views see it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch

from tpu_kernels import _compat_torch as compat
from tpu_kernels.backends.device.handlers import CPU_KEYS
from tpu_kernels.errors import DeviceError

_RESERVED = 1 << 40  # addresses, not memory
_CPU = torch.device("cpu")
_DEVICE = torch.device("privateuseone", 0)  # "tpu", whose name torch may not have been told yet

_storage_on = compat.storage_on_memory
_empty = compat.tensor_without_memory
# What `before_data_ptr` leaves alone.
address_of = torch.UntypedStorage.data_ptr
_set_storage = compat.redispatcher(torch.ops.aten.set_.source_Storage_storage_offset)


@functools.cache
def _region() -> int:
    """The address of memory that is only ever read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    address = libc.mmap(None, _RESERVED, mmap.PROT_READ, flags, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise DeviceError(
            f"deferred mode needs {_RESERVED >> 40} TiB of addresses, which this system refuses "
            f"(errno {ctypes.get_errno()})",
            hint="raise the limit of the address space (ulimit -v)",
        )
    return int(address)


def placeholder(place: Any, nbytes: int) -> tuple[torch.Tensor, Any]:
    """Make a tensor without memory.

    Args:
        place: A `Geometry` with elements side by side.
        nbytes: Bytes of its elements.

    Returns:
        The tensor and its storage.
    """
    tensor = _empty(place.shape, place.dtype)
    storage: Any = tensor.untyped_storage()
    storage._swap_data_ptr_(_storage_on(_region(), _DEVICE, nbytes))
    if tensor.stride() != place.stride:
        _set_storage(CPU_KEYS, tensor, storage, 0, place.shape, place.stride)
    return tensor, storage


def give_memory(storage: Any, memory: torch.Tensor) -> None:
    """Let a placeholder's storage have the memory of a device tensor, which loses it."""
    storage._swap_data_ptr_(memory.untyped_storage())


def flat_cpu(storage: Any, dtype: torch.dtype) -> torch.Tensor:
    """All elements of a device storage as a CPU tensor that does not keep it alive."""
    memory = _storage_on(address_of(storage), _CPU, storage.nbytes())
    return torch.empty(0, dtype=dtype, device=_CPU).set_(memory)
