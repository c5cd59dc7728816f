"""``import tpu_kernels.device`` makes the device ``"tpu"`` usable in torch, by simulating it."""

from __future__ import annotations

from tpu_kernels import integrations
from tpu_kernels.backends.device import install, is_installed, why_not

__all__ = ["install", "is_installed", "why_not"]

install()
integrations.install()  # torch.tpu.pallas
