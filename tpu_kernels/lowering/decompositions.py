"""How operators without a rule are expressed in others: by torch's own decompositions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_kernels import _compat_torch
from tpu_kernels.lowering import rules


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions for what has no rule of its own; those into core ATen come first."""
    return {
        op: decomposition
        for op, decomposition in _compat_torch.all_decompositions().items()
        if rules.find(op) is None
    }
