"""The parts of ``torch.accelerator`` that a Python backend cannot provide itself.

torch asks its C++ device guard to synchronise and its C++ allocator for statistics; both raise
for a Python backend. The allocator is the host's, so the memory that there is and that is left are
the host's as well.
"""

from __future__ import annotations

import os

from tpu_kernels._compat_torch import replace_accelerator_functions


def register() -> None:
    """Make `torch.accelerator.synchronize` and the memory functions answer for the device."""
    replace_accelerator_functions(
        {
            "synchronizeDevice": _synchronize,
            # False: `memory_stats` and its like then answer zeros without asking the allocator.
            "isAllocatorInitialized": lambda: False,
            "getMemoryInfo": _memory_info,
        }
    )


def _synchronize(index: int = 0) -> None:
    """Do nothing: work is done when the call that asked for it returns."""


def _memory_info(index: int = 0) -> tuple[int, int]:
    """Return free and total host memory in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
