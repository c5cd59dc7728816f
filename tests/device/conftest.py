"""The tests of this folder run with the simulated device installed."""

from __future__ import annotations

import tpu_kernels.device  # noqa: F401 - installs the device
