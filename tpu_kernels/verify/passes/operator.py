"""Pass "op": PyTorch's own check of the operator."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch

from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed_with

NAME = "op"
_UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def run(subject: Subject) -> CheckRow:
    """Run `torch.library.opcheck`, with gradients where the kernel has a backward."""
    kernel = subject.kernel
    if kernel is None:
        return CheckRow(NAME, "skipped", "a plain JAX function is no operator")
    differentiable = kernel.spec.backward is not None and not kernel.spec.mutates_args
    arguments = [fresh(value, grad=differentiable) for value in subject.arguments]
    quiet = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
        warnings.simplefilter("ignore")  # of torch, about its own means
        found = torch.library.opcheck(
            kernel.op, tuple(arguments), test_utils=_UTILITIES, raise_exception=False
        )
    for test, outcome in found.items():
        if isinstance(outcome, BaseException):
            return failed_with(NAME, test, _cause(outcome), subject.where)
    with_gradients = " with gradients" if differentiable else ""
    return CheckRow(NAME, "ok", f"opcheck{with_gradients}: schema, fake tensors, autograd, dynamic")


def _cause(error: BaseException) -> BaseException:
    """What was raised inside; opcheck's own wrapper repeats how to call it."""
    cause = error.__cause__ or error.__context__
    return cause if cause is not None else error


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
    floating = value.is_floating_point() or value.is_complex()
    copy = value.detach().clone()
    if floating and dtype is not None:
        copy = copy.to(dtype.to_complex() if value.is_complex() else dtype)
    return copy.requires_grad_(grad and floating)
