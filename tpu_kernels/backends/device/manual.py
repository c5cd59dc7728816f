"""Operators that no generated handler can run: allocation, copies, resizing, storage.

They exist because memory changes hands in them (a copy between devices, a tensor that takes over
other memory), or because torch routes PrivateUse1 to operators that its CPU backend does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tpu_kernels._compat_torch import redispatcher
from tpu_kernels.backends.device.capsule import to_cpu, unwrap, wrap
from tpu_kernels.backends.device.handlers import CPU_KEYS, adopt, mixed_devices
from tpu_kernels.backends.device.installation import limits
from tpu_kernels.errors import DeviceError

aten = torch.ops.aten
_CPU = torch.device("cpu")
_set_storage_at = redispatcher(aten.set_.source_Storage_storage_offset)
_set_whole_storage = redispatcher(aten.set_.source_Storage)
_set_tensor = redispatcher(aten.set_.source_Tensor)

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

MANUAL: dict[str, Callable[..., Any]] = {}


# Those that compute nothing, in any mode.
MEMORY_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "empty.memory_format",
        "empty_strided",
        "_efficientzerotensor",
        "resize_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "set_",
    )
)


def _implements(*names: str) -> Callable[[Kernel], Kernel]:
    def register(function: Kernel) -> Kernel:
        MANUAL.update(dict.fromkeys(names, function))
        return function

    return register


@_implements("aten::empty.memory_format")
def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    _refuse_layout(layout)
    if memory_format is None:
        return wrap(torch.empty(size, dtype=dtype, device=_CPU))
    return wrap(torch.empty(size, dtype=dtype, device=_CPU, memory_format=memory_format))


@_implements("aten::empty_strided")
def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    _refuse_layout(layout)
    return wrap(torch.empty_strided(size, stride, dtype=dtype, device=_CPU))


@_implements("aten::_efficientzerotensor")
def _zeros(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    # torch's zero tensors have no memory, which is what a device tensor here is made of.
    return wrap(torch.zeros(size, dtype=dtype, device=_CPU))


def _refuse_layout(layout: torch.layout | None) -> None:
    if layout is not None and layout is not torch.strided:
        raise NotImplementedError(
            f"the simulated tpu device has no {layout} tensors, as TPUs have none; use dense ones"
        )


@_implements("aten::copy_")
def _copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to_cpu(self).copy_(to_cpu(src))
    return self


@_implements("aten::_copy_from")
def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to_cpu(dst).copy_(to_cpu(self))
    return dst


@_implements("aten::_copy_from_and_resize")
def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    return _copy_from(self, dst)


@_implements("aten::_to_copy")
def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    _refuse_layout(layout)
    copied: torch.Tensor = aten._to_copy.default(
        to_cpu(self), dtype=dtype, device=_CPU, memory_format=memory_format
    )
    if device is None or device.type == "tpu":
        return wrap(copied)
    return copied if device.type == "cpu" else copied.to(device)


@_implements("aten::resize_")
def _resize_(
    self: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if memory_format is None and list(size) == list(self.shape):
        return self  # as in C++, strides are kept
    if memory_format is None or memory_format is torch.contiguous_format:
        strides = [math.prod(max(s, 1) for s in size[i + 1 :]) for i in range(len(size))]
    else:
        strides = list(torch.empty(size, device="meta", memory_format=memory_format).stride())
    offset, storage = self.storage_offset(), self.untyped_storage()
    count = math.prod(size)
    needed = (offset + count) * self.element_size() if count else 0
    if needed <= storage.nbytes():
        return _set_storage_at(CPU_KEYS, self, storage, offset, size, strides)  # type: ignore[no-any-return]
    # torch cannot grow the storage of a Python backend, so this tensor moves to larger memory;
    # other views of the old storage stay there.
    memory = torch.empty(needed, dtype=torch.uint8, device=_CPU)
    if storage.nbytes():
        whole = wrap(torch.empty(0, dtype=torch.uint8, device=_CPU))
        memory[: storage.nbytes()].copy_(unwrap(_set_whole_storage(CPU_KEYS, whole, storage)))
    grown = wrap(memory)
    return _set_storage_at(  # type: ignore[no-any-return]
        CPU_KEYS, self, grown.untyped_storage(), offset, size, strides
    )


@_implements("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset")
def _set_from_storage(
    self: torch.Tensor,
    source: torch.UntypedStorage,
    storage_offset: int | None = None,
    size: Sequence[int] | None = None,
    stride: Sequence[int] = (),
) -> torch.Tensor:
    if source.device.type != "tpu":
        raise _wrong_storage(source)
    if size is None:
        return _set_whole_storage(CPU_KEYS, self, source)  # type: ignore[no-any-return]
    return _set_storage_at(CPU_KEYS, self, source, storage_offset, size, stride)  # type: ignore[no-any-return]


def _wrong_storage(source: torch.UntypedStorage) -> RuntimeError:
    for feature, reason in limits().items():
        if "storages" in feature:
            return DeviceError(f"{feature} do not work here: {reason}", hint="use .cpu() tensors")
    return RuntimeError(
        f"Expected a storage on tpu:0 for a tensor on tpu:0, but it is on {source.device}"
    )


@_implements("aten::set_.source_Tensor")
def _set_from_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if source.get_device() < 0:
        raise mixed_devices()
    return _set_tensor(CPU_KEYS, self, source)  # type: ignore[no-any-return]


@_implements("aten::set_")
def _set_nothing(self: torch.Tensor) -> torch.Tensor:
    adopt(self, torch.empty(0, dtype=self.dtype, device=_CPU))
    return self


@_implements("aten::convolution_overrideable")
def _convolution(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    return wrap(
        aten.convolution.default(
            unwrap(input), unwrap(weight), None if bias is None else unwrap(bias), *rest
        )
    )


@_implements("aten::convolution_backward_overrideable")
def _convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    bias_size = [weight.shape[1] * groups if transposed else weight.shape[0]]
    gradients = aten.convolution_backward.default(
        unwrap(grad_output), unwrap(input), unwrap(weight), bias_size, stride, padding, dilation,
        transposed, output_padding, groups, output_mask,
    )  # fmt: skip
    return tuple(None if g is None else wrap(g) for g in gradients)
