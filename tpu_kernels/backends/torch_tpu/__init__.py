"""The real TorchTPU (package ``torch_tpu``): kernels and overrides registered with it."""

from __future__ import annotations
