"""A score_mod or mask_mod as a program of ATen operators on numbers: a text that says what it is.

PyTorch calls a mod once for every pair of a query and a key, with tensors without dimensions. Its
text can be a static argument of an operator, so a mod is part of a program's key by what it
computes, not by the object that it happens to be. `flex_trace` writes such texts.

Values are numbered: inputs first (a score_mod's score; then batch, head, query, key), then captured
tensors, then the results of the steps.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_kernels.lowering import rules
from tpu_kernels.lowering.rules import Unlowered

INDICES = ("b", "h", "q", "k")
"""What batch, head, query and key are called here."""

_REF = "v"

# Operators that are elementwise at no dimensions, though torch does not call them so.
_ALSO_POINTWISE = frozenset(
    {
        "aten::_to_copy", "aten::alias", "aten::clone", "aten::detach", "aten::expand",
        "aten::full", "aten::full_like", "aten::lift_fresh_copy", "aten::new_full",
        "aten::new_ones", "aten::new_zeros", "aten::ones", "aten::ones_like",
        "aten::scalar_tensor", "aten::view", "aten::zeros", "aten::zeros_like",
    }
)  # fmt: skip
_SHAPED = frozenset({"aten::expand", "aten::view", "aten::clone", "aten::alias", "aten::detach"})
_SAME = _SHAPED | {"aten::_to_copy", "aten::lift_fresh_copy"}


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value of a program, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of an operator.

    Attributes:
        op: The operator.
        args: Its arguments: `Ref` for tensors.
        kwargs: Its keyword arguments.
        rank: Dimensions of its result.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rank: int

    @property
    def name(self) -> str:
        """The operator without its overload."""
        return str(self.op.name()).partition(".")[0]

    @property
    def pointwise(self) -> bool:
        """Whether it computes each element from the elements at the same place."""
        return torch.Tag.pointwise in self.op.tags or self.name in _ALSO_POINTWISE

    @property
    def operands(self) -> tuple[int, ...]:
        """The values that it reads."""
        found: list[int] = []
        _visit((self.args, tuple(self.kwargs.values())), found)
        return tuple(found)


def _visit(value: Any, found: list[int]) -> None:
    if isinstance(value, Ref):
        found.append(value.number)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _visit(each, found)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A mod. `parse` returns the same object for the same text.

    Attributes:
        scored: Whether it takes a score: a score_mod.
        ranks: Dimensions of each captured tensor.
        steps: The calls, in order.
        result: The value that it returns.
    """

    scored: bool
    ranks: tuple[int, ...]
    steps: tuple[Step, ...]
    result: int

    @property
    def first_buffer(self) -> int:
        """Number of the first captured tensor."""
        return len(INDICES) + self.scored

    @property
    def first_step(self) -> int:
        """Number of the first step's result."""
        return self.first_buffer + len(self.ranks)

    def step_of(self, number: int) -> Step | None:
        """The step that makes a value; None for inputs and captured tensors."""
        return self.steps[number - self.first_step] if number >= self.first_step else None

    @functools.cached_property
    def symbols(self) -> tuple[str, ...]:
        """What each input is: "s" for the score."""
        return (("s",) if self.scored else ()) + INDICES

    @functools.cached_property
    def depends(self) -> tuple[frozenset[str], ...]:
        """For each value the inputs that it depends on, and "t" if it depends on a tensor."""
        found: list[frozenset[str]] = [frozenset(symbol) for symbol in self.symbols]
        found += [frozenset("t")] * len(self.ranks)
        for step in self.steps:
            found.append(frozenset[str]().union(*(found[n] for n in step.operands)))
        return tuple(found)

    def rank(self, number: int) -> int:
        """Dimensions of a value."""
        step = self.step_of(number)
        if step is not None:
            return step.rank
        return self.ranks[number - self.first_buffer] if number >= self.first_buffer else 0

    def source(self, number: int) -> int:
        """The value that a value is a copy of, whatever the integer dtype: itself, if none."""
        step = self.step_of(number)
        while step is not None and step.name in _SAME and step.operands:
            dtype = step.kwargs.get("dtype")
            if dtype is not None and (dtype.is_floating_point or dtype is torch.bool):
                break
            if self.rank(step.operands[0]):
                break
            number = step.operands[0]
            step = self.step_of(number)
        return number

    def text(self) -> str:
        """The program as text, which `parse` reads."""
        steps = [[s.op.name(), _plain(s.args), _plain(s.kwargs), s.rank] for s in self.steps]
        whole = [self.scored, self.ranks, steps, self.result]
        return json.dumps(whole, separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Program:
    """Read the text of a program.

    Example:
        >>> add = Step(torch.ops.aten.add.Tensor, (Ref(0), Ref(3)), {}, 0)
        >>> program = Program(True, (), (add,), 5)
        >>> parse(program.text()).steps == program.steps
        True
    """
    scored, ranks, steps, result = json.loads(text)
    return Program(
        bool(scored),
        tuple(ranks),
        tuple(Step(_operator(op), _rich(a), _rich(k), rank) for op, a, k, rank in steps),
        int(result),
    )


def _operator(name: str) -> OpOverload:
    path, _, variant = name.partition(".")
    namespace, _, op = path.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), variant or "default")  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if isinstance(value, Ref):
        return {_REF: value.number}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"kwargs": {name: _plain(each) for name, each in value.items()}}
    if isinstance(value, tuple):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == _REF:
        return Ref(inner)
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "tuple":
        return tuple(_rich(each) for each in inner)
    return {name: _rich(each) for name, each in inner.items()}


def call(step: Step, value: Callable[[int], Any]) -> Any:
    """Evaluate one step on JAX values.

    Args:
        step: The step.
        value: Returns the value of a number.

    Returns:
        The result, an array.

    Raises:
        Unlowered: The operator has no JAX form, or not for these arguments.
    """
    rule = rules.find(step.op)
    if rule is None:
        raise Unlowered(f"{step.op} has no JAX form")

    def fill(given: Any) -> Any:
        if isinstance(given, Ref):
            return value(given.number)
        if isinstance(given, (list, tuple)):
            return type(given)(fill(each) for each in given)
        return given

    return rule(*fill(step.args), **{name: fill(each) for name, each in step.kwargs.items()})


def evaluate(program: Program, number: int, inputs: Sequence[Any]) -> Any:
    """The value of a number, where inputs and captured tensors are those given.

    Args:
        program: The program.
        number: Which value.
        inputs: Inputs (None for those that do not matter), then captured tensors.

    Returns:
        The value as torch would compute it for one pair.
    """
    known: dict[int, Any] = dict(enumerate(inputs))

    def value(n: int) -> Any:
        if n not in known:
            known[n] = call(program.steps[n - program.first_step], value)
        return known[n]

    return value(number)
