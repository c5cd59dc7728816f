"""The arguments of one operator call, apart: which tensors there are, and the static values.

Operators take optional tensors and lists; autograd, batching and the JAX side want flat tuples of
tensors. A `Layout` remembers how the flat tuple becomes arguments again. It is hashable, so that
programs are keyed by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tpu_kernels.dsl.spec import Kind, Parameter

ONE = 1
ABSENT = None
# a slot of a layout: ONE tensor, ABSENT, or for a list a tuple of those


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a flat tuple of tensors becomes the arguments of an operator.

    Attributes:
        slots: For each tensor parameter in schema order: 1, None, or a tuple of 1 and None for a
            list.
        values: For each other parameter in schema order: its value as the dispatcher passed it;
            None for a dynamic scalar, whose value is not part of any key.
        only_tensors: Whether the flat tuple already is the arguments.
    """

    slots: tuple[Any, ...]
    values: tuple[Any, ...]
    only_tensors: bool = dataclasses.field(init=False, compare=False, repr=False, default=False)

    def __post_init__(self) -> None:
        key = (self.slots, tuple(map(freeze, self.values)))
        # Layouts are keys on the differentiated call path; a frozen dataclass sets attributes this
        # way only.
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))
        object.__setattr__(
            self, "only_tensors", not self.values and all(slot == ONE for slot in self.slots)
        )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)  # type: ignore[attr-defined]

    @property
    def count(self) -> int:
        """Number of tensors in the flat tuple."""
        return sum(
            1
            for slot in self.slots
            for part in (slot if isinstance(slot, tuple) else (slot,))
            if part
        )


def freeze(value: Any) -> Any:
    """A hashable stand-in for a static value in keys: NaN equals itself, 1 differs from 1.0 and
    from True.

    Example:
        >>> freeze(float("nan")) == freeze(float("nan")), freeze(1) == freeze(1.0)
        (True, False)
    """
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return tuple(freeze(v) for v in value)
    if isinstance(value, bool):
        return "bool", value
    return value


def split(
    parameters: Sequence[Parameter], arguments: Sequence[Any]
) -> tuple[Layout, list[Any], list[Any]]:
    """Take the arguments of a call apart.

    Args:
        parameters: The operator's parameters in schema order.
        arguments: One argument for each.

    Returns:
        The `Layout`, the flat list of tensors, and the values of dynamic scalars.
    """
    slots: list[Any] = []
    values: list[Any] = []
    tensors: list[Any] = []
    dynamics: list[Any] = []
    for parameter, argument in zip(parameters, arguments, strict=True):
        if parameter.kind is Kind.DYNAMIC:
            values.append(None)
            dynamics.append(argument)
        elif not parameter.kind.is_tensor:
            values.append(argument)
        elif argument is None:
            slots.append(ABSENT)
        elif parameter.kind.is_list:
            slots.append(tuple(ABSENT if a is None else ONE for a in argument))
            tensors.extend(a for a in argument if a is not None)
        else:
            slots.append(ONE)
            tensors.append(argument)
    return Layout(tuple(slots), tuple(values)), tensors, dynamics


def fill(layout: Layout, flat: Iterable[Any]) -> list[Any]:
    """The tensor arguments (one per tensor parameter) from a flat sequence.

    Example:
        >>> fill(Layout((ONE, ABSENT, (ONE, ABSENT)), ()), "ab")
        ['a', None, ('b', None)]
    """
    items = iter(flat)

    def part(slot: Any) -> Any:
        if isinstance(slot, tuple):
            return tuple(part(s) for s in slot)
        return next(items) if slot else None

    return [part(slot) for slot in layout.slots]


def join(
    parameters: Sequence[Parameter], layout: Layout, flat: Iterable[Any], dynamics: Iterable[Any]
) -> list[Any]:
    """All arguments in schema order (the inverse of `split`)."""
    tensors, values, scalars = iter(fill(layout, flat)), iter(layout.values), iter(dynamics)
    arguments = []
    for parameter in parameters:
        if parameter.kind.is_tensor:
            argument = next(tensors)
            arguments.append(list(argument) if isinstance(argument, tuple) else argument)
        else:
            value = next(values)
            arguments.append(next(scalars) if parameter.kind is Kind.DYNAMIC else value)
    return arguments


def static_values(parameters: Sequence[Parameter], layout: Layout) -> dict[str, Any]:
    """The static arguments by name, as the kernel function receives them."""
    others = [p for p in parameters if not p.kind.is_tensor]
    return {
        p.name: p.for_kernel(value)
        for p, value in zip(others, layout.values, strict=True)
        if p.kind is not Kind.DYNAMIC
    }


def flat_names(parameters: Sequence[Parameter], layout: Layout) -> list[str]:
    """A name for each tensor of the flat tuple, for messages: ``x``, ``ys[1]``."""
    names: list[str] = []
    for parameter, slot in zip(
        (p for p in parameters if p.kind.is_tensor), layout.slots, strict=True
    ):
        if isinstance(slot, tuple):
            names.extend(f"{parameter.name}[{i}]" for i, part in enumerate(slot) if part)
        elif slot:
            names.append(parameter.name)
    return names


def map_tensors(fn: Callable[[Any], Any], argument: Any) -> Any:
    """Apply a function to the tensor, or to each tensor of the list, that an argument holds."""
    if argument is None:
        return None
    if isinstance(argument, (list, tuple)):
        return [None if a is None else fn(a) for a in argument]
    return fn(argument)


def tensors_of(argument: Any) -> list[Any]:
    """The tensors that an argument holds.

    Example:
        >>> tensors_of(None), tensors_of("x"), tensors_of(["x", None, "y"])
        ([], ['x'], ['x', 'y'])
    """
    if isinstance(argument, (list, tuple)):
        return [a for a in argument if a is not None]
    return [] if argument is None else [argument]


def is_empty(shape: Sequence[int]) -> bool:
    """Whether a shape holds no element."""
    return math.prod(shape) == 0


def map_slot(fn: Callable[[Any], Any], slot: Any) -> Any:
    """Apply a function to the value, the values, or the absence of values of a result slot."""
    if slot is None:
        return None
    return [fn(s) for s in slot] if isinstance(slot, list) else fn(slot)
