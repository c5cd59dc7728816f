"""Tensors that the device cannot hold: sparse, quantized, nested. Their operators say so.

torch keeps a dispatch key for each of these layouts on each device. Without a kernel there, an
error of the dispatcher names the key and lists every backend that torch knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

_LAYOUTS = {
    "SparsePrivateUse1": "torch.sparse_coo",
    "SparseCsrPrivateUse1": "torch.sparse_csr",
    "QuantizedPrivateUse1": "quantized",
    "NestedTensorPrivateUse1": "strided nested",
}


def register() -> torch.library.Library:
    """Let every operator on a tensor of such a layout raise a `NotImplementedError` that says why.

    Returns:
        The library that holds the registrations; it must outlive the device.
    """
    library = torch.library.Library("_", "IMPL")
    for key, layout in _LAYOUTS.items():
        library.fallback(_refusal(layout), key)
    return library


def _refusal(layout: str) -> Callable[..., NoReturn]:
    def refuse(operator: OpOverload, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported(layout, operator.name())

    return refuse


def unsupported(layout: str, operator: str | None = None) -> NotImplementedError:
    """Return the error for a layout that the device does not have.

    Args:
        layout: Its name.
        operator: Who met it.
    """
    where = "" if operator is None else f"{operator}: "
    instead = "torch.jagged ones or " if "nested" in layout else ""
    return NotImplementedError(
        f"{where}the simulated tpu device has no {layout} tensors, as TPUs have none; use "
        f"{instead}dense ones, or keep this part on the CPU"
    )
