"""JAX bodies of derivative operators, from the body of the operator that they differentiate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import Layout, fill
from tpu_kernels.registry.operator import Body, Call, Definition
from tpu_kernels.registry.programs import flat_outputs, select

Program = Callable[[Call, Engine], Body]


def base_call(base: Definition, call: Call) -> tuple[Call, list[Any]]:
    """The base operator's part of a derived operator's call, and the values of the further static
    parameters."""
    tensors = sum(p.kind.is_tensor for p in base.parameters)
    values = len(base.parameters) - tensors
    layout = Layout(call.layout.slots[:tensors], call.layout.values[:values])
    return Call(layout, call.avals[: layout.count]), list(call.layout.values[values:])


def _flat(slots: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for slot, argument in zip(slots, arguments, strict=True):
        if isinstance(slot, tuple):
            flat.extend(a for part, a in zip(slot, argument, strict=True) if part)
        elif slot:
            flat.append(argument)
    return flat


def _vjp(
    base: Definition,
    call: Call,
    engine: Engine,
    flat: Sequence[Any],
    dynamics: Sequence[Any],
    needs: Sequence[bool],
) -> tuple[list[Any], Any]:
    """Result slots, and JAX's vjp closure with respect to the inputs that need a gradient."""
    import jax

    body = base.program(call, engine)
    outputs: list[Any] = []

    def slots_of(*all_flat: Any) -> list[Any]:
        return body(fill(call.layout, all_flat), dynamics)

    function, wanted = select(slots_of, flat, needs)
    outputs, vjp = jax.vjp(function, *wanted)
    return outputs, vjp


def _residual_positions(vjp: Any, known: Sequence[Any]) -> tuple[list[Any], Any, list[int]]:
    """Leaves of a vjp closure, its tree, and which leaves are neither inputs nor constants of the
    trace, and can be tensors."""
    import jax

    from tpu_kernels.dsl.dtypes import can_leave

    leaves, tree = jax.tree_util.tree_flatten(vjp)
    inputs = {id(x) for x in known}
    positions = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, jax.core.Tracer)
        and id(leaf) not in inputs
        and can_leave(leaf.shape, leaf.dtype)
    ]
    return leaves, tree, positions


def forward_program(base: Definition) -> Program:
    """Outputs, then the residuals that the backward wants."""

    def program(call: Call, engine: Engine) -> Body:
        inner, (needs,) = base_call(base, call)

        def body(tensors: Sequence[Any], dynamics: Sequence[Any]) -> list[Any]:
            flat = _flat(inner.layout.slots, tensors)
            outputs, vjp = _vjp(base, inner, engine, flat, dynamics, needs)
            leaves, _, positions = _residual_positions(vjp, flat)
            return [*outputs[: len(base.returns)], [leaves[i] for i in positions]]

        return body

    return program


def backward_program(base: Definition) -> Program:
    """Gradients of the inputs that need one, from inputs, residuals (none: recompute) and output
    gradients."""

    def program(call: Call, engine: Engine) -> Body:
        inner, (needs,) = base_call(base, call)

        def body(tensors: Sequence[Any], dynamics: Sequence[Any]) -> list[Any]:
            import jax
            import jax.numpy as jnp

            *arguments, residuals, grads = tensors
            flat = _flat(inner.layout.slots, arguments)
            outputs, vjp = _vjp(base, inner, engine, flat, dynamics, needs)
            if residuals:
                leaves, tree, positions = _residual_positions(vjp, flat)
                for position, residual in zip(positions, residuals, strict=True):
                    leaves[position] = residual
                vjp = jax.tree_util.tree_unflatten(tree, leaves)
            cotangents = iter(_cotangents(flat_outputs(outputs), grads))
            structured = [_nest(slot, cotangents) for slot in outputs]
            gradients = iter(vjp(structured))
            wanted = [x for x, need in zip(flat, needs, strict=True) if need]
            return [[_conjugate(jnp.asarray(next(gradients), x.dtype)) for x in wanted]]

        return body

    return program


def _cotangents(outputs: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """A cotangent for each flat output: zeros where torch has none, float0 for integers as JAX
    wants it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    cotangents: list[Any] = []
    padded = [*grads, *([None] * (len(outputs) - len(grads)))]
    for output, grad in zip(outputs, padded, strict=True):
        if not jnp.issubdtype(output.dtype, jnp.inexact):
            cotangents.append(np.zeros(output.shape, jax.dtypes.float0))
        else:
            cotangents.append(
                jnp.zeros(output.shape, output.dtype)
                if grad is None
                else _conjugate(grad.astype(output.dtype))
            )
    return cotangents


def _conjugate(gradient: Any) -> Any:
    """Between the conventions: the gradient of a complex number is in torch the conjugate of what
    it is in JAX, whose `jax.vjp` is the plain transpose."""
    import jax.numpy as jnp

    return gradient.conj() if jnp.iscomplexobj(gradient) else gradient


def _nest(slot: Any, items: Any) -> Any:
    if slot is None:
        return None
    return [next(items) for _ in slot] if isinstance(slot, (list, tuple)) else next(items)


def tangent_program(base: Definition) -> Program:
    """Tangents of the flat outputs from inputs and their tangents."""

    def program(call: Call, engine: Engine) -> Body:
        inner, _ = base_call(base, call)

        def body(tensors: Sequence[Any], dynamics: Sequence[Any]) -> list[Any]:
            import jax
            import jax.numpy as jnp
            import numpy as np

            *arguments, tangents = tensors
            flat = _flat(inner.layout.slots, arguments)
            run = base.program(inner, engine)

            def function(*all_flat: Any) -> list[Any]:
                return flat_outputs(run(fill(inner.layout, all_flat), dynamics))

            full: list[Any] = []
            for x, tangent in zip(flat, tangents, strict=True):
                if not jnp.issubdtype(x.dtype, jnp.inexact):
                    full.append(np.zeros(x.shape, jax.dtypes.float0))
                else:
                    full.append(
                        jnp.zeros(x.shape, x.dtype) if tangent is None else tangent.astype(x.dtype)
                    )
            outputs, out_tangents = jax.jvp(function, tuple(flat), tuple(full))
            return [
                [
                    t if jnp.issubdtype(o.dtype, jnp.inexact) else jnp.zeros(o.shape, o.dtype)
                    for o, t in zip(outputs, out_tangents, strict=True)
                ]
            ]

        return body

    return program
