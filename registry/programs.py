"""The JAX bodies of a kernel's operators: the kernel itself, its forward with residuals, its
backward, its tangents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpu_kernels.dsl.spec import KernelSpec, Kind, Parameter, ReturnKind
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import fill, static_values
from tpu_kernels.registry.operator import Body, Call, Definition

Chooser = Callable[[Call, Mapping[str, Any], Engine], Mapping[str, Any]]
"""``chooser(call, static values, engine)``: values for the tunables that the call leaves open."""


def kernel_program(spec: KernelSpec, choose: Chooser) -> Callable[[Call, Engine], Body]:
    """The program of the kernel itself."""
    parameters = spec.op_parameters

    def program(call: Call, engine: Engine) -> Body:
        statics = static_values(parameters, call.layout)
        statics.update(choose(call, statics, engine))

        def body(tensors: Sequence[Any], dynamics: Sequence[Any]) -> list[Any]:
            values = named_values(parameters, tensors, dynamics, statics)
            with default_precision(spec.precision):
                outputs, mutated = spec.call(values, engine.interpret)
            _check_slots(spec, outputs)
            results = [_as_arrays(o) for o in outputs]
            for name in spec.mutates_args:
                results.append(_like(spec, name, values[name], mutated[name]))
            return results

        return body

    return program


def named_values(
    parameters: Sequence[Parameter],
    tensors: Sequence[Any],
    dynamics: Sequence[Any],
    statics: Mapping[str, Any],
) -> dict[str, Any]:
    """All arguments by name, as the author's function takes them."""
    values = dict(zip((p.name for p in parameters if p.kind.is_tensor), tensors, strict=True))
    for p in parameters:  # lists reach the author's function as lists, as annotated
        if p.none_is_default and p.kind.is_list and values[p.name] is None:
            values[p.name] = p.default
        if p.kind.is_list and values[p.name] is not None:
            values[p.name] = list(values[p.name]) if p.length is None else tuple(values[p.name])
    dynamic = (p.name for p in parameters if p.kind is Kind.DYNAMIC)
    values.update(zip(dynamic, dynamics, strict=True))
    values.update(statics)
    return values


@contextlib.contextmanager
def default_precision(precision: str | None) -> Iterator[None]:
    """The kernel's default matmul precision, where it states one; JAX's own otherwise."""
    if precision is None:
        yield
        return
    import jax

    with jax.default_matmul_precision(precision):
        yield


def _as_arrays(slot: Any) -> Any:
    import jax.numpy as jnp

    if slot is None:
        return None
    return [jnp.asarray(s) for s in slot] if isinstance(slot, (list, tuple)) else jnp.asarray(slot)


def _check_slots(spec: KernelSpec, outputs: Sequence[Any]) -> None:
    for i, (kind, output) in enumerate(zip(spec.returns.slots, outputs, strict=True)):
        if output is None and kind is not ReturnKind.OPTIONAL:
            raise ValueError(
                f"result {i} is None, but the return annotation {spec.returns.annotation} is not "
                "Optional"
            )
        if isinstance(output, (list, tuple)) != (kind is ReturnKind.LIST):
            raise ValueError(f"result {i} is a {type(output).__name__}, annotated as {kind.value}")


def _like(spec: KernelSpec, name: str, old: Any, new: Any) -> Any:
    """A mutated argument's new value, which must fit the tensor that it is written into."""
    import jax.numpy as jnp

    if old is None:  # an optional argument that the call leaves out
        return None
    if isinstance(old, (list, tuple)):
        if len(new) != len(old):
            raise ValueError(
                f"new value of {name!r} has {len(new)} tensors, the argument {len(old)}"
            )
        return [
            _like(spec, f"{name}[{i}]", o, n) for i, (o, n) in enumerate(zip(old, new, strict=True))
        ]
    new = jnp.asarray(new)
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ValueError(
            f"new value of {name!r} is {new.dtype}{new.shape}, the argument {old.dtype}{old.shape}"
        )
    return new


def flat_outputs(slots: Sequence[Any]) -> list[Any]:
    """The arrays of result slots in order, holes left out."""
    flat: list[Any] = []
    for slot in slots:
        flat.extend(slot if isinstance(slot, (list, tuple)) else () if slot is None else (slot,))
    return flat


def flat_function(
    base: Definition, call: Call, engine: Engine, dynamics: Sequence[Any]
) -> Callable[..., tuple[Any, ...]]:
    """An operator's program as a function of its flat tensors that returns its flat outputs."""
    body = base.program(call, engine)

    def function(*flat: Any) -> tuple[Any, ...]:
        return tuple(flat_outputs(body(fill(call.layout, flat), dynamics)))

    return function


def select(
    function: Callable[..., Any], flat: Sequence[Any], wanted: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """A function of the wanted arguments alone, the others fixed; and the wanted arguments."""

    def of_wanted(*some: Any) -> Any:
        items = iter(some)
        return function(
            *(next(items) if want else value for value, want in zip(flat, wanted, strict=True))
        )

    return of_wanted, [value for value, want in zip(flat, wanted, strict=True) if want]
