"""Operators that accelerators have for integers, and the CPU for floating point only."""

from __future__ import annotations

import torch

from tpu_kernels.backends.device.capsule import unwrap, wrap


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """`torch.histc`; mixtures of experts count with it, on anything but a CPU, as integers."""
    values = unwrap(self)
    if values.dtype.is_floating_point:
        return wrap(torch.histc(values, bins, min, max))
    return wrap(torch.histc(values.double(), bins, min, max).to(values.dtype))


INTEGERS = {"aten::histc": histc}
