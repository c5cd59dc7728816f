"""Kernels on tensors of the simulated device: the CPU programs, on memory that is the same for both
devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_kernels.backends.bridge import Bridge
from tpu_kernels.backends.device import modes
from tpu_kernels.backends.device.capsule import mark_cpu, mark_tpu
from tpu_kernels.backends.executor import Executor
from tpu_kernels.registry import backend_table
from tpu_kernels.registry.operator import Operator


class SimulatedTpu:
    """The backend for tensors on the simulated ``"tpu"`` device."""

    name = "tpu (simulated)"
    dispatch_key = "PrivateUse1"

    def implement(self, operator: Operator) -> Callable[..., Any]:
        """The operator's implementation on tensors of the simulated device."""
        return Executor(operator, "tpu", _bridge).implementation(modes)


@functools.cache
def _bridge() -> Bridge:
    return Bridge("tpu", to_cpu_capsule=mark_cpu, from_cpu_capsule=mark_tpu)


def register() -> None:
    """Give every operator an implementation on the simulated device."""
    backend_table.add_backend(_TPU)


_TPU = SimulatedTpu()
