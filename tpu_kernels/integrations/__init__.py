"""What other libraries expect of kernels: DTensor, and the source interface of TorchTPU.

Example:
    >>> import jax, torch
    >>> from tpu_kernels import integrations
    >>> @integrations.jax_op("doc::twice_as_much")
    ... def twice_as_much(x: jax.Array) -> jax.Array:
    ...     return x * 2
    >>> twice_as_much(torch.ones(2))
    tensor([2., 2.])
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kernels.integrations.torchtpu import jax_op

__all__ = ["install", "jax_op"]

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Make kernels known to the libraries that this process uses, now or later.

    Called on the first use of the package's API. It costs next to nothing: DTensor's rules are
    attached when the program itself imports ``torch.distributed.tensor``.
    """
    global _installed
    with _lock:
        if _installed:
            return
        from tpu_kernels._compat_torch import after_import
        from tpu_kernels.backends import device

        after_import("torch.distributed.tensor", _attach_dtensor)
        device.when_installed(_provide_torch_tpu_pallas)
        _installed = True


def _attach_dtensor(module: Any) -> None:
    from tpu_kernels.integrations import attachment

    attachment.attach_to_kernels(module.DTensor)


def _provide_torch_tpu_pallas() -> None:
    from tpu_kernels.integrations import torchtpu

    torchtpu.register_module()


def __getattr__(name: str) -> Any:
    if name != "jax_op":
        raise AttributeError(f"module 'tpu_kernels.integrations' has no attribute {name!r}")
    importlib.import_module("tpu_kernels.backends").ready()
    install()
    value = importlib.import_module("tpu_kernels.integrations.torchtpu").jax_op
    globals()[name] = value
    return value
