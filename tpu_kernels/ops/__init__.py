"""The shipped kernels; importing this package registers them as ``torch.ops.tpu.*``.

One module per family, each with the same roles in the same order: reference, kernel body, launcher,
backward, configs, operators. `tiles` and `precision` are what they share.

Example:
    >>> import torch
    >>> import tpu_kernels.ops
    >>> torch.ops.tpu.matmul(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
"""

from __future__ import annotations

from tpu_kernels import backends
from tpu_kernels.tuning import lookup

backends.ready()  # the operators' implementations, before the operators
lookup.install()  # the shipped configs

from tpu_kernels.ops.attention import attention, attention_backward  # noqa: E402
from tpu_kernels.ops.flex_attention import flex_attention  # noqa: E402
from tpu_kernels.ops.linear import gated_linear, linear, use_matmul  # noqa: E402
from tpu_kernels.ops.matmul import bmm, gated_matmul, matmul  # noqa: E402
from tpu_kernels.ops.sdpa import use_attention  # noqa: E402

__all__ = [
    "attention",
    "attention_backward",
    "bmm",
    "flex_attention",
    "gated_linear",
    "gated_matmul",
    "linear",
    "matmul",
    "use_attention",
    "use_matmul",
]
