"""The function behind ``kernel(...)``: the author's signature in front of the operator.

It is generated once per kernel, so that a call costs one Python frame: arguments that the operator
takes as they are pass through, the others (enums, tuples, dtypes, numbers that must not be tensors)
are checked and converted. `torch.compile` traces through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.dsl.spec import EMPTY, KernelSpec, Kind, Parameter
from tpu_kernels.errors import ArgumentError

_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int, torch.SymInt),
    "SymInt": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "bool": (bool, torch.SymBool),
    "str": (str,),
}


def make_caller(spec: KernelSpec, op: Callable[..., Any]) -> Callable[..., Any]:
    """Generate the calling function of a kernel.

    Args:
        spec: The kernel.
        op: Its operator.

    Returns:
        A function with the author's signature (without ``interpret``).
    """
    env: dict[str, Any] = {"_op": op, "_unflatten": spec.returns.unflatten}
    parts: list[str] = []
    keyword_only = False
    lines: list[str] = []
    passed: list[str] = []
    for i, p in enumerate(spec.op_parameters):
        if p.keyword_only and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(p.name if p.required else f"{p.name}=_default_{i}")
        if not p.required:
            env[f"_default_{i}"] = None if p.tunable or p.none_is_default else p.default
        if p.to_schema is not None or p.schema_type.rstrip("?") in _SCALARS:
            env[f"_convert_{i}"] = make_converter(spec, p)
            lines.append(f"    {p.name} = _convert_{i}({p.name})")
        passed.append(f"{p.name}={p.name}" if p.keyword_only else p.name)
    call = f"_op({', '.join(passed)})"
    if not spec.returns.is_flat:
        call = f"_unflatten({'(' + call + ',)' if len(spec.returns.slots) == 1 else call})"
    source = "\n".join([f"def kernel({', '.join(parts)}):", *lines, f"    return {call}"])
    exec(compile(source, f"<tpu_kernels caller of {spec.name}>", "exec"), env)
    return env["kernel"]  # type: ignore[no-any-return]


def make_converter(spec: KernelSpec, p: Parameter) -> Callable[[Any], Any]:
    """A function that checks a caller's value of one parameter and turns it into what the schema
    takes."""
    optional = p.schema_type.endswith("?") or p.kind is Kind.OPTIONAL_LIST
    accepted = _SCALARS.get(p.schema_type.rstrip("?"))
    to_schema = p.to_schema

    def convert(value: Any) -> Any:
        if value is None and optional:
            return None
        if to_schema is None:
            if accepted is not None and not isinstance(value, accepted):
                raise refuse(spec, p, value)
            return value
        try:
            value = to_schema(value)
        except (TypeError, ValueError, KeyError) as error:
            raise refuse(spec, p, value) from error
        if p.length is not None and len(value) != p.length:
            raise ArgumentError(
                f"kernel {spec.name!r}: argument {p.name!r}: expected {p.length} values, got "
                f"{len(value)}",
                where=str(spec.source),
            )
        return value

    return convert


def refuse(spec: KernelSpec, p: Parameter, value: Any) -> ArgumentError:
    """The error for a value that a parameter does not take."""
    hint = None
    if isinstance(value, torch.Tensor) and p.kind in (Kind.STATIC, Kind.DYNAMIC):
        hint = f"pass {p.name}.item(), or annotate the parameter as jax.Array to take tensors"
    shown = (
        f"{type(value).__name__} {value!r}" if not isinstance(value, torch.Tensor) else "a tensor"
    )
    return ArgumentError(
        f"kernel {spec.name!r}: argument {p.name!r} takes {annotation_text(p)}, got {shown}",
        where=str(spec.source),
        hint=hint,
    )


def annotation_text(p: Parameter) -> str:
    """How the author annotated a parameter."""
    if p.annotation is None or p.annotation is EMPTY:
        return p.schema_type
    return p.annotation.__name__ if isinstance(p.annotation, type) else str(p.annotation)
