"""What an override can know of an implementation that is one of our own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_kernels.registry import naming
from tpu_kernels.registry.autograd import JaxRule, NoRule
from tpu_kernels.registry.engine import current_mode, mode_scope
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import split
from tpu_kernels.registry.numerics.mxu import jax_precision


def kernel_of(impl: Any) -> Kernel | None:
    """Return the kernel that an implementation is, be it given as `Kernel` or as its operator."""
    if isinstance(impl, Kernel):
        return impl
    return naming.lookup(impl.name()) if isinstance(impl, OpOverload) else None


def follow(kernel: Kernel) -> Callable[..., Any]:
    """Return a function that calls the kernel's operator, or that of its later definition.

    Running a notebook cell again replaces a kernel; overrides should not stay with the old one,
    whose operator is gone.

    In place of an operator of torch, a kernel that leaves the precision of float32 products open
    follows `torch.get_float32_matmul_precision`, as that operator does: by its parameter
    ``precision`` if it has one whose default is None, else where the device looks at it at all.
    """
    name, lookup = kernel.name, naming.lookup
    asks = _takes_precision(kernel)

    def call(*args: Any, **kwargs: Any) -> Any:
        op = (lookup(name) or kernel).op
        if asks and "precision" not in kwargs and _has_float32(args):
            return op(*args, **kwargs, precision=jax_precision())
        if current_mode().numerics == "tpu":
            with mode_scope(precision=jax_precision()):
                return op(*args, **kwargs)
        return op(*args, **kwargs)

    return call


def _takes_precision(kernel: Kernel) -> bool:
    """Whether the operator has an optional text parameter ``precision`` for the caller to set."""
    return any(
        p.name == "precision" and p.keyword_only and p.default is None and "str" in p.schema_type
        for p in kernel.spec.op_parameters
    )


def _has_float32(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dtype is torch.float32 for a in args)


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
