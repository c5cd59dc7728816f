"""The simulated ``"tpu"`` device: real torch tensors on host memory, in plain Python."""

from __future__ import annotations

from tpu_kernels.backends.device.capsule import mark_cpu, mark_tpu, to_cpu, to_tpu
from tpu_kernels.backends.device.installation import (
    auto_install,
    install,
    is_installed,
    limits,
    on_install,
    when_installed,
    why_not,
)

__all__ = [
    "auto_install",
    "install",
    "is_installed",
    "limits",
    "mark_cpu",
    "mark_tpu",
    "on_install",
    "to_cpu",
    "to_tpu",
    "when_installed",
    "why_not",
]
