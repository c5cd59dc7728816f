"""What a type annotation means for the operator's schema.

`resolve` turns the annotations of a function into objects (strings of ``from __future__ import
annotations`` included, also where a name exists only in an enclosing function), `classify` maps one
to schema terms.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tpu_kernels.dsl import dtypes
from tpu_kernels.dsl.spec import Kind
from tpu_kernels.errors import SignatureError

SUPPORTED = (
    "jax.Array or torch.Tensor, Optional of it, list/Sequence/tuple of tensors, int, float, bool, "
    "str, "
    "int | float, tuples and lists of those, Literal, Enum, dtypes, and Optional of any of them"
)
_SCALARS = {int: "int", float: "float", bool: "bool", str: "str"}
_NONE = type(None)


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What an annotation means: the schema type, and how values cross the schema in both
    directions."""

    kind: Kind
    schema_type: str
    to_schema: Callable[[Any], Any] | None = None
    from_schema: Callable[[Any], Any] | None = None
    length: int | None = None

    @property
    def optional(self) -> bool:
        """Whether None is a value of it."""
        return self.schema_type.endswith("?")


def resolve(
    fn: Callable[..., Any], caller_locals: Mapping[str, Any] | None, where: str
) -> dict[str, Any]:
    """The annotations of a function as objects.

    Args:
        fn: A Python function.
        caller_locals: Local names of the scope that decorates it.
        where: ``file:line`` for messages.

    Returns:
        Annotation by parameter name, ``"return"`` included.

    Raises:
        SignatureError: A name in a postponed annotation cannot be resolved.
    """
    scope = dict(caller_locals or {})
    scope.update(inspect.getclosurevars(fn).nonlocals if inspect.isfunction(fn) else {})
    resolved = {}
    for name, annotation in getattr(fn, "__annotations__", {}).items():
        if isinstance(annotation, str):
            try:
                # Evaluating the author's own annotation in his own scope, as typing.get_type_hints
                # does.
                annotation = eval(annotation, getattr(fn, "__globals__", vars(builtins)), scope)
            except Exception as error:
                raise SignatureError(
                    f"kernel {fn.__qualname__!r}: cannot resolve the annotation {annotation!r} of "
                    f"{_parameter(name)}: "
                    f"{type(error).__name__}: {error}",
                    where=where,
                    hint="import the name at module level or in the scope that decorates the "
                    "kernel",
                ) from error
        resolved[name] = annotation
    return resolved


def _parameter(name: str) -> str:
    return "the result" if name == "return" else f"parameter {name!r}"


def is_tensor(annotation: Any) -> bool:
    """Whether an annotation stands for one tensor.

    Example:
        >>> import jax
        >>> is_tensor(jax.Array), is_tensor(torch.Tensor), is_tensor(int)
        (True, True, False)
    """
    import jax

    annotation = _strip(annotation)
    if annotation in (torch.Tensor, torch.nn.Parameter, jax.Array, np.ndarray):
        return True
    array_type = getattr(annotation, "array_type", None)  # jaxtyping: Float[Array, "m n"]
    return array_type is not None and is_tensor(array_type)


def _strip(annotation: Any) -> Any:
    return (
        typing.get_args(annotation)[0]
        if typing.get_origin(annotation) is typing.Annotated
        else annotation
    )


def optional_of(annotation: Any) -> Any | None:
    """``X`` for ``Optional[X]`` or ``X | None``, else None.

    Example:
        >>> optional_of(int | None), optional_of(int)
        (<class 'int'>, None)
    """
    annotation = _strip(annotation)
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal and None in args:
        rest = tuple(a for a in args if a is not None)
        return typing.Literal[rest] if rest else None
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    rest = tuple(a for a in args if a is not _NONE)
    if len(rest) == len(args) or not rest:
        return None
    return rest[0] if len(rest) == 1 else typing.Union[rest]  # noqa: UP007 (built from a runtime tuple)


def sequence_of(annotation: Any) -> tuple[Any, int | None] | None:
    """Element annotation and fixed length of a homogeneous list, Sequence or tuple annotation, else
    None.

    Example:
        >>> sequence_of(tuple[int, int]), sequence_of(list[int]), sequence_of(int)
        ((<class 'int'>, 2), (<class 'int'>, None), None)
    """
    annotation = _strip(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (list, collections.abc.Sequence, collections.abc.Iterable) and len(args) == 1:
        return args[0], None
    if origin is tuple and args:
        if len(args) == 2 and args[1] is Ellipsis:
            return args[0], None
        if all(a == args[0] for a in args):
            return args[0], len(args)
    return None


def tuple_args(annotation: Any) -> tuple[Any, ...]:
    """The element annotations of a tuple annotation of fixed length, else ``()``.

    Example:
        >>> tuple_args(tuple[int, str]), tuple_args(tuple[int, ...])
        ((<class 'int'>, <class 'str'>), ())
    """
    annotation = _strip(annotation)
    args = typing.get_args(annotation)
    return args if typing.get_origin(annotation) is tuple and Ellipsis not in args else ()


def classify(annotation: Any, *, dynamic: bool = False) -> Meaning | None:
    """What a resolved annotation means, or None where the schema has no type for it.

    Args:
        annotation: The annotation object.
        dynamic: Whether the parameter is named in ``dynamic_args``.

    Returns:
        The `Meaning`, or None.

    Example:
        >>> classify(tuple[int, int]).schema_type, classify(int | None).schema_type
        ('int[2]', 'int?')
    """
    annotation = _strip(annotation)
    inner = optional_of(annotation)
    if inner is not None:
        return _classify_optional(inner)
    if is_tensor(annotation):
        return Meaning(Kind.TENSOR, "Tensor")
    sequence = sequence_of(annotation)
    if sequence is not None:
        return _classify_sequence(*sequence)
    if dynamic:
        return {
            int: Meaning(Kind.DYNAMIC, "SymInt"),
            float: Meaning(Kind.DYNAMIC, "float"),
            bool: Meaning(Kind.DYNAMIC, "bool"),
        }.get(annotation)
    return _classify_static(annotation)


def _classify_optional(inner: Any) -> Meaning | None:
    meaning = classify(inner)
    if meaning is None or meaning.kind is Kind.DYNAMIC:
        return None
    if meaning.kind is Kind.TENSOR:
        return Meaning(Kind.OPTIONAL, "Tensor?")
    if meaning.kind is Kind.LIST:
        return dataclasses.replace(meaning, kind=Kind.OPTIONAL_LIST, schema_type="Tensor[]?")
    if meaning.kind is Kind.STATIC:
        return dataclasses.replace(meaning, schema_type=meaning.schema_type + "?")
    return None


def _classify_sequence(element: Any, length: int | None) -> Meaning | None:
    if is_tensor(element):
        return Meaning(Kind.LIST, "Tensor[]", list, tuple, length)
    inner = optional_of(element)
    if inner is not None and is_tensor(inner):
        return Meaning(Kind.HOLEY_LIST, "Tensor?[]", list, tuple, length)
    scalar = _classify_static(element)
    if scalar is None or scalar.schema_type.endswith("]"):
        return None
    to_schema, from_schema = scalar.to_schema, scalar.from_schema
    size = length if length is not None and scalar.schema_type == "int" else ""
    return Meaning(
        Kind.STATIC,
        f"{scalar.schema_type}[{size}]",
        list if to_schema is None else lambda v: [to_schema(e) for e in v],
        tuple if from_schema is None else lambda v: tuple(from_schema(e) for e in v),
        length,
    )


def _classify_static(annotation: Any) -> Meaning | None:
    if annotation in _SCALARS:
        return Meaning(Kind.STATIC, _SCALARS[annotation])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _classify_number(typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        return _classify_literal(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return Meaning(
            Kind.STATIC,
            "str",
            lambda v: v.name if isinstance(v, enum.Enum) else annotation[v].name,
            lambda v: annotation[v],
        )
    if _is_dtype(annotation):
        as_torch = annotation is torch.dtype
        return Meaning(
            Kind.STATIC,
            "ScalarType",
            dtypes.normalize,
            (lambda v: v) if as_torch else (lambda v: dtypes.to_jax(v)),
        )
    return None


def _classify_number(members: tuple[Any, ...]) -> Meaning | None:
    """``int | float``: torch's Scalar, whose values keep their own type."""
    if not set(members) <= {int, float, bool}:
        return None

    def check(value: Any) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}.get(
            type(value), type(value)
        )
        if kind not in members:
            raise TypeError(f"{value!r} is none of {', '.join(m.__name__ for m in members)}")
        return value

    return Meaning(Kind.STATIC, "Scalar", check, check)


def _classify_literal(values: tuple[Any, ...]) -> Meaning | None:
    schema_types = {_SCALARS.get(type(v)) for v in values}
    if len(schema_types) != 1 or None in schema_types:
        return None
    kind = type(values[0])

    def check(value: Any) -> Any:
        # True == 1 == 1.0, but a Literal lists values of one type.
        if type(value) is not kind or value not in values:
            raise ValueError(f"expected one of {', '.join(map(repr, values))}, got {value!r}")
        return value

    return Meaning(Kind.STATIC, str(schema_types.pop()), check, check)


def _is_dtype(annotation: Any) -> bool:
    return annotation in (torch.dtype, np.dtype) or typing.get_origin(annotation) is np.dtype
