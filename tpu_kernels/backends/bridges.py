"""The bridges to JAX by type of device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.backends.bridge import Bridge
from tpu_kernels.errors import DeviceError


@functools.cache
def bridge(device_type: str) -> Bridge:
    """Return the bridge of a type of device, made on first use.

    Args:
        device_type: ``"cpu"`` or ``"tpu"``.

    Raises:
        DeviceError: There is none for it.
    """
    if device_type == "cpu":
        return Bridge("cpu")
    if device_type == "tpu":
        from tpu_kernels.backends.device.capsule import mark_cpu, mark_tpu

        return Bridge("tpu", to_cpu_capsule=mark_cpu, from_cpu_capsule=mark_tpu)
    raise DeviceError(f"no bridge to JAX for tensors on {device_type!r}")


def to_jax(tensor: torch.Tensor) -> Any:
    """An array on a tensor's memory, whichever device it is on."""
    return bridge(tensor.device.type).to_jax(tensor)


def to_torch(device_type: str) -> Callable[[Any], torch.Tensor]:
    """The function that makes tensors of a device out of arrays."""
    return bridge(device_type).to_torch
