"""How much memory the device's tensors hold, counted when somebody asks.

The memory comes from the host's allocator, which keeps no account per device; counting every
allocation would cost every operator. So the tensors that Python can see are looked through. What
only C++ holds (a tensor that autograd saved and that has no Python object) is not among them.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from tpu_kernels._compat_torch import storage_id

_lock = threading.Lock()
_peak = 0


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of the storages of all tensors on the device that Python can see.

    Args:
        device: ``"tpu"`` or None.

    Returns:
        Bytes; takes some milliseconds, since all objects of the process are looked through.

    Example:
        >>> import torch, tpu_kernels.device
        >>> before = torch.tpu.memory_allocated()
        >>> x = torch.zeros(1000, device="tpu")
        >>> torch.tpu.memory_allocated() - before
        4000
    """
    global _peak
    found: dict[int, int] = {}
    for value in gc.get_objects():
        # `type`, not `isinstance`: that would ask objects of any kind for their `__class__`.
        if issubclass(type(value), torch.Tensor) and _is_ours(value):
            found[storage_id(value)] = value.untyped_storage().nbytes()
    total = sum(found.values())
    with _lock:
        _peak = max(_peak, total)
    return total


def _is_ours(tensor: torch.Tensor) -> bool:
    # Fake tensors say that they are on the device, and hold nothing.
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "tpu"


def max_memory_allocated(device: Any = None) -> int:
    """Return the most that `memory_allocated` has found since `reset_peak_memory_stats`.

    It knows the moments at which it was asked, and no others.
    """
    memory_allocated(device)
    return _peak


def memory_reserved(device: Any = None) -> int:
    """Return `memory_allocated`: the host's allocator keeps nothing back for the device."""
    return memory_allocated(device)


def max_memory_reserved(device: Any = None) -> int:
    """Return `max_memory_allocated`."""
    return max_memory_allocated(device)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Forget the peak."""
    global _peak
    with _lock:
        _peak = 0


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return current and peak bytes under the names that `torch.cuda.memory_stats` has for them."""
    current = memory_allocated(device)
    return {
        f"{kind}_bytes.all.{which}": value
        for kind in ("allocated", "reserved")
        for which, value in (("current", current), ("peak", _peak))
    }
