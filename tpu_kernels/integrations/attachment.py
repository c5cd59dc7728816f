"""Registers kernels with DTensor, without importing what runs them.

This happens in the middle of whichever import brings ``torch.distributed.tensor`` in, which may be
that of `tpu_kernels.integrations.dtensor` itself; so that module is imported by the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels.registry import kernel_hooks

if TYPE_CHECKING:
    from tpu_kernels.integrations.dtensor import DistributedKernel
    from tpu_kernels.registry.kernel import Kernel


def attach_to_kernels(dtensor: type) -> None:
    """Make every kernel, present and future, run on DTensors.

    Args:
        dtensor: The class `torch.distributed.tensor.DTensor`.
    """

    def attach(kernel: Kernel) -> None:
        attachment = Attachment(kernel, dtensor)
        kernel.autograd.distributed = attachment.differentiated
        torch.library.register_torch_dispatch(
            kernel.name, dtensor, attachment.dispatched, lib=kernel.operator.library
        )

    kernel_hooks.add_hook("dtensor", attach)


class Attachment:
    """What torch and a kernel's autograd call for DTensors.

    Args:
        kernel: The kernel.
        dtensor: The class of distributed tensors.
    """

    def __init__(self, kernel: Kernel, dtensor: type) -> None:
        self.kernel = kernel
        self.dtensor = dtensor

    @functools.cached_property
    def runner(self) -> DistributedKernel:
        """What runs the kernel on DTensors."""
        from tpu_kernels.integrations.dtensor import DistributedKernel

        return DistributedKernel(self.kernel)

    def dispatched(
        self, cls: type, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> Any:
        """Run a call without gradients; torch calls this for operators on DTensors."""
        return self.runner.run(args, kwargs or {}, differentiate=False)

    def differentiated(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call that needs gradients, or return NotImplemented if it has no DTensor."""
        for argument in (*args, *kwargs.values()):
            items = argument if isinstance(argument, (list, tuple)) else (argument,)
            if any(isinstance(item, self.dtensor) for item in items):
                return self.runner.run(args, kwargs, differentiate=True)
        return NotImplemented
