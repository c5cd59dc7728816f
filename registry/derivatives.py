"""The operators behind an operator's derivatives: forward with residuals, backward, tangents; made
on first use."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels.dsl.spec import Kind, Parameter, ReturnKind
from tpu_kernels.errors import MissingBackwardError, TraceError
from tpu_kernels.registry import derivative_programs as programs
from tpu_kernels.registry.layout import Layout, join
from tpu_kernels.registry.operator import Definition, Operator

NEEDS = Parameter("tk_needs", Kind.STATIC, "bool[]", to_schema=list, from_schema=tuple)
RESIDUALS = Parameter("tk_residuals", Kind.LIST, "Tensor[]")
GRADS = Parameter("tk_grads", Kind.HOLEY_LIST, "Tensor?[]")
TANGENTS = Parameter("tk_tangents", Kind.HOLEY_LIST, "Tensor?[]")


class Derivatives:
    """Derived operators of one operator, defined when first asked for.

    Args:
        operator: What is differentiated.
        save_residuals: Whether the forward keeps intermediate results for the backward, or the
            backward computes them again.
    """

    def __init__(self, operator: Operator, *, save_residuals: bool) -> None:
        self.operator = operator
        self.save_residuals = save_residuals
        self._made: dict[str, Operator] = {}
        self._parts: dict[str, list[Any]] = {}
        self._refusals: dict[Any, Exception | None] = {}
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """Make forward and backward now: a FLOP counter knows the operators only that exist when it
        starts."""
        for which in ("fwd", "bwd"):
            self._operator(which)

    # ------------------------------------------------------------------ what autograd calls
    def differentiable(
        self, layout: Layout, inputs: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> bool:
        """Whether JAX can differentiate the program; if not, the reason is kept for `backward` to
        tell."""
        return self._refusal(layout, inputs, needs) is None

    def _refusal(
        self, layout: Layout, inputs: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> Exception | None:
        # A kernel may choose its algorithm, and with it whether there is a derivative, by sizes.
        shapes: Any = tuple([t.shape for t in inputs])
        try:
            key = (layout, tuple([t.dtype for t in inputs]), tuple(needs), shapes)
            known = key in self._refusals
        except TypeError:  # symbolic sizes have no hash
            key = (layout, tuple([t.dtype for t in inputs]), tuple(needs), str(shapes))
            known = key in self._refusals
        if not known:
            arguments = self._arguments(layout, inputs)
            self.operator.shapes(arguments)  # raises where the call itself is at fault
            try:
                self._operator("fwd").shapes([*arguments, list(needs)])
            except TraceError as error:
                self._refusals[key] = error
            else:
                self._refusals[key] = None
        return self._refusals[key]

    def forward(
        self,
        layout: Layout,
        inputs: Sequence[torch.Tensor],
        dynamics: Sequence[Any],
        needs: Sequence[bool],
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Result slots and residuals."""
        operator = self._operator("fwd")
        result = self._call(operator, layout, inputs, dynamics, list(needs))
        returns = self.operator.definition.returns
        return list(result[: len(returns)]), list(result[-1])

    def backward(
        self,
        layout: Layout,
        inputs: Sequence[torch.Tensor],
        dynamics: Sequence[Any],
        residuals: Sequence[torch.Tensor],
        grads: Sequence[Any],
        needs: Sequence[bool],
    ) -> list[torch.Tensor]:
        """Gradients of the inputs that need one."""
        refusal = self._refusal(layout, inputs, needs)
        if refusal is not None:
            definition = self.operator.definition
            part = "it"
            hint = "define a backward with @kernel.backward, use jax.custom_vjp inside the kernel, "
            hint += "or pass backward='reference'"
            if definition.name != definition.kernel:
                part, hint = f"its derivative {definition.name!r}", "make that one differentiable"
            raise MissingBackwardError(
                f"kernel {definition.kernel!r}: JAX cannot differentiate {part}",
                where=definition.where,
                hint=hint,
            ) from refusal
        operator = self._operator("bwd")
        return list(
            self._call(
                operator, layout, inputs, dynamics, list(residuals), list(grads), list(needs)
            )
        )

    def tangents(
        self,
        layout: Layout,
        inputs: Sequence[torch.Tensor],
        dynamics: Sequence[Any],
        tangents: Sequence[Any],
    ) -> list[torch.Tensor]:
        """Tangents of the flat outputs (forward mode)."""
        operator = self._operator("jvp")
        return list(self._call(operator, layout, inputs, dynamics, list(tangents)))

    def give_way(self) -> None:
        """Leave the names of forward and backward to others."""
        with self._lock:
            for which in ("fwd", "bwd"):
                if which in self._made:
                    for part in (*self._parts.pop(which), self._made.pop(which)):
                        part.destroy()

    def destroy(self) -> None:
        """Take the derived operators out of torch."""
        with self._lock:
            for parts in self._parts.values():
                for part in parts:
                    part.destroy()
            for operator in self._made.values():
                operator.destroy()
            self._made.clear()
            self._parts.clear()

    # ------------------------------------------------------------------ making operators
    def _arguments(self, layout: Layout, inputs: Sequence[Any]) -> list[Any]:
        count = sum(p.kind is Kind.DYNAMIC for p in self.operator.definition.parameters)
        return join(self.operator.definition.parameters, layout, inputs, [0] * count)

    def _call(
        self,
        operator: Operator,
        layout: Layout,
        inputs: Sequence[Any],
        dynamics: Sequence[Any],
        *more: Any,
    ) -> Any:
        if layout.only_tensors:  # nothing but tensors: the common case
            return operator.op(*inputs, *more)
        return operator.op(
            *join(self.operator.definition.parameters, layout, inputs, dynamics), *more
        )

    def _operator(self, which: str) -> Operator:
        operator = self._made.get(which)
        if operator is None:
            with self._lock:
                operator = self._made.get(which)
                if operator is None:
                    operator = self._made[which] = self._make(which)
        return operator

    def _make(self, which: str) -> Operator:
        from tpu_kernels.registry import policies
        from tpu_kernels.registry.autograd import Autograd
        from tpu_kernels.registry.batching import Batching

        base = self.operator.definition
        if which == "fwd":
            extra, returns = [NEEDS], (*base.returns, ReturnKind.LIST)
            program = programs.forward_program(base)
        elif which == "bwd":
            extra, returns = [RESIDUALS, GRADS, NEEDS], (ReturnKind.LIST,)
            program = programs.backward_program(base)
        else:
            extra, returns = [TANGENTS], (ReturnKind.LIST,)
            program = programs.tangent_program(base)
        operator = derived_operator(self.operator, f"{base.name}__{which}", extra, returns, program)
        if base.flops is not None and which != "jvp":
            policies.register_flops(operator, base.flops, factor=2 if which == "bwd" else 1)
        # Derivatives of derivatives: the same rules once more, by recomputation (residuals are not
        # differentiable).
        self._parts[which] = [Autograd(operator, "recompute"), Batching(operator)]
        return operator


def derived_operator(
    base: Operator,
    name: str,
    extra: Sequence[Parameter],
    returns: tuple[ReturnKind, ...],
    program: Callable[..., Any],
    *,
    where: str | None = None,
) -> Operator:
    """An operator with the parameters of another (all positional, none mutated) and some more;
    ``where`` is the place of its source, if another."""
    own = tuple(_plain(p) for p in base.definition.parameters)
    # A derivative of a derivative has these parameters twice.
    order = sum(p.name.startswith("tk_") for p in own)
    parameters = own + tuple(dataclasses.replace(p, name=f"{p.name}{order or ''}") for p in extra)
    arguments = ", ".join(f"{p.schema_type} {p.name}" for p in parameters)
    results = [r.value for r in returns]
    arrow = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return Operator(
        Definition(
            name=name,
            schema=f"{name.split('::')[1]}({arguments}) -> {arrow}",
            parameters=parameters,
            returns=returns,
            program=program,
            where=where or base.definition.where,
            kernel=base.definition.kernel,
            int64=base.definition.int64,
            has_defaults=False,
            cache_dir=base.definition.cache_dir,
            freshness=base.definition.freshness,
        ),
        base.counters,
    )


def _plain(p: Parameter) -> Parameter:
    """A parameter as derived operators take it: by position."""
    return dataclasses.replace(p, keyword_only=False)
