"""What an override can know of an implementation that is one of our own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from tpu_kernels.registry import naming
from tpu_kernels.registry.autograd import JaxRule, NoRule
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import split


def kernel_of(impl: Any) -> Kernel | None:
    """Return the kernel that an implementation is, be it given as `Kernel` or as its operator."""
    if isinstance(impl, Kernel):
        return impl
    return naming.lookup(impl.name()) if isinstance(impl, OpOverload) else None


def follow(kernel: Kernel) -> Callable[..., Any]:
    """Return a function that calls the kernel's operator, or that of its later definition.

    Running a notebook cell again replaces a kernel; overrides should not stay with the old one,
    whose operator is gone.
    """
    name, lookup = kernel.name, naming.lookup

    def call(*args: Any, **kwargs: Any) -> Any:
        return (lookup(name) or kernel).op(*args, **kwargs)

    return call


def has_backward(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a kernel has gradients for a call: a rule of its author's, or JAX's.

    Args:
        kernel: The kernel.
        args: The call's positional arguments, as the dispatcher passes them.
        kwargs: Its keyword arguments.
    """
    rule = kernel.autograd.rule
    if not isinstance(rule, JaxRule):
        return not isinstance(rule, NoRule)
    operator = kernel.operator
    arguments = operator.arguments(args, kwargs)
    layout, tensors, _ = split(operator.definition.parameters, arguments)
    return rule.derivatives.differentiable(layout, tensors, [t.requires_grad for t in tensors])
