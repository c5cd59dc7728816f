"""Device tensors on their way to another process: as copies of their bytes.

A device shares no memory between processes, and torch has no way of sending PrivateUse1 tensors at
all. `torch.multiprocessing` asks a table of functions how objects are sent; for tensors on the
device it gets these. Bytes, not shared memory, which is gone if the sender ends first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from tpu_kernels.backends.device.capsule import to_cpu, to_tpu
from tpu_kernels.errors import DeviceError

_NOTICE = (
    "a tensor on tpu goes to another process as a copy: what one writes, the other does not "
    "see. Send .cpu() tensors to share memory"
)


def register() -> None:
    """Let queues, pipes and the arguments of processes take tensors on the device."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "tpu":
        return reductions.reduce_tensor(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a non-leaf tensor that requires a gradient cannot go to another process: its graph "
            "stays here; send tensor.detach()"
        )
    warnings.warn(_NOTICE, stacklevel=2)
    flat = to_cpu(tensor.detach()).resolve_conj().resolve_neg().reshape(-1)
    values = flat.contiguous().view(torch.uint8).numpy()
    about = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    return _rebuild, (values, *about, isinstance(tensor, torch.nn.Parameter))


def _rebuild(
    values: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, parameter: bool
) -> torch.Tensor:
    from tpu_kernels.backends.device.installation import install

    install()
    tensor = to_tpu(torch.from_numpy(values.copy()).view(dtype).reshape(shape))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type == "tpu":
        raise DeviceError(
            "a storage on tpu cannot go to another process",
            hint="send the tensor, which is copied, or a .cpu() tensor, whose memory is shared",
        )
    reduce: Callable[[Any], Any] = reductions.reduce_storage
    return reduce(storage)
