"""The parts of ``torch.accelerator`` that a Python backend cannot provide itself.

torch asks its C++ device guard to synchronise and its C++ allocator for statistics; both raise
for a Python backend. The allocator is the host's, so the memory that there is and that is left are
the host's as well; what the device's tensors hold is counted when it is asked for (`memory`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from tpu_kernels._compat_torch import replace_accelerator_functions
from tpu_kernels.backends.device import memory, modes


def register() -> None:
    """Make `torch.accelerator.synchronize` and the memory functions answer for the device."""
    replace_accelerator_functions(
        {
            "synchronizeDevice": _synchronize,
            "isAllocatorInitialized": lambda: True,
            "getDeviceStats": _device_stats,
            "resetPeakStats": memory.reset_peak_memory_stats,
            "resetAccumulatedStats": lambda index=0: None,
            "emptyCache": lambda: None,
            "getMemoryInfo": _memory_info,
            "getDeviceCapability": _capability,
        }
    )


def _synchronize(index: int = 0) -> None:
    """Run what the calling thread has deferred; all other work is done."""
    modes.finish()


def _capability(index: int = 0) -> dict[str, Any]:
    """Return what `torch.accelerator.get_device_capability` returns: every dtype of the host."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {"supported_dtypes": found}


def _device_stats(index: int = 0) -> dict[str, Any]:
    """Return what `torch.accelerator.memory_stats` flattens."""
    found: dict[str, Any] = {}
    for name, value in memory.memory_stats().items():
        kind, pool, which = name.split(".")
        found.setdefault(kind, {}).setdefault(pool, {})[which] = value
    return found


def _memory_info(index: int = 0) -> tuple[int, int]:
    """Return free and total host memory in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
