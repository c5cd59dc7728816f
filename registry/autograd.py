"""Gradients of an operator: reverse mode, forward mode, higher orders, and transforms of
`torch.func`.

The Autograd kernel is written here instead of with `torch.library.register_autograd`, which raises
under `torch.func.grad`, returns zero tangents under `torch.func.jvp` and costs more than twice as
much per call.

The derived backward is `jax.vjp` of the kernel's own function. Its forward operator returns the
outputs and the residuals, that is every leaf of JAX's vjp closure that is not an input; the
backward operator traces the vjp anew, puts the saved residuals in place of the traced ones, and XLA
drops the forward that then is dead code. So no closure has to be carried from one program to the
other, and both are ordinary operators, visible to compilers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_torch
from tpu_kernels.dsl.spec import KernelSpec, Kind
from tpu_kernels.errors import ArgumentError, MissingBackwardError
from tpu_kernels.registry import backward_contract, custom_backward
from tpu_kernels.registry.derivatives import Derivatives
from tpu_kernels.registry.layout import ONE, Layout, flat_names, join, split
from tpu_kernels.registry.operator import Definition, Operator, results_of, signature_source
from tpu_kernels.registry.programs import Chooser
from tpu_kernels.registry.rule import Rule

_forward_ad = _compat_torch.forward_ad_module()


class Run:
    """One differentiated call, kept by autograd until its backward.

    Attributes:
        autograd: What differentiates it.
        layout: How the flat inputs become arguments.
        dynamics: Dynamic scalars.
        needs: Which flat inputs need a gradient.
        inputs: The flat inputs; set again from what autograd saved when the backward runs.
        structure: For each result slot: None, or the number of its tensors (-1 for a bare tensor).
        written: Which flat inputs the operator writes to; to autograd they are results too, after
            the others.
    """

    def __init__(self, autograd: Autograd, layout: Layout, dynamics: list[Any]) -> None:
        self.autograd = autograd
        self.layout = layout
        self.dynamics = dynamics
        self.needs: list[bool] = []
        self.inputs: Sequence[torch.Tensor] = ()
        self.structure: list[int | None] = []
        self.outputs: Sequence[torch.Tensor] = ()
        self.saved_residuals = 0
        self.written: Sequence[int] = ()

    def arguments(self) -> list[Any]:
        """The operator's arguments in schema order."""
        return join(
            self.autograd.operator.definition.parameters, self.layout, self.inputs, self.dynamics
        )

    def call_operator(self) -> list[Any]:
        """Run the operator itself (below autograd) and return its result slots."""
        operator = self.autograd.operator
        result = operator.call(*self.arguments())
        slots = len(operator.definition.returns)
        return [] if slots == 0 else [result] if slots == 1 else list(result)

    def flatten_results(self, slots: Sequence[Any]) -> list[torch.Tensor]:
        """The result slots as flat tensors (autograd knows no lists); remembers how they nest."""
        flat: list[torch.Tensor] = []
        self.structure = []
        for slot in slots:
            if slot is None:
                self.structure.append(None)
            elif isinstance(slot, (list, tuple)):
                self.structure.append(len(slot))
                flat.extend(slot)
            else:
                self.structure.append(-1)
                flat.append(slot)
        return flat

    def nest_slots(self, flat: Sequence[Any]) -> list[Any]:
        """The inverse of `flatten_results`."""
        items = iter(flat)
        slots: list[Any] = []
        for count in self.structure:
            if count is None:
                slots.append(None)
            else:
                slots.append(next(items) if count == -1 else [next(items) for _ in range(count)])
        return slots


class Autograd:
    """The Autograd kernel of an operator.

    Args:
        operator: What is differentiated.
        policy: ``"jax"`` (save residuals), ``"recompute"``, ``"reference"`` or None.
        spec: The kernel, if its reference is to be differentiated.
    """

    def __init__(
        self, operator: Operator, policy: str | None, spec: KernelSpec | None = None
    ) -> None:
        self.operator = operator
        self.policy = policy
        self.derivatives = Derivatives(operator, save_residuals=policy != "recompute")
        self.rule: Rule = JaxRule(self.derivatives) if policy in ("jax", "recompute") else NoRule()
        if policy == "reference" and spec is not None:
            self.rule = custom_backward.ReferenceRule(spec)
        parameters = operator.definition.parameters
        # Answers for distributed tensors, NotImplemented for others; set once
        # `torch.distributed.tensor` is in use.
        self.distributed: Callable[[Sequence[Any], dict[str, Any]], Any] | None = None
        self._plain: Layout | None = None
        if all(p.kind is Kind.TENSOR and not p.keyword_only for p in parameters):
            self._plain = Layout((ONE,) * len(parameters), ())
        function = operator_function()
        operator.library.impl(operator.opname, self._kernel(function), "Autograd", with_keyset=True)

    def use(self, fn: Callable[..., Any], spec: KernelSpec) -> None:
        """Differentiate by a user's torch function ``fn(grad, <inputs by name>)``."""
        self._replace_rule(custom_backward.UserRule(fn, spec))

    def use_jax(self, fn: Callable[..., Any], spec: KernelSpec, choose: Chooser) -> None:
        """Differentiate by a user's JAX function ``fn(grad, <inputs by name>)``; ``choose`` chooses
        the kernel's tunables."""
        from tpu_kernels.registry.jax_backward import JaxFunctionRule

        backward_contract.read(
            fn, spec, extra=("interpret",)
        )  # a broken one must not take the old one away
        self._replace_rule(NoRule())
        self.derivatives.give_way()
        self.rule = JaxFunctionRule(fn, self.operator, spec, choose)

    def _replace_rule(self, rule: Rule) -> None:
        self.rule.destroy()
        self.rule = rule

    def use_context_style(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None
    ) -> None:
        """Differentiate by a user's ``backward(ctx, *grads)`` and ``setup_context(ctx, inputs,
        output)``."""
        self._replace_rule(custom_backward.ContextRule(backward, setup_context))

    def destroy(self) -> None:
        """Destroy the operators made for derivatives."""
        self.rule.destroy()
        self.derivatives.destroy()

    def _kernel(self, function: type) -> Callable[..., Any]:
        """The function that torch's dispatcher calls; generated, since it stands in the way of
        every call."""
        operator = self.operator
        definition = operator.definition
        env: dict[str, Any] = {
            "_redispatch": _compat_torch.redispatcher(operator.op),
            "_below": _compat_torch.after_autograd_keys(),
            "_grad_enabled": torch.is_grad_enabled,
            "_forward_ad": _compat_torch.forward_ad_module(),
            "_direct": operator.direct.get,
            "_any": _any_needs_grad,
            "_differentiate": lambda *args, **kwargs: self._differentiate(function, args, kwargs),
        }
        signature, passed = signature_source(definition, env)
        tensors = [p for p in definition.parameters if p.kind.is_tensor]
        needs = " or ".join(
            f"{p.name}.requires_grad" if p.kind is Kind.TENSOR else f"_any({p.name})"
            for p in tensors
        )
        source = f"""
def kernel(_keyset, {signature}):
    if (_grad_enabled() and ({needs or "False"})) or _forward_ad._current_level >= 0:
        return _differentiate({passed})
    _implementation = _direct(_keyset.raw_repr())
    if _implementation is not None:
        return _implementation({passed})
    return _redispatch(_keyset & _below, {passed})
"""
        exec(compile(source, f"<tpu_kernels autograd of {definition.name}>", "exec"), env)
        return env["kernel"]  # type: ignore[no-any-return]

    def _differentiate(self, function: type, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.distributed is not None:
            result = self.distributed(args, kwargs)
            if result is not NotImplemented:
                return result
        definition = self.operator.definition
        if definition.donated:
            raise ArgumentError(
                f"kernel {definition.kernel!r}: argument {definition.donated[0]!r} is donated, "
                "but an argument requires "
                "a gradient, so that autograd keeps all of them",
                where=definition.where,
                hint="call it under torch.no_grad()",
            )
        tensors: Sequence[Any]
        if self._plain is not None:  # nothing but tensors: the common case
            layout, tensors = self._plain, args
            dynamics: list[Any] = []
        else:
            arguments = self.operator.arguments(args, kwargs)
            layout, tensors, dynamics = split(self.operator.definition.parameters, arguments)
        run = Run(self, layout, dynamics)
        if definition.mutated:
            run.written = _written(definition, layout)
            _check_written(definition, layout, tensors, run.written)
        flat = _compat_torch.apply_single_level(function, run, *tensors)
        return results_of(run.nest_slots(flat if isinstance(flat, tuple) else (flat,)))


def _written(definition: Definition, layout: Layout) -> list[int]:
    """Which of the flat inputs are mutated."""
    names = [p.name for p in definition.parameters if p.kind.is_tensor]
    flat = [
        name
        for name, slot in zip(names, layout.slots, strict=True)
        for part in (slot if isinstance(slot, tuple) else (slot,))
        if part
    ]
    return [i for i, name in enumerate(flat) if name in definition.mutated]


def _check_written(
    definition: Definition, layout: Layout, tensors: Sequence[Any], written: Sequence[int]
) -> None:
    """Refuse what torch itself refuses, but only after the memory has been written to."""
    names = flat_names(definition.parameters, layout)
    results = len(definition.returns) + len(written)
    for i in written:
        problem = None
        if tensors[i].is_leaf and tensors[i].requires_grad:
            problem = "a leaf that requires a gradient"
        elif tensors[i]._is_view() and results > 1:
            problem = "a view, beside other results, while an argument requires a gradient"
        if problem is not None:
            raise ArgumentError(
                f"kernel {definition.kernel!r}: argument {names[i]!r} is written to, but it is "
                f"{problem}, which autograd cannot record",
                where=definition.where,
                hint="call it under torch.no_grad(), or on a clone of the whole tensor",
            )


def _any_needs_grad(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.requires_grad
    return argument is not None and any(t is not None and t.requires_grad for t in argument)


class JaxRule(Rule):
    """Reverse mode by `jax.vjp` of the operator's own program."""

    def __init__(self, derivatives: Derivatives) -> None:
        self.derivatives = derivatives

    def forward(self, run: Run) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Outputs and residuals; without residuals where a transform wants to differentiate
        again."""
        plain = _compat_torch.functorch_active() or _forward_ad._current_level >= 0
        saves = (
            self.derivatives.save_residuals
            and not plain
            and not run.autograd.operator.definition.mutated
        )
        if not saves or not self.derivatives.differentiable(run.layout, run.inputs, run.needs):
            return run.call_operator(), ()
        return self.derivatives.forward(run.layout, run.inputs, run.dynamics, run.needs)

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """Gradients by the backward operator."""
        again = (
            torch.is_grad_enabled()
        )  # create_graph=True: the backward itself is differentiated, by recomputing
        residuals = () if again else saved
        return self.derivatives.backward(
            run.layout, run.inputs, run.dynamics, residuals, grads, run.needs
        )


class NoRule(Rule):
    """A kernel without backward: says so when a gradient is asked for, never drops one."""

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """Always raises."""
        definition = run.autograd.operator.definition
        raise MissingBackwardError(
            f"kernel {definition.kernel!r} has no backward",
            where=definition.where,
            hint="define one with @kernel.backward, or pass backward='jax' if JAX can "
            "differentiate the kernel",
        )


@functools.cache
def operator_function() -> type:
    """The autograd function that all operators share; made on demand because its base class is
    private to torch."""
    base: Any = _compat_torch.single_level_function()

    class OperatorFunction(base):  # type: ignore[misc]
        """Runs a `Run` forward below autograd, and its rule's backward."""

        @staticmethod
        def forward(ctx: Any, run: Run, *tensors: torch.Tensor) -> Any:
            run.inputs = tensors
            run.needs = list(ctx.needs_input_grad[1:])
            written = run.written
            # The backward wants what the kernel read, which is about to be overwritten.
            inputs: Sequence[torch.Tensor] = tensors
            if written:
                inputs = [t.clone() if i in written else t for i, t in enumerate(tensors)]
            with _compat_torch.below_autograd(), _compat_torch.outer_levels_differentiate():
                slots, residuals = run.autograd.rule.forward(run)
            flat = run.flatten_results(slots)
            kept = flat if run.autograd.rule.wants_outputs else []
            ctx.run = run
            run.saved_residuals = len(residuals)
            ctx.save_for_backward(*inputs, *residuals, *kept)
            ctx.save_for_forward(*inputs)
            if written:
                ctx.mark_dirty(*(tensors[i] for i in written))
                flat = [*flat, *(tensors[i] for i in written)]
            ctx.mark_non_differentiable(
                *(t for t in flat if not (t.is_floating_point() or t.is_complex()))
            )
            run.inputs = ()
            return flat[0] if len(flat) == 1 else tuple(flat)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            run: Run = copy.copy(ctx.run)  # other threads may run the same backward
            saved = ctx.saved_tensors
            count = run.layout.count
            run.inputs = saved[:count]
            run.needs = list(ctx.needs_input_grad[1:])
            run.outputs = saved[count + run.saved_residuals :]
            residuals = saved[count : count + run.saved_residuals]
            wanted = iter(run.autograd.rule.backward(run, residuals, grads))
            return (None, *(next(wanted) if need else None for need in run.needs))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            run: Run = ctx.run
            inputs = ctx.saved_tensors[: run.layout.count]
            found = run.autograd.derivatives.tangents(
                run.layout, inputs, run.dynamics, tangents[1:]
            )
            # What is not differentiable has no tangent; JAX gives it zeros.
            result: list[Any] = [
                t if t.is_floating_point() or t.is_complex() else None for t in found
            ]
            for position, i in enumerate(run.written, start=len(result) - len(run.written)):
                tangent = tangents[1 + i]
                if tangent is not None:  # torch wants a written input's tangent written as well
                    result[position] = tangent.copy_(result[position])
            return result[0] if len(result) == 1 else tuple(result)

    return OperatorFunction
