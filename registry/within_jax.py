"""Kernels called on JAX arrays: in the body of another kernel, or in a JAX program of the user's
own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpu_kernels.dsl.spec import KernelSpec, Kind, Parameter
from tpu_kernels.registry.caller import make_converter
from tpu_kernels.registry.engine import current_interpret, interpreting


def has_arrays(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether there is a JAX array, or a tracer, among the arguments of a call."""
    return any(_is_array(value) for value in (*args, *kwargs.values()))


def _is_array(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_array(v) for v in value)
    return type(value).__module__.startswith(("jax", "jaxlib")) and hasattr(value, "aval")


def call(spec: KernelSpec, arguments: Mapping[str, Any], declared: Mapping[str, Any]) -> Any:
    """Trace a kernel into the JAX program that calls it.

    Args:
        spec: The kernel.
        arguments: One value for each of its parameters, by name.
        declared: Values of the tunables that the caller leaves open.

    Returns:
        What the author's function returns.

    Raises:
        ArgumentError: A value is none that its parameter takes.
    """
    values = {p.name: _for_function(spec, p, arguments[p.name]) for p in spec.op_parameters}
    values.update({n: declared[n] for n in spec.tunables if values[n] is None})

    def run(interpret: Any) -> Any:
        with interpreting(interpret):
            outputs, mutated = spec.call(values, interpret)
        result = spec.returns.unflatten(outputs)
        return result if not mutated else mutated if not outputs else (result, mutated)

    interpret = current_interpret()
    return run(interpret) if interpret is not None else _for_platform(spec, values, run)


def _for_platform(spec: KernelSpec, values: Mapping[str, Any], run: Callable[[Any], Any]) -> Any:
    """Run a kernel in a program of the user's, whose platform decides about interpreting.

    To ask JAX for its default platform would start every backend that it finds, and be wrong for a
    program that is lowered for another one.
    """
    import jax

    from tpu_kernels import _compat_jax

    arrays = [x for x in jax.tree_util.tree_leaves(dict(values)) if isinstance(x, jax.Array)]
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        platforms = {device.platform for x in arrays for device in x.devices()}
        return run("tpu" not in platforms)
    if not (spec.takes_interpret or _compat_jax.has_pallas_call(jax.make_jaxpr(run, (0,))(False))):
        return run(False)  # nothing depends on it
    return jax.lax.platform_dependent(tpu=lambda: run(False), default=lambda: run(True))


def _for_function(spec: KernelSpec, p: Parameter, value: Any) -> Any:
    """What the author's function takes for a value that was passed together with JAX arrays."""
    if value is None:
        return p.for_kernel(None)
    if p.kind.is_tensor or p.kind is Kind.DYNAMIC:
        return value
    return p.for_kernel(make_converter(spec, p)(value))
