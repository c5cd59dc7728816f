"""Pass "numerics": the kernel's result against its reference in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tpu_kernels.dsl import dtypes
from tpu_kernels.errors import KernelError
from tpu_kernels.registry import reference
from tpu_kernels.registry.engine import current_mode
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.verify.passes.operator import call, fresh
from tpu_kernels.verify.passes.tolerance import (
    largest_error,
    product_precision,
    reduction_size,
    tolerance,
)
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed, failed_with

NAME = "numerics"


def run(subject: Subject) -> CheckRow:
    """Compare every output, and every argument that is written to, with the reference."""
    kernel = subject.kernel
    reason = no_reference(kernel)
    if kernel is None or reason is not None:
        return CheckRow(NAME, "skipped", reason or "")
    given = [fresh(value, grad=False) for value in subject.arguments]
    try:
        got = leaves(call(kernel, given))
    except Exception as error:  # whatever the author's code raises is a finding
        return failed_with(NAME, "the kernel", error, subject.where)
    got += leaves([values_of(kernel, given)[name] for name in kernel.spec.mutates_args])
    try:
        wanted, precision = call_reference(kernel, subject.arguments)
    except Exception as error:
        return failed_with(NAME, "the reference", error, subject.where)
    if len(got) != len(wanted):
        what = f"{len(got)} results, the reference has {len(wanted)}"
        return failed(NAME, what, subject.where)
    terms = reduction_size(subject.jaxpr)
    return compare(subject, got, wanted, terms, precision)


def compare(
    subject: Subject,
    got: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    terms: int,
    precision: str,
    name: str = NAME,
    what: Sequence[str] = (),
) -> CheckRow:
    """Compare tensors one by one and make a row of it.

    Args:
        subject: The program, for its dtypes and place.
        got: Results of the kernel.
        wanted: Those of the reference.
        terms: Terms in the longest sum.
        precision: What the reference was computed in.
        name: Name of the pass.
        what: What each tensor is; ``"output 0"`` and so on by default.
    """
    inputs = [leaf.dtype for leaf in subject.program.leaves if isinstance(leaf, torch.Tensor)]
    emulates = current_mode().numerics == "tpu"
    product = product_precision(subject.jaxpr) if emulates else None
    told = []
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        label = what[index] if what else f"output {index}"
        if a.shape != b.shape:
            shapes = f"{label} has shape {list(a.shape)}, the reference {list(b.shape)}"
            return failed(name, shapes, subject.where)
        inexact = a.is_floating_point() or a.is_complex()
        accepted = tolerance([a.dtype, *inputs], terms, product) if inexact else 0.0
        error, place = largest_error(a, b, accepted)
        basis = f"accepted {accepted:.1e} for {str(a.dtype).removeprefix('torch.')}"
        if terms > 1 and inexact:
            basis += f" and sums of {terms}"
        if product is not None and inexact:
            basis += f", products at {product} precision"
        if error > accepted:
            return failed(
                name,
                f"{label}: {place}; error {error:.1e} of the largest value, {basis}",
                subject.where,
            )
        told.append(f"{label} {error:.1e} ({basis})")
    return CheckRow(name, "ok", f"against the reference in {precision}: " + ", ".join(told))


def no_reference(kernel: Kernel | None) -> str | None:
    """Why there is nothing to compare with, None if there is."""
    if kernel is None:
        return "a plain JAX function has no reference"
    if kernel.spec.reference is None:
        return "the kernel has no reference: give tpu_kernel(..., reference=...) a PyTorch function"
    return None


def values_of(kernel: Kernel, arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments of the operator by name, as the author's function sees them."""
    parameters = kernel.spec.op_parameters
    return {
        p.name: value if p.kind.is_tensor else p.for_kernel(value)
        for p, value in zip(parameters, arguments, strict=True)
    }


def call_reference(
    kernel: Kernel, arguments: Sequence[Any], *, grad: bool = False
) -> tuple[list[torch.Tensor], str]:
    """Call the reference on float64 copies, or on plain copies where it takes no float64.

    Args:
        kernel: A kernel with a reference.
        arguments: Arguments of the operator; where `grad` is set they are used as they are.
        grad: Whether the arguments are float64 tensors of the caller's, to differentiate.

    Returns:
        Outputs and then written arguments, and the name of the precision.
    """
    if grad:
        with _Precision() as precision:
            return _called(kernel, arguments), precision.name
    try:
        wide = [fresh(value, grad=False, dtype=torch.float64) for value in arguments]
        with _Precision() as precision:
            return _called(kernel, wide), precision.name
    except (TypeError, ValueError, RuntimeError, KernelError):
        # A reference may make tensors of its own in the kernel's dtype, which float64 does not mix
        # with; if that is not the reason, the same is raised again here.
        plain = [fresh(value, grad=False) for value in arguments]
        return _called(kernel, plain), "the kernel's own dtypes"


class _Precision(TorchFunctionMode):
    """Notices where a reference that was given float64 rounds to fewer bits by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        dtype = result.dtype if isinstance(result, torch.Tensor) else torch.int32
        counts = dtype.is_floating_point and dtype not in dtypes.PACKED  # those are only moved
        if counts and torch.finfo(dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest = dtype
        return result

    @property
    def name(self) -> str:
        """What the reference was computed in, in words."""
        if self.coarsest is torch.float64:
            return "float64"
        return f"float64, which it rounds to {str(self.coarsest).removeprefix('torch.')} itself"


def _called(kernel: Kernel, arguments: Sequence[Any]) -> list[torch.Tensor]:
    values = values_of(kernel, arguments)
    outputs, new = reference.results(kernel.spec, values)
    return leaves(outputs) + leaves(list(new.values()))


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested result in order; numbers and arrays become tensors.

    Example:
        >>> [leaf.item() for leaf in leaves((torch.tensor(1), None, [torch.tensor(2)]))]
        [1, 2]
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [torch.as_tensor(value)]
