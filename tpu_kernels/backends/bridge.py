"""Tensors between torch and JAX without copies, by DLPack capsules.

An imported `jax.Array` is remembered for as long as the tensor lives: a tensor that is passed again
(a weight, a cache) costs a dictionary lookup. That is safe because a remembered array is the
tensor's own memory (never a copy), and because every kernel call is over before it returns:
programs run synchronously, and a later in-place write by torch cannot reach a running one. The
array behind a result is not remembered: torch's dispatcher makes a new Python object of a result
tensor, so that the memory would be lost at once, at a cost of 10 µs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels import _compat_jax, _compat_torch
from tpu_kernels.dsl import dtypes
from tpu_kernels.registry import donation

ALIGNMENT = 64
"""Bytes that XLA:CPU wants buffers aligned to; it silently copies others, and a copy must not be
remembered."""


class WrongDevice(Exception):
    """A tensor of another device than the bridge serves; the caller names the argument."""


class Bridge:
    """Both directions between torch tensors of one device type and `jax.Array` on the CPU.

    Args:
        device_type: ``"cpu"`` or ``"tpu"``.
        to_cpu_capsule: Marks a capsule that torch exported as CPU memory (in place), or None if it
            is.
        from_cpu_capsule: Marks a capsule that JAX exported as memory of the device (in place), or
            None.

    Attributes:
        to_jax: ``tensor -> jax.Array`` on the tensor's logical values.
        to_torch: ``jax.Array -> tensor``; waits for the value, and owns the memory.
    """

    def __init__(
        self,
        device_type: str,
        to_cpu_capsule: Callable[[Any], Any] | None = None,
        from_cpu_capsule: Callable[[Any], Any] | None = None,
    ) -> None:
        self.device_type = device_type
        # (array, weak reference to the tensor, data pointer, shape, dtype) by id of the tensor
        self._remembered: dict[int, tuple[Any, ...]] = {}
        self.remembered = self._remembered.get
        self._device = _compat_jax.cpu_device()
        self._mark_cpu = to_cpu_capsule
        self._mark_device = from_cpu_capsule
        self.to_jax = self._make_to_jax()
        self.to_torch = self._make_to_torch()
        donation.when_donated.append(self.forget)

    def forget(self, tensor: torch.Tensor) -> None:
        """Let go of a tensor's memory before the tensor dies."""
        self._remembered.pop(id(tensor), None)

    def _make_to_jax(self) -> Callable[[torch.Tensor], Any]:
        remembered, miss = self._remembered.get, self.import_tensor

        def to_jax(tensor: torch.Tensor) -> Any:
            hit = remembered(id(tensor))
            if hit is not None:
                array, reference, pointer, shape, dtype = hit
                if (
                    reference() is tensor
                    and tensor.data_ptr() == pointer
                    and tensor.shape == shape
                    and tensor.dtype is dtype
                    and tensor.is_contiguous()
                ):
                    return array
            return miss(tensor)

        return to_jax

    def import_tensor(self, tensor: torch.Tensor) -> Any:
        """Make an array of a tensor that is not remembered, and remember it."""
        if tensor.device.type != self.device_type:
            raise WrongDevice
        plain = tensor.detach()
        if plain.is_neg():
            plain = plain.resolve_neg()
        if plain.is_conj():
            plain = plain.resolve_conj()
        if plain.dtype in dtypes.PACKED:  # DLPack does not know it
            plain = plain.view(torch.uint8)
        plain = plain.contiguous()
        capsule = _compat_torch.to_dlpack(plain)
        if self._mark_cpu is not None:
            self._mark_cpu(capsule)
        array = _compat_jax.import_capsule(capsule, self._device)
        pointer = tensor.data_ptr()
        if pointer and plain.data_ptr() == pointer and pointer % ALIGNMENT == 0:
            self._remember(tensor, array, pointer)
        return array

    def _make_to_torch(self) -> Callable[[Any], torch.Tensor]:
        _, export = _compat_jax.capsule_functions()
        import_torch, mark = _compat_torch.from_dlpack, self._mark_device

        def to_torch(array: Any) -> torch.Tensor:
            return import_torch(export(array))

        def to_device(array: Any) -> torch.Tensor:
            capsule = export(array)
            mark(capsule)  # type: ignore[misc]
            return import_torch(capsule)

        return to_torch if mark is None else to_device

    def _remember(self, tensor: torch.Tensor, array: Any, pointer: int) -> None:
        key = id(tensor)
        forget = self._remembered.pop

        def died(_: object) -> None:
            forget(key, None)

        self._remembered[key] = (
            array,
            weakref.ref(tensor, died),
            pointer,
            tensor.shape,
            tensor.dtype,
        )
