"""Functions of higher layers that every kernel, present and future, is handed to.

A layer above may arrive after the kernels (DTensor rules come with ``torch.distributed.tensor``)
and a kernel after that layer; both directions meet here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel

Hook = Callable[["Kernel"], None]

_lock = threading.RLock()
_hooks: dict[str, Hook] = {}
_kernels: weakref.WeakSet[Kernel] = weakref.WeakSet()


def add_hook(name: str, hook: Hook) -> None:
    """Call a function with every kernel, present and future.

    Args:
        name: Identifies the hook; a second one of the same name changes nothing.
        hook: Called once with each kernel.
    """
    with _lock:
        if name in _hooks:
            return
        _hooks[name] = hook
        for kernel in list(_kernels):
            hook(kernel)


def add_kernel(kernel: Kernel) -> None:
    """Hand a new kernel to every hook, present and future."""
    with _lock:
        _kernels.add(kernel)
        for hook in _hooks.values():
            hook(kernel)


def remove_kernel(kernel: Kernel) -> None:
    """Forget a kernel that was replaced."""
    with _lock:
        _kernels.discard(kernel)
