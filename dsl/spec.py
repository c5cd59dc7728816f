"""`KernelSpec`: everything known of a kernel, independent of the language that it was written in.

A front end (`tpu_kernels.dsl.jax_frontend`, a Helion front end, ...) returns one; every layer above
works on it alone. Adding a language to the toolkit means writing one function that returns a
`KernelSpec`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EMPTY: Any = inspect.Parameter.empty


class Kind(enum.Enum):
    """What a parameter of a kernel is to the operator."""

    TENSOR = "Tensor"
    OPTIONAL = "Tensor?"
    LIST = "Tensor[]"
    HOLEY_LIST = "Tensor?[]"
    OPTIONAL_LIST = "Tensor[]?"
    STATIC = "static"  # a Python value that the traced program is specialised for
    DYNAMIC = (
        "dynamic"  # a number that enters the program as a 0-d array: one program for all values
    )
    INTERPRET = "interpret"  # filled in by the toolkit; not part of the operator

    def __init__(self, schema_type: str) -> None:
        # Plain attributes, not properties: they are asked for on every differentiated call.
        self.is_tensor = schema_type.startswith("Tensor")
        self.is_list = "[]" in schema_type


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: The Python name, also the schema's.
        kind: What it is to the operator.
        schema_type: The type in the torch schema, for example ``"Tensor?"`` or ``"int[2]"``.
        default: The Python default, or `EMPTY`.
        keyword_only: Whether it can be passed by keyword only.
        length: For fixed-length tuples (and tuples of tensors) the required number of elements.
        to_schema: Turns what a caller passed into what the schema takes (an Enum member into its
            name).
        from_schema: Turns what the dispatcher passed into what the kernel takes (a list into a
            tuple).
        tunable: Whether the toolkit chooses a value when the caller passes none.
        none_is_default: Whether None in the schema stands for the Python default, which a schema
            cannot write.
        annotation: The resolved Python annotation, for messages.
    """

    name: str
    kind: Kind
    schema_type: str
    default: Any = EMPTY
    keyword_only: bool = False
    length: int | None = None
    to_schema: Callable[[Any], Any] | None = None
    from_schema: Callable[[Any], Any] | None = None
    tunable: bool = False
    none_is_default: bool = False
    annotation: Any = None

    @property
    def required(self) -> bool:
        """Whether a call must pass it."""
        return self.default is EMPTY and not self.tunable

    def for_kernel(self, value: Any) -> Any:
        """The value that the kernel function receives for what the dispatcher passed."""
        if value is None:
            return self.default if self.none_is_default else None
        return value if self.from_schema is None else self.from_schema(value)


class ReturnKind(enum.Enum):
    """What one slot of the operator's result is."""

    TENSOR = "Tensor"
    OPTIONAL = "Tensor?"
    LIST = "Tensor[]"


@dataclasses.dataclass(frozen=True)
class Returns:
    """The structure of a kernel's result.

    Attributes:
        slots: One `ReturnKind` per result of the (flat) torch schema.
        structure: How the slots nest: an ``int`` is a slot, a tuple nests, ``None`` is no result.
        annotation: The resolved return annotation, for messages.
    """

    slots: tuple[ReturnKind, ...]
    structure: Any
    annotation: Any = None

    def flatten(self, value: Any) -> list[Any]:
        """The slots of a result that has this structure; raises `ValueError` where it has not."""
        flat: list[Any] = []

        def walk(node: Any, part: Any, path: str) -> None:
            if isinstance(node, int):
                flat.append(part)
                return
            if not isinstance(part, (tuple, list)) or len(part) != len(node):
                got = (
                    f"{len(part)} values"
                    if isinstance(part, (tuple, list))
                    else type(part).__name__
                )
                raise ValueError(f"result{path} should be a tuple of {len(node)} values, got {got}")
            for i, child in enumerate(node):
                walk(child, part[i], f"{path}[{i}]")

        if self.structure is not None:
            walk(self.structure, value, "")
        elif value is not None:
            raise ValueError(
                f"the kernel is annotated to return nothing, got {type(value).__name__}"
            )
        return flat

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """The inverse of `flatten`."""

        def build(node: Any) -> Any:
            return flat[node] if isinstance(node, int) else tuple(build(child) for child in node)

        return None if self.structure is None else build(self.structure)

    @property
    def is_flat(self) -> bool:
        """Whether the operator's own result already has the annotated structure."""
        return (
            self.structure is None
            or self.structure == 0
            or (len(self.slots) > 1 and self.structure == tuple(range(len(self.slots))))
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a kernel comes from.

    Attributes:
        file: The author's file, or ``"<stdin>"``-like for interactive code.
        line: First line of the definition.
        module: Name of the defining module.
        qualname: Qualified name of the function.
        digest: Hash of everything that decides what the kernel computes: code, closure values,
            helper functions.
    """

    file: str
    line: int
    module: str
    qualname: str
    digest: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Everything known of a kernel (see `tpu_kernel` for the meaning of the options).

    Attributes:
        name: Qualified operator name, ``"namespace::op"``.
        jax_fn: Traceable JAX function with the Python parameters of the author's function.
        parameters: The parameters in Python order.
        returns: Structure of the outputs (without mutated arguments).
        source: File, line and content hash.
        language: ``"jax"``, ``"helion"``, ...
        read_config: Makes a dict of parameter values of what stands for a config in the kernel's
            language; None where that is such a dict already.
        config_space: Lists configs worth trying for arguments by name (abstract values for
            tensors), where the language knows some by itself.
    """

    name: str
    jax_fn: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    returns: Returns
    source: Source
    language: str = "jax"
    mutates_args: tuple[str, ...] = ()
    donate_args: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    backward: str | None = "jax"
    vmap: str | None = "jax"
    autocast: Any = None
    sharding: Any = None
    int64: str | None = None
    flops: Callable[..., int] | None = None
    configs: Any = None
    constraints: Any = None
    bucket: Callable[..., Any] | None = None
    precision: str | None = None
    cache_dir: Any = None
    doc: str | None = None
    read_config: Callable[[Any], dict[str, Any]] | None = None
    config_space: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None

    @property
    def namespace(self) -> str:
        """The part of the name before ``::``."""
        return self.name.split("::")[0]

    @property
    def opname(self) -> str:
        """The part of the name after ``::``."""
        return self.name.split("::")[1]

    @property
    def schema(self) -> str:
        """The operator's torch schema without the namespace."""
        from tpu_kernels.dsl.signature import schema_of

        return schema_of(self)

    @property
    def op_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that the operator has, in schema order (positional before
        keyword-only)."""
        visible = [p for p in self.parameters if p.kind is not Kind.INTERPRET]
        return tuple(sorted(visible, key=lambda p: p.keyword_only))

    @property
    def takes_interpret(self) -> bool:
        """Whether the author's function has the parameter ``interpret``."""
        return any(p.kind is Kind.INTERPRET for p in self.parameters)

    @property
    def tunables(self) -> tuple[str, ...]:
        """Names of the parameters that the toolkit chooses when the caller passes none."""
        return tuple(p.name for p in self.parameters if p.tunable)

    def parameter(self, name: str) -> Parameter:
        """The parameter of that name; raises `KeyError` where there is none."""
        for p in self.parameters:
            if p.name == name:
                return p
        raise KeyError(name)

    def call(self, values: Mapping[str, Any], interpret: Any) -> tuple[list[Any], dict[str, Any]]:
        """Call the JAX function with values by name.

        Args:
            values: A value for every operator parameter: arrays, lists of arrays, static Python
                values.
            interpret: What a parameter called ``interpret`` receives.

        Returns:
            The flat outputs by slot, and the new values of mutated arguments by name.

        Raises:
            ValueError: The function returned something else than it declares.
        """
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for p in self.parameters:
            value = interpret if p.kind is Kind.INTERPRET else values[p.name]
            if p.keyword_only:
                keywords[p.name] = value
            else:
                positional.append(value)
        result = self.jax_fn(*positional, **keywords)
        mutated: dict[str, Any] = {}
        if self.mutates_args:
            result, mutated = self._split_mutated(result)
        return self.returns.flatten(result), mutated

    def _split_mutated(self, result: Any) -> tuple[Any, dict[str, Any]]:
        outputs, mutated = (None, result) if isinstance(result, Mapping) else (None, None)
        if mutated is None and isinstance(result, tuple) and len(result) == 2:
            outputs, mutated = result
        if not isinstance(mutated, Mapping) or set(mutated) != set(self.mutates_args):
            wanted = "{" + ", ".join(f"{n!r}: new_{n}" for n in self.mutates_args) + "}"
            raise ValueError(
                f"a kernel with mutates_args must return {wanted}, or (outputs, {wanted}); got "
                f"{_shape_of(result)}"
            )
        return outputs, dict(mutated)


def _shape_of(result: Any) -> str:
    if isinstance(result, Mapping):
        return "a dict with keys " + ", ".join(map(repr, result))
    if isinstance(result, tuple):
        return "(" + ", ".join(type(r).__name__ for r in result) + ")"
    return type(result).__name__
