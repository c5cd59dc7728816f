"""Pass "op": PyTorch's own check of the operator."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch

from tpu_kernels.dsl import dtypes
from tpu_kernels.errors import MissingBackwardError
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import tensors_of
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed_with

NAME = "op"
# A call with gradients goes through other operators, so the operator itself is looked at without.
_PLAIN: tuple[str, ...] = ("test_schema", "test_faketensor")
_ALL = "schema, fake tensors, autograd, dynamic"
_WITH_GRADIENTS = ("test_autograd_registration", "test_aot_dispatch_dynamic")


def run(subject: Subject) -> CheckRow:
    """Run `torch.library.opcheck`, with gradients where the kernel has a backward."""
    kernel = subject.kernel
    if kernel is None:
        return CheckRow(NAME, "skipped", "a plain JAX function is no operator")
    differentiable = _differentiable(kernel, subject.arguments)
    plain, left_out = _PLAIN, ""
    if any(is_packed(leaf) for value in subject.arguments for leaf in tensors_of(value)):
        # It copies and compares all arguments, which torch itself cannot do with packed values.
        plain, left_out = ("test_faketensor",), ", but not test_schema: torch cannot copy float4"
    for utilities, grad in ((plain, False), (_WITH_GRADIENTS, differentiable)):
        args, kwargs = apart(kernel, [fresh(value, grad=grad) for value in subject.arguments])
        for test, outcome in _opcheck(kernel, args, kwargs, utilities).items():
            if isinstance(outcome, BaseException):
                return failed_with(NAME, test, _cause(outcome), subject.where)
    with_gradients = " with gradients" if differentiable else " without gradients"
    passed = "fake tensors, autograd, dynamic" if left_out else _ALL
    return CheckRow(NAME, "ok", f"opcheck{with_gradients}: {passed}{left_out}")


def _opcheck(
    kernel: Kernel, args: Sequence[Any], kwargs: dict[str, Any], utilities: Sequence[str]
) -> Mapping[str, Any]:
    quiet = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
        warnings.simplefilter("ignore")  # of torch, about its own means
        return torch.library.opcheck(
            kernel.op, tuple(args), kwargs, test_utils=tuple(utilities), raise_exception=False
        )


def _differentiable(kernel: Kernel, arguments: Sequence[Any]) -> bool:
    """Whether gradients can be asked of the kernel; a Pallas kernel often has none."""
    if kernel.spec.backward is None or kernel.spec.mutates_args:
        return False
    try:
        result = call(kernel, [fresh(value, grad=True) for value in arguments])
        outputs = result if isinstance(result, (list, tuple)) else [result]
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.sum().abs().backward()
                break
    except MissingBackwardError:
        return False
    except Exception:
        return True  # opcheck meets it again, and reports it
    return True


def _cause(error: BaseException) -> BaseException:
    """What was raised inside; opcheck's own wrapper repeats how to call it."""
    cause = error.__cause__ or error.__context__
    return cause if cause is not None else error


def apart(kernel: Kernel, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the operator, from all in schema order."""
    pairs = list(zip(kernel.spec.op_parameters, arguments, strict=True))
    positional = [value for p, value in pairs if not p.keyword_only]
    return positional, {p.name: value for p, value in pairs if p.keyword_only}


def call(kernel: Kernel, arguments: Sequence[Any]) -> Any:
    """Call the operator with all its arguments in schema order."""
    args, kwargs = apart(kernel, arguments)
    return kernel.op(*args, **kwargs)


def is_packed(leaf: Any) -> bool:
    """Whether a value is a tensor with several numbers in each element."""
    return isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes.PACKED


def fresh(value: Any, *, grad: bool, dtype: torch.dtype | None = None) -> Any:
    """Copy the tensors of an argument into memory of their own.

    Args:
        value: A tensor, a list of them, or anything else, which is returned as it is.
        grad: Whether floating tensors shall require gradients.
        dtype: What floating tensors are converted to.
    """
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [fresh(item, grad=grad, dtype=dtype) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    floating = (value.is_floating_point() or value.is_complex()) and not is_packed(value)
    copy = value.detach().clone()
    if floating and dtype is not None:
        copy = copy.to(dtype.to_complex() if value.is_complex() else dtype)
    return copy.requires_grad_(grad and floating)
