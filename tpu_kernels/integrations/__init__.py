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

import contextlib
import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kernels.integrations.torchtpu import jax_op
    from tpu_kernels.integrations.transformers_attention import register_attention

__all__ = ["install", "jax_op", "register_attention"]

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
        after_import("transformers.modeling_utils", _register_attention)
        after_import("torch.nn.attention.flex_attention", _attach_flex_attention)
        device.when_installed(_provide_torch_tpu_pallas)
        _installed = True


def _attach_dtensor(module: Any) -> None:
    from tpu_kernels.integrations import attachment

    attachment.attach_to_kernels(module.DTensor)


def _register_attention(_: Any) -> None:
    from tpu_kernels.errors import MissingDependency
    from tpu_kernels.integrations import transformers_attention

    # An old version of transformers has no interface to register with, and works as before.
    with contextlib.suppress(MissingDependency):
        transformers_attention.register_attention()


def _attach_flex_attention(module: Any) -> None:
    from tpu_kernels.integrations import flex_attention

    flex_attention.attach(module)


def _provide_torch_tpu_pallas() -> None:
    from tpu_kernels.integrations import torchtpu

    torchtpu.register_module()


_WHERE = {"jax_op": "torchtpu", "register_attention": "transformers_attention"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tpu_kernels.integrations' has no attribute {name!r}")
    importlib.import_module("tpu_kernels.backends").ready()
    install()
    value = getattr(importlib.import_module(f"tpu_kernels.integrations.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
