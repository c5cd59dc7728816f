"""Kernels on CPU tensors: Pallas calls are interpreted, everything is compiled by XLA:CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_kernels.backends.bridge import Bridge
from tpu_kernels.backends.executor import Executor
from tpu_kernels.registry import backend_table
from tpu_kernels.registry.operator import Operator


class Cpu:
    """The backend for torch's CPU tensors."""

    name = "cpu"
    dispatch_key = "CPU"

    def implement(self, operator: Operator) -> Callable[..., Any]:
        """The operator's implementation on CPU tensors."""
        return Executor(operator, "cpu", _bridge).implementation()


@functools.cache
def _bridge() -> Bridge:
    return Bridge("cpu")


def register() -> None:
    """Give every operator a CPU implementation."""
    backend_table.add_backend(_CPU)


_CPU = Cpu()
