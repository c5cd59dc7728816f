"""Pass "grad": the kernel's gradients against those of its reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu_kernels.errors import MissingBackwardError
from tpu_kernels.verify.passes.numerics import call_reference, compare, leaves, no_reference
from tpu_kernels.verify.passes.operator import call, fresh
from tpu_kernels.verify.passes.tolerance import reduction_size
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed_with

NAME = "grad"


def run(subject: Subject) -> CheckRow:
    """Compare the gradient of a random weighted sum of all outputs, input by input."""
    kernel = subject.kernel
    reason = no_reference(kernel)
    if kernel is None or reason is not None:
        return CheckRow(NAME, "skipped", reason or "")
    if kernel.spec.backward is None:
        return CheckRow(NAME, "skipped", "the kernel has backward=None")
    if kernel.spec.mutates_args:
        return CheckRow(NAME, "skipped", "the kernel writes to its arguments")
    given = [fresh(value, grad=True) for value in subject.arguments]
    wide = [fresh(value, grad=True, dtype=torch.float64) for value in subject.arguments]
    if not _inputs(given):
        return CheckRow(NAME, "skipped", "no floating-point input")
    try:
        outputs = [out for out in leaves(call(kernel, given)) if out.requires_grad]
        if not outputs:
            return CheckRow(NAME, "skipped", "no output has a gradient")
        weights = _weights(outputs)
        got = torch.autograd.grad(outputs, _inputs(given), weights, allow_unused=True)
    except MissingBackwardError as error:
        return CheckRow(NAME, "skipped", f"no gradient: {error.problem}", hint=error.hint)
    except Exception as error:  # whatever the author's code raises is a finding
        return failed_with(NAME, "the kernel's gradient", error, subject.where)
    try:
        exact, precision = call_reference(kernel, wide, grad=True)
        exact = [out for out in exact if out.requires_grad]
        wanted = torch.autograd.grad(
            exact,
            _inputs(wide),
            [weight.to(out.dtype) for weight, out in zip(weights, exact, strict=True)],
            allow_unused=True,
        )
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CheckRow(NAME, "skipped", f"the reference has no float64 gradient: {text}")
    # A gradient adds up over whatever the input was broadcast or contracted with.
    spread = max(out.numel() for out in outputs) // max(1, min(i.numel() for i in _inputs(given)))
    terms = max(reduction_size(subject.jaxpr), *(max(out.shape, default=1) for out in outputs))
    return compare(
        subject,
        _zeros_for_none(got, _inputs(given)),
        _zeros_for_none(wanted, _inputs(wide)),
        max(terms, spread),
        precision,
        NAME,
        [f"gradient of {subject.names[index]!r}" for index in _positions(given)],
    )


def _flat(arguments: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in arguments:
        items = value if isinstance(value, (list, tuple)) else [value]
        found.extend(item for item in items if isinstance(item, torch.Tensor))
    return found


def _inputs(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for tensor in _flat(arguments) if tensor.requires_grad]


def _positions(arguments: Sequence[Any]) -> list[int]:
    return [index for index, tensor in enumerate(_flat(arguments)) if tensor.requires_grad]


def _weights(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        for out in outputs
    ]


def _zeros_for_none(
    gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    ]
