"""From a Python signature to the parameters and the torch schema of an operator."""

from __future__ import annotations

import enum
import inspect
import math
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from tpu_kernels.dsl.annotations import (
    SUPPORTED,
    Meaning,
    classify,
    is_tensor,
    optional_of,
    sequence_of,
    tuple_args,
)
from tpu_kernels.dsl.spec import EMPTY, KernelSpec, Kind, Parameter, ReturnKind, Returns
from tpu_kernels.errors import SignatureError

INTERPRET = "interpret"


def read_parameters(
    fn: Callable[..., Any],
    resolved: Mapping[str, Any],
    *,
    kernel: str,
    where: str,
    dynamic_args: Collection[str] = (),
    tunables: Collection[str] = (),
) -> tuple[Parameter, ...]:
    """The parameters of a kernel function.

    Args:
        fn: The author's function (may be a `functools.partial`: bound arguments become defaults).
        resolved: Its annotations as objects, by parameter name.
        kernel: Qualified operator name, for messages.
        where: ``file:line``, for messages.
        dynamic_args: Names of numbers that enter as 0-d arrays.
        tunables: Names of the parameters that the toolkit chooses.

    Returns:
        One `Parameter` per Python parameter, in order.

    Raises:
        SignatureError: A parameter has no annotation, one without meaning in a schema, or is
            variadic.
    """
    signature = inspect.signature(fn)
    parameters = []
    for p in signature.parameters.values():
        if p.name == INTERPRET:
            parameters.append(
                Parameter(
                    p.name,
                    Kind.INTERPRET,
                    "",
                    keyword_only=p.kind is inspect.Parameter.KEYWORD_ONLY,
                )
            )
            continue
        if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise SignatureError(
                f"kernel {kernel!r}: parameter '{p}' is variadic; an operator has a fixed schema",
                where=where,
                hint="take a list: xs: list[jax.Array]",
            )
        if p.name.startswith("_") and p.name.strip("_"):
            raise SignatureError(
                f"kernel {kernel!r}: parameter {p.name!r} begins with an underscore",
                where=where,
                hint="rename it: such names are those of the functions made around the kernel",
            )
        if p.name not in resolved:
            raise SignatureError(
                f"kernel {kernel!r}: parameter {p.name!r} has no type annotation",
                where=where,
                hint=f"annotate it, for example {p.name}: jax.Array; supported: {SUPPORTED}",
            )
        meaning = classify(resolved[p.name], dynamic=p.name in dynamic_args)
        if meaning is None:
            dynamic = p.name in dynamic_args
            problem = "cannot be dynamic" if dynamic else "no operator schema can express"
            raise SignatureError(
                f"kernel {kernel!r}: parameter {p.name!r} is annotated {show(resolved[p.name])}, "
                "which "
                f"{problem}",
                where=where,
                hint="dynamic_args takes int, float and bool parameters"
                if p.name in dynamic_args
                else f"supported: {SUPPORTED}",
            )
        parameters.append(
            _parameter(p, meaning, resolved[p.name], p.name in tunables, kernel, where)
        )
    _check_names(parameters, dynamic_args, "dynamic_args", kernel, where)
    _check_names(parameters, tunables, "configs", kernel, where)
    return tuple(parameters)


def _parameter(
    p: inspect.Parameter, meaning: Meaning, annotation: Any, tunable: bool, kernel: str, where: str
) -> Parameter:
    if tunable and meaning.kind is not Kind.STATIC:
        raise SignatureError(
            f"kernel {kernel!r}: parameter {p.name!r} is tuned by configs but is "
            f"{meaning.schema_type}, not a static value",
            where=where,
        )
    schema_type = meaning.schema_type
    try:
        default = _default(p.default, meaning, tunable)
    except (ValueError, KeyError, TypeError) as error:
        raise SignatureError(
            f"kernel {kernel!r}: default of {p.name!r} does not fit its annotation "
            f"{show(annotation)}: {error}",
            where=where,
            hint=f"write Optional[{show(annotation)}]" if p.default is None else None,
        ) from error
    none_is_default = not tunable and not _schema_can_write(schema_type, default)
    if none_is_default and schema_type.endswith("?"):
        raise SignatureError(
            f"kernel {kernel!r}: the default of the optional parameter {p.name!r} cannot be "
            "written in a torch schema",
            where=where,
            hint="use None as the default and replace it in the kernel",
        )
    if (tunable or none_is_default) and not schema_type.endswith("?"):
        schema_type += "?"
    return Parameter(
        p.name,
        meaning.kind,
        schema_type,
        default,
        p.kind is inspect.Parameter.KEYWORD_ONLY,
        meaning.length,
        meaning.to_schema,
        meaning.from_schema,
        tunable,
        none_is_default,
        annotation,
    )


def _default(value: Any, meaning: Meaning, tunable: bool) -> Any:
    """A default as the kernel receives it, since the dispatcher leaves out what equals a default:
    an integer given for a float is a float, a list a tuple. Raises for a value of another type."""
    if value is EMPTY or (value is None and (tunable or meaning.optional)):
        return value
    if value is None:
        raise TypeError("None is no value of it")
    if meaning.kind in (Kind.TENSOR, Kind.OPTIONAL):
        raise TypeError(f"a tensor cannot have the default {value!r}")
    schema_type = meaning.schema_type.rstrip("?")
    element = schema_type.split("[")[0]
    if meaning.to_schema is not None:
        value = meaning.to_schema(value)
    if element in _NUMBERS:
        is_list = "[" in schema_type
        value = [_number(v, element) for v in value] if is_list else _number(value, element)
    if meaning.length is not None and len(value) != meaning.length:
        raise ValueError(f"expected {meaning.length} values, got {len(value)}")
    return value if meaning.from_schema is None else meaning.from_schema(value)


_NUMBERS: dict[str, tuple[type, tuple[type, ...]]] = {
    "int": (int, (int, np.integer)),
    "SymInt": (int, (int, np.integer)),
    "float": (float, (float, int, np.floating, np.integer)),
    "bool": (bool, (bool, np.bool_)),
    "str": (str, (str,)),
}


def _number(value: Any, schema_type: str) -> Any:
    exact, accepted = _NUMBERS[schema_type]
    if not isinstance(value, accepted):
        raise TypeError(f"{value!r} is no {exact.__name__}")
    return exact(value)


def _schema_can_write(schema_type: str, default: Any) -> bool:
    """Whether torch's schema parser has a notation for this default (it has none for infinities,
    most lists, and strings with quotes, backslashes or control characters)."""
    if default is EMPTY or default is None:
        return True
    if isinstance(default, float) and not math.isfinite(default):
        return False
    if isinstance(default, str):
        return default.isprintable() and not any(c in default for c in "\"'\\")
    if isinstance(default, (tuple, list)):
        return (
            schema_type.startswith(("int[", "float[", "bool["))
            and not schema_type.endswith("?")
            and all(_schema_can_write(schema_type, element) for element in default)
        )
    return True


def _check_names(
    parameters: list[Parameter], names: Collection[str], option: str, kernel: str, where: str
) -> None:
    known = [p.name for p in parameters]
    for name in names:
        if name not in known:
            raise SignatureError(
                f"kernel {kernel!r}: {option} names {name!r}, but the parameters are "
                f"{', '.join(known)}",
                where=where,
            )


def read_returns(annotation: Any, *, kernel: str, where: str, mutates: bool) -> Returns:
    """The structure of a kernel's result from its return annotation.

    Args:
        annotation: The resolved annotation, or `EMPTY`.
        kernel: Qualified operator name, for messages.
        where: ``file:line``, for messages.
        mutates: Whether the kernel declares ``mutates_args`` (then a missing annotation means no
            outputs).

    Returns:
        The `Returns`.

    Raises:
        SignatureError: No annotation, or one that is not made of tensors.
    """
    slots: list[ReturnKind] = []

    def walk(node: Any) -> Any:
        inner = optional_of(node)
        if is_tensor(node) or (inner is not None and is_tensor(inner)):
            slots.append(ReturnKind.TENSOR if inner is None else ReturnKind.OPTIONAL)
            return len(slots) - 1
        sequence = sequence_of(node)
        if sequence is not None and sequence[1] is None and is_tensor(sequence[0]):
            slots.append(ReturnKind.LIST)
            return len(slots) - 1
        args = tuple_args(node)
        if args:
            return tuple(walk(a) for a in args)
        raise SignatureError(
            f"kernel {kernel!r}: return annotation {show(annotation)} is not made of tensors",
            where=where,
            hint="return jax.Array, Optional[jax.Array], list[jax.Array] or a tuple of them",
        )

    if annotation is EMPTY and not mutates:
        raise SignatureError(
            f"kernel {kernel!r}: the result has no type annotation",
            where=where,
            hint="annotate it: -> jax.Array, or -> tuple[jax.Array, jax.Array]",
        )
    if annotation is EMPTY or annotation in (None, type(None)) or (mutates and annotation is dict):
        return Returns((), None, annotation)
    structure = walk(annotation)
    return Returns(tuple(slots), structure, annotation)


def schema_of(spec: KernelSpec) -> str:
    """The torch schema of a kernel, without the namespace.

    Example:
        >>> schema_of(spec)  # doctest: +SKIP
        'scale_add(Tensor x, Tensor y, float alpha=1.) -> Tensor'
    """
    parts: list[str] = []
    seen_keyword_only = False
    for p in spec.op_parameters:
        if p.keyword_only and not seen_keyword_only:
            parts.append("*")
            seen_keyword_only = True
        parts.append(_schema_argument(spec, p))
    returns = [r.value for r in spec.returns.slots]
    arrow = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"{spec.opname}({', '.join(parts)}) -> {arrow}"


def _schema_argument(spec: KernelSpec, p: Parameter) -> str:
    schema_type = p.schema_type
    if p.name in spec.mutates_args:
        letter = chr(ord("a") + spec.mutates_args.index(p.name))
        schema_type = schema_type.replace("Tensor", f"Tensor({letter}!)", 1)
    if p.tunable or p.none_is_default:
        return f"{schema_type} {p.name}=None"
    if p.default is EMPTY:
        return f"{schema_type} {p.name}"
    return f"{schema_type} {p.name}={_literal(p, p.default)}"


def _literal(p: Parameter, value: Any) -> str:
    value = p.to_schema(value) if value is not None and p.to_schema is not None else value
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal_scalar(v) for v in value) + "]"
    return _literal_scalar(value)


def _literal_scalar(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.name
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def show(annotation: Any) -> str:
    """An annotation as the author wrote it."""
    plain = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    text = str(annotation.__name__ if plain else annotation)
    return text.replace("jax.jaxlib._jax.Array", "jax.Array").replace(
        "jaxlib._jax.Array", "jax.Array"
    )
