"""Backwards that a user defines: a torch function, an autograd-context pair, or the reference's own
gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.errors import GradientError, MissingBackwardError
from tpu_kernels.registry import reference
from tpu_kernels.registry.layout import fill
from tpu_kernels.registry.programs import flat_outputs

if TYPE_CHECKING:
    from tpu_kernels.registry.autograd import Run


class UserRule:
    """``fn(grad, <inputs by name>)`` returns a dict of gradients by input name."""

    def __init__(self, fn: Callable[..., Mapping[str, Any]], spec: KernelSpec) -> None:
        self.fn = fn
        self.spec = spec
        accepted = inspect.signature(fn).parameters.values()
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted)
        self.names = [p.name for p in accepted][1:]
        self.wants_outputs = "out" in self.names
        known = {p.name for p in spec.op_parameters} | {"out", "needs_input_grad"}
        unknown = [
            p.name for p in list(accepted)[1:] if p.name not in known and p.default is p.empty
        ]
        if unknown and not self.takes_all:
            raise GradientError(
                f"kernel {spec.name!r}: its backward asks for {unknown[0]!r}, which is not an "
                "input",
                where=f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"
                if hasattr(fn, "__code__")
                else None,
                hint=f"available: {', '.join(sorted(known))}",
            )

    def forward(self, run: Run) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Outputs alone; inputs are saved anyway."""
        return run.call_operator(), ()

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """The user's gradients in flat order, checked."""
        parameters = run.autograd.operator.definition.parameters
        values = {
            p.name: a if p.kind.is_tensor else p.for_kernel(a)
            for p, a in zip(parameters, run.arguments(), strict=True)
        }
        flags = dict(
            zip(
                (p.name for p in parameters if p.kind.is_tensor),
                fill(run.layout, run.needs),
                strict=True,
            )
        )
        if self.wants_outputs:
            values["out"] = run.nest_results(run.outputs)
        values["needs_input_grad"] = flags
        given = values if self.takes_all else {n: values[n] for n in self.names if n in values}
        grad = grads[0] if len(grads) == 1 else tuple(grads)
        result = self.fn(grad, **given)
        if not isinstance(result, Mapping):
            raise GradientError(
                f"kernel {self.spec.name!r}: its backward must return a dict of gradients, got "
                f"{type(result).__name__}"
            )
        return self._flat(run, result, [p.name for p in parameters if p.kind.is_tensor])

    def _flat(self, run: Run, result: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        for name in result:
            if name not in names:
                raise GradientError(
                    f"kernel {self.spec.name!r}: its backward returned a gradient for {name!r}, "
                    "which is no tensor input",
                    hint=f"tensor inputs: {', '.join(names)}",
                )
        inputs, needs = fill(run.layout, run.inputs), fill(run.layout, run.needs)
        flat: list[Any] = []
        for name, value, need in zip(names, inputs, needs, strict=True):
            grad = result.get(name)
            if isinstance(value, tuple):
                items = grad if grad is not None else [None] * len(value)
                if len(items) != len(value):
                    raise GradientError(
                        f"kernel {self.spec.name!r}: gradient of {name!r} has {len(items)} "
                        f"entries for {len(value)} tensors"
                    )
                for i, (v, n, g) in enumerate(zip(value, need, items, strict=True)):
                    if v is not None and n:
                        flat.append(self._check(f"{name}[{i}]", v, g))
            elif value is not None and need:
                flat.append(self._check(name, value, grad))
        return flat

    def _check(self, name: str, value: torch.Tensor, grad: Any) -> Any:
        if grad is None:
            return None
        if not isinstance(grad, torch.Tensor) or grad.shape != value.shape:
            got = tuple(grad.shape) if isinstance(grad, torch.Tensor) else type(grad).__name__
            raise GradientError(
                f"kernel {self.spec.name!r}: gradient of {name!r} has shape {got}, expected "
                f"{tuple(value.shape)}",
                where=str(self.spec.source),
            )
        if grad.dtype != value.dtype:
            raise GradientError(
                f"kernel {self.spec.name!r}: gradient of {name!r} is {grad.dtype}, expected "
                f"{value.dtype}",
                where=str(self.spec.source),
            )
        return grad


class ContextRule:
    """``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)``, as in
    `torch.library`."""

    wants_outputs = True

    def __init__(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None
    ) -> None:
        self._backward = backward
        self._setup_context = setup_context

    def forward(self, run: Run) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Outputs alone; the context is set up when the backward runs, from what was saved."""
        return run.call_operator(), ()

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
            self._setup_context(context, tuple(arguments), run.nest_results(run.outputs))
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


class ReferenceRule:
    """The gradient of the kernel's reference, computed by torch's autograd when the backward
    runs."""

    wants_outputs = False

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def forward(self, run: Run) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Outputs alone."""
        return run.call_operator(), ()

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
