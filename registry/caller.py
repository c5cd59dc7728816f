"""The function behind ``kernel(...)``: the author's signature in front of the operator.

It is generated once per kernel, so that a call costs one Python frame: arguments that the operator
takes as they are pass through, the others (enums, tuples, dtypes, numbers that must not be tensors)
are checked and converted. `torch.compile` traces through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpu_kernels.dsl.signature import show
from tpu_kernels.dsl.spec import EMPTY, KernelSpec, Kind, Parameter
from tpu_kernels.errors import ArgumentError

_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int, torch.SymInt),
    "SymInt": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "bool": (bool, torch.SymBool),
    "str": (str,),
}
_NUMPY: dict[str, tuple[type, ...]] = {
    "int": (np.integer,),
    "SymInt": (np.integer,),
    "float": (np.floating, np.integer),
    "bool": (np.bool_,),
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
    caller: Callable[..., Any] = env["kernel"]
    caller.__name__ = caller.__qualname__ = spec.opname  # Python's own errors name it
    return caller


def _scalar(base: str, value: Any) -> Any:
    """A number or string as a schema type takes it; raises `TypeError` or `OverflowError`."""
    if isinstance(value, _SCALARS[base]):
        if base == "float" and type(value) is int:
            return float(value)
        if base in ("int", "SymInt") and type(value) is int and not torch.compiler.is_compiling():
            # Not while torch.compile traces: the comparison would become a guard on the value.
            _check_64_bits(value)
        return value
    if isinstance(value, _NUMPY.get(base, ())):
        return value.item()  # type: ignore[attr-defined]
    raise TypeError(f"expected {base}, got {type(value).__name__}")


def _check_64_bits(value: int) -> None:
    if not -(2**63) <= value < 2**63:
        raise OverflowError(f"{value} does not fit into 64 bits")


def _list(p: Parameter, value: Any) -> list[Any]:
    """A sequence as a schema type takes it; raises `TypeError` or what the conversion raises."""
    if isinstance(value, (str, bytes, torch.Tensor)):
        # Their elements are not what the caller meant.
        raise TypeError(f"expected a sequence, got {type(value).__name__}")
    items: list[Any] = list(value) if p.to_schema is None else p.to_schema(value)
    if p.kind.is_tensor:
        holes = p.schema_type.startswith("Tensor?")
        for item in items:
            if not (isinstance(item, torch.Tensor) or (item is None and holes)):
                raise TypeError(f"expected tensors, got {type(item).__name__}")
        return items
    base = p.schema_type.split("[")[0]
    return [_scalar(base, item) for item in items] if base in _SCALARS else items


def make_converter(spec: KernelSpec, p: Parameter) -> Callable[[Any], Any]:
    """A function that checks a caller's value of one parameter and turns it into what the schema
    takes."""
    optional = p.schema_type.endswith("?") or p.kind is Kind.OPTIONAL_LIST
    base = p.schema_type.rstrip("?")
    to_schema = p.to_schema
    is_list = "[" in base

    def convert(value: Any) -> Any:
        if value is None and optional:
            return None
        try:
            if is_list:
                converted = _list(p, value)
            elif to_schema is not None:
                converted = to_schema(value)
            else:
                converted = _scalar(base, value) if base in _SCALARS else value
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise refuse(spec, p, value) from error
        if p.length is not None and len(converted) != p.length:
            raise ArgumentError(
                f"kernel {spec.name!r}: argument {p.name!r}: expected {p.length} values, got "
                f"{len(converted)}",
                where=str(spec.source),
            )
        return converted

    return convert


def refuse(spec: KernelSpec, p: Parameter, value: Any) -> ArgumentError:
    """The error for a value that a parameter does not take."""
    hint = None
    if isinstance(value, torch.Tensor) and p.kind in (Kind.STATIC, Kind.DYNAMIC):
        hint = f"pass {p.name}.item(), or annotate the parameter as jax.Array to take tensors"
    if isinstance(value, torch.Tensor):
        shown = "a tensor"
    elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        shown = f"{type(value).__name__} of {', '.join(type(v).__name__ for v in value)}"
    else:
        shown = f"{type(value).__name__} {value!r}"
    return ArgumentError(
        f"kernel {spec.name!r}: argument {p.name!r} takes {annotation_text(p)}, got {shown}",
        where=str(spec.source),
        hint=hint,
    )


def annotation_text(p: Parameter) -> str:
    """How the author annotated a parameter."""
    if p.annotation is None or p.annotation is EMPTY:
        return p.schema_type
    return show(p.annotation)
