"""Attaches the kernels of `tpu_kernels.ops.flex_hop` to `torch.nn.attention.flex_attention`.

PyTorch imports that module wherever it compiles, so the kernels themselves are imported at their
first call.
"""

from __future__ import annotations

import importlib
from typing import Any

from tpu_kernels import _compat_torch
from tpu_kernels.backends import device
from tpu_kernels.lowering import rules

_DEVICE = "tpu"


def attach(module: Any) -> None:
    """Let FlexAttention run on the simulated device, and be part of lowered graphs.

    Args:
        module: `torch.nn.attention.flex_attention`.
    """
    forward, backward = _compat_torch.flex_operators()
    rules.lower_higher_order(forward, _late("lower"))
    rules.lower_higher_order(backward, _late("lower_backward"))
    device.when_installed(lambda: _on_device(module))


def _on_device(module: Any) -> None:
    _compat_torch.implement_flex(module, _late("run"), _late("run_backward"), _DEVICE)


def _late(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        kernels = importlib.import_module("tpu_kernels.ops.flex_hop")
        return getattr(kernels, name)(*args, **kwargs)

    return call
