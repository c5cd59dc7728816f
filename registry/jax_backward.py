"""A user's backward in JAX: traced into an operator of its own, as the derived backward is.

The operator takes the kernel's arguments, the outputs if the function asks for them, the outputs'
gradients, and which inputs need one. It is differentiated by `jax.vjp` in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels.dsl.spec import KernelSpec, Kind, Parameter, ReturnKind
from tpu_kernels.registry import policies
from tpu_kernels.registry.backward_contract import Backward, read
from tpu_kernels.registry.batching import Batching
from tpu_kernels.registry.derivative_programs import Program, base_call
from tpu_kernels.registry.derivatives import GRADS, NEEDS, derived_operator
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import fill, static_values
from tpu_kernels.registry.operator import Body, Call, Definition, Operator, results_of
from tpu_kernels.registry.programs import Chooser, default_precision, flat_outputs, named_values
from tpu_kernels.registry.rule import Rule

if TYPE_CHECKING:
    from tpu_kernels.registry.autograd import Run

_KIND_OF_OUTPUT = {
    ReturnKind.TENSOR: Kind.TENSOR,
    ReturnKind.OPTIONAL: Kind.OPTIONAL,
    ReturnKind.LIST: Kind.LIST,
}


class JaxFunctionRule(Rule):
    """Reverse mode by a user's JAX function ``fn(grad, <inputs by name>)``.

    Args:
        fn: The function.
        operator: The kernel's operator.
        spec: The kernel.
        choose: Chooses tunables, as for the kernel itself.

    Raises:
        GradientError: The function asks for what there is not.
    """

    def __init__(
        self, fn: Callable[..., Any], operator: Operator, spec: KernelSpec, choose: Chooser
    ) -> None:
        self.contract = read(fn, spec, extra=("interpret",))
        self.wants_outputs = self.contract.wants_outputs
        self._base = operator
        self._spec = spec
        self._choose = choose
        self._lock = threading.RLock()
        self._operator: Operator | None = None
        self._parts: list[Any] = []
        if spec.flops is not None:  # a FLOP counter knows the operators that exist when it starts
            self.operator()

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """The gradients in flat order, by the backward operator."""
        arguments = list(run.arguments())
        if self.wants_outputs:
            arguments.extend(run.nest_slots(run.outputs))
        operator = self.operator()
        result = operator.op(*arguments, list(grads), list(run.needs))
        slots = [result] if len(operator.definition.returns) == 1 else result
        flat: list[Any] = []
        for slot, need in zip(slots, fill(run.layout, run.needs), strict=True):
            if isinstance(need, tuple):
                flat.extend(slot)
            elif need:
                flat.append(slot)
        return flat

    def operator(self) -> Operator:
        """The backward operator, ``<name>__bwd``; made when first asked for."""
        with self._lock:
            if self._operator is None:
                self._operator = self._make()
            return self._operator

    def destroy(self) -> None:
        """Take the backward operator out of torch."""
        with self._lock:
            for part in self._parts:
                part.destroy()
            self._parts.clear()
            self._operator = None

    def _make(self) -> Operator:
        from tpu_kernels.registry.autograd import Autograd

        base = self._base.definition
        outputs = []
        if self.wants_outputs:
            for i, kind in enumerate(base.returns):
                known = _KIND_OF_OUTPUT[kind]
                outputs.append(Parameter(f"tk_out{i}", known, known.value))
        returns = tuple(
            ReturnKind.LIST if p.kind.is_list else ReturnKind.OPTIONAL
            for p in self.contract.tensors
        )
        operator = derived_operator(
            self._base,
            f"{base.name}__bwd",
            [*outputs, GRADS, NEEDS],
            returns,
            _program(self.contract, base, self._spec, self._choose),
            where=self.contract.where,
        )
        if base.flops is not None:
            policies.register_flops(operator, base.flops, factor=2)
        self._parts = [Autograd(operator, "recompute"), Batching(operator), operator]
        return operator


def _program(contract: Backward, base: Definition, spec: KernelSpec, choose: Chooser) -> Program:
    """One slot for each tensor parameter: its gradient or None, a list for a list."""
    count = sum(p.kind.is_tensor for p in base.parameters)

    def program(call: Call, engine: Engine) -> Body:
        inner, (needs,) = base_call(base, call)
        flags = fill(inner.layout, needs)
        statics = static_values(base.parameters, inner.layout)
        statics.update(choose(inner, statics, engine))

        def body(tensors: Sequence[Any], dynamics: Sequence[Any]) -> list[Any]:
            arguments, outputs, grads = tensors[:count], tensors[count:-1], tensors[-1]
            if any(grad is None for grad in grads):
                grads = _filled(base, inner, engine, arguments, dynamics, grads)
            values = named_values(base.parameters, arguments, dynamics, statics)
            values["needs_input_grad"] = dict(
                zip((p.name for p in contract.tensors), flags, strict=True)
            )
            if contract.wants_outputs:
                values["out"] = results_of([list(o) if type(o) is tuple else o for o in outputs])
            if "interpret" in contract.names:
                values["interpret"] = engine.interpret
            with default_precision(spec.precision):
                gradients = contract(grads, values)
            return [
                _slot(contract, p.name, gradients.get(p.name), argument, need)
                for p, argument, need in zip(contract.tensors, arguments, flags, strict=True)
            ]

        return body

    return program


def _filled(
    base: Definition,
    call: Call,
    engine: Engine,
    arguments: Sequence[Any],
    dynamics: Sequence[Any],
    grads: Sequence[Any],
) -> list[Any]:
    """Gradients with zeros for outputs that were not used."""
    import jax
    import jax.numpy as jnp

    body = base.program(call, engine)
    shapes = flat_outputs(jax.eval_shape(lambda *args: body(args, dynamics), *arguments))
    return [
        jnp.zeros(shape.shape, shape.dtype) if grad is None else grad
        for shape, grad in zip(shapes, grads, strict=True)
    ]


def _slot(contract: Backward, name: str, grad: Any, argument: Any, need: Any) -> Any:
    import jax.numpy as jnp

    if isinstance(need, tuple):
        slot = []
        grads = contract.items(name, grad, len(need))
        for i, (value, wanted, item) in enumerate(zip(argument, need, grads, strict=True)):
            if wanted:  # None in a list stands for zeros: a list of results has no holes
                item = jnp.zeros(value.shape, value.dtype) if item is None else item
                contract.check(f"{name}[{i}]", value, item)
                slot.append(jnp.asarray(item))
        return slot
    if not need or grad is None:
        return [] if isinstance(argument, (list, tuple)) else None
    contract.check(name, argument, grad)
    return jnp.asarray(grad)
