"""Helion kernels on CUDA tensors: Helion's Triton backend; other kernels have no program there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.dsl.helion_gpu import GpuFunction
from tpu_kernels.registry import kernel_hooks
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.operator import Operator, results_of


class HelionGpu:
    """The backend of one Helion kernel for torch's CUDA tensors.

    Args:
        kernel: The kernel.
    """

    name = "cuda"
    dispatch_key = "CUDA"

    def __init__(self, kernel: Kernel) -> None:
        self._spec = kernel.spec
        function: Any = kernel.spec.jax_fn
        self._config = function.config_name
        self._run = GpuFunction(function.helion_kernel, function.mutates, function.where)

    def implement(self, operator: Operator) -> Callable[..., Any]:
        """The operator's implementation on CUDA tensors."""
        spec = self._spec

        def implementation(*args: Any, **kwargs: Any) -> Any:
            arguments = operator.arguments(args, kwargs)
            operator.device_of(arguments)
            names = (p.name for p in operator.definition.parameters)
            values = dict(zip(names, arguments, strict=True))
            config = values.pop(self._config, None)
            with torch.no_grad():
                result = self._run(values, config)
            if not operator.definition.returns:
                return None
            return results_of(spec.returns.flatten(result))

        return implementation


def register() -> None:
    """Give every Helion kernel, present and future, a CUDA implementation."""
    kernel_hooks.add_hook("helion_gpu", _attach)


def _attach(kernel: Kernel) -> None:
    if kernel.spec.language == "helion":
        kernel.operator.implement(HelionGpu(kernel))
