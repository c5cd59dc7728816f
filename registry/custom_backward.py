"""Backwards that a user defines: a torch function, an autograd-context pair, or the reference's own
gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.errors import MissingBackwardError
from tpu_kernels.registry import backward_contract, reference
from tpu_kernels.registry.layout import fill
from tpu_kernels.registry.operator import results_of
from tpu_kernels.registry.programs import flat_outputs
from tpu_kernels.registry.rule import Rule

if TYPE_CHECKING:
    from tpu_kernels.registry.autograd import Run


class UserRule(Rule):
    """``fn(grad, <inputs by name>)`` returns gradients of the inputs, in torch."""

    def __init__(self, fn: Callable[..., Any], spec: KernelSpec) -> None:
        self.contract = backward_contract.read(fn, spec)
        self.wants_outputs = self.contract.wants_outputs

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """The user's gradients in flat order, checked."""
        contract = self.contract
        parameters = run.autograd.operator.definition.parameters
        values = {
            p.name: a if p.kind.is_tensor else p.for_kernel(a)
            for p, a in zip(parameters, run.arguments(), strict=True)
        }
        inputs, needs = fill(run.layout, run.inputs), fill(run.layout, run.needs)
        names = [p.name for p in contract.tensors]
        if self.wants_outputs:
            values["out"] = results_of(run.nest_slots(run.outputs))
        values["needs_input_grad"] = dict(zip(names, needs, strict=True))
        result = contract(grads, values)
        flat: list[Any] = []
        for name, value, need in zip(names, inputs, needs, strict=True):
            grad = result.get(name)
            if isinstance(value, tuple):
                items = contract.items(name, grad, len(value))
                for i, (v, n, g) in enumerate(zip(value, need, items, strict=True)):
                    if v is not None and n:
                        flat.append(self._checked(f"{name}[{i}]", v, g))
            elif value is not None and need:
                flat.append(self._checked(name, value, grad))
        return flat

    def _checked(self, name: str, value: torch.Tensor, grad: Any) -> Any:
        if grad is not None:
            if not isinstance(grad, torch.Tensor):
                raise self.contract.error(
                    f"gradient of {name!r} is a {type(grad).__name__}, expected a tensor",
                    hint="a backward in JAX has parameters annotated jax.Array, or is defined with "
                    "@kernel.backward(language='jax')",
                )
            self.contract.check(name, value, grad)
        return grad


class ContextRule(Rule):
    """``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)``, as in
    `torch.library`."""

    wants_outputs = True

    def __init__(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None
    ) -> None:
        self._backward = backward
        self._setup_context = setup_context

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """The user's gradients in flat order."""
        arguments = run.arguments()
        parameters = run.autograd.operator.definition.parameters
        context = _Context()
        needs = iter(fill(run.layout, run.needs))
        context.needs_input_grad = tuple(
            next(needs) if p.kind.is_tensor else False for p in parameters
        )
        if self._setup_context is not None:
            self._setup_context(context, tuple(arguments), results_of(run.nest_slots(run.outputs)))
        result = self._backward(context, *grads)
        items = result if isinstance(result, tuple) else (result,)
        flat: list[Any] = []
        for parameter, argument, grad in zip(parameters, arguments, items, strict=True):
            if not parameter.kind.is_tensor or argument is None:
                continue
            if isinstance(argument, (list, tuple)):
                flat.extend(
                    g
                    for a, g in zip(argument, grad or [None] * len(argument), strict=True)
                    if a is not None
                )
            else:
                flat.append(grad)
        return [g for g, need in zip(flat, run.needs, strict=True) if need]


class _Context:
    """What a context-style backward sees as ``ctx``."""

    needs_input_grad: tuple[Any, ...] = ()
    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors; they are already saved by the surrounding autograd node."""
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Accepted for compatibility; unused outputs' gradients arrive as zeros."""


class ReferenceRule(Rule):
    """The gradient of the kernel's reference, computed by torch's autograd when the backward
    runs."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """Gradients of the reference on the saved inputs."""
        if run.written:
            definition = run.autograd.operator.definition
            raise MissingBackwardError(
                f"kernel {definition.kernel!r} writes to {definition.mutated[0]!r}: its reference "
                "gives no gradient",
                where=definition.where,
                hint="pass backward='jax', or define a backward with @kernel.backward",
            )
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [
                x if again else x.detach().requires_grad_(need)
                for x, need in zip(run.inputs, run.needs, strict=True)
            ]
            parameters = run.autograd.operator.definition.parameters
            run.inputs = leaves
            values = {
                p.name: a if p.kind.is_tensor else p.for_kernel(a)
                for p, a in zip(parameters, run.arguments(), strict=True)
            }
            outputs = flat_outputs(self.spec.returns.flatten(reference.call(self.spec, values)))
        pairs = [
            (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad
        ]
        wanted = [x for x, need in zip(leaves, run.needs, strict=True) if need]
        if not pairs:
            return [None] * len(wanted)
        return torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [g for _, g in pairs],
            create_graph=again,
            allow_unused=True,
        )
