"""Where padding may stand in for a size: which axes of a graph's values hold rows of no meaning.

A program has fixed sizes. Arguments that are shorter along an axis can be padded to the program's
size if what the program computes for the rows that are there never depends on the others. This is
decided operator by operator, by rules that know which axes an operator keeps apart. What no rule
covers is refused, and what a rule says is compared with the sizes that torch announced, at two
sizes: an axis grows with the dynamic size exactly if it is said to hold padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from tpu_kernels import _compat_torch
from tpu_kernels.lowering import plan
from tpu_kernels.lowering.fakes import Sizes


class Refused(Exception):
    """Padding would change a result; the message says where."""


@dataclasses.dataclass(frozen=True)
class Padded:
    """An axis with padding in it: index ``(o * n + i) * inner + r`` is row `i` of ``n``.

    Attributes:
        symbol: The dynamic size ``n``.
        outer: How many times the rows are repeated.
        inner: Elements of one row along the axis.
    """

    symbol: Any
    outer: int = 1
    inner: int = 1


Axes = tuple[Padded | None, ...]
Rule = Callable[["Analysis", Node, list[Any]], Any]
RULES: dict[str, Rule] = {}
POINTWISE = "any pointwise operator"

# Operators whose arguments are sizes of their results; elsewhere a size is a number like others.
_TAKES_SIZES = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "full",
        "zeros",
        "ones",
        "empty",
        "arange",
        "new_zeros",
        "new_ones",
        "new_full",
    ]
)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Declare what an operator makes of padding: the axes of its result, a list for several."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


class Analysis:
    """Follows padding through a graph.

    Args:
        graph: The graph.
        points: Values of the symbols, at two or more sizes that one program is to serve; the first
            is the program's own.
    """

    def __init__(self, graph: GraphModule, points: Sequence[Mapping[Any, int]]) -> None:
        self.graph = graph
        self.points = points
        self.sizes = [Sizes.of(point) for point in points]
        self.moving = {s for s in points[0] if len({point[s] for point in points}) > 1}
        self.axes: dict[Node, Any] = {}

    def run(self) -> dict[Node, Any]:
        """Return where padding lies in each value: for each axis None or `Padded`.

        Raises:
            Refused: An operator would mix padding with what is there.
        """
        for node in self.graph.graph.nodes:
            meta = node.meta.get("val")
            if node.op == "placeholder":
                self.axes[node] = self.fresh(meta) if isinstance(meta, torch.Tensor) else None
            elif node.op.startswith("call_"):
                found = self._call(node)
                self._compare(node, meta, found)
                self.axes[node] = found
            else:
                self.axes[node] = None
        return self.axes

    def fresh(self, meta: torch.Tensor) -> Axes:
        """The axes of a tensor whose size alone says where padding lies: at the end."""
        return tuple(self._of_size(size) for size in meta.shape)

    def _of_size(self, size: Any) -> Padded | None:
        values = self.at_points(size)
        if len(set(values)) == 1:
            return None
        expression = _compat_torch.expression_of(size)
        symbols = self.moving & (set() if expression is None else set(expression.free_symbols))
        if len(symbols) == 1:
            (symbol,) = symbols
            n = self.points[0][symbol]
            inner = values[0] // n
            if all(v == inner * p[symbol] for v, p in zip(values, self.points, strict=True)):
                return Padded(symbol, 1, inner)
        raise Refused(f"a size of {size}")

    def at_points(self, size: Any) -> list[int]:
        """A size at each of the points."""
        found = [sizes.value(size) for sizes in self.sizes]
        if None in found:
            raise Refused("a size depends on values")
        return [int(v) for v in found if v is not None]

    def shape(self, meta: torch.Tensor, point: int = 0) -> list[int]:
        """The shape of a value at a point."""
        return [self.at_points(size)[point] for size in meta.shape]

    def _call(self, node: Node) -> Any:
        target = node.target
        operands = [self.axes.get(a) if isinstance(a, Node) else None for a in node.args]
        if not isinstance(target, OpOverload):
            if getattr(target, "__name__", "") == "getitem" and isinstance(operands[0], list):
                place: Any = node.args[1]
                return operands[0][place]
            return None  # a function of sizes
        if not self._concerns(node):
            return None
        if plan.writes(node) or plan.draws(node):
            raise Refused(f"{target} writes or draws random numbers")
        name = _compat_torch.schema_of(target).name.partition("::")[2]
        if name not in _TAKES_SIZES and any(map(self.is_number, node.all_input_nodes)):
            raise Refused(f"{target} with a dynamic size as a number")  # it would be the padded one
        found = RULES.get(name)
        if found is None and torch.Tag.pointwise in target.tags:
            found = RULES[POINTWISE]
        if found is None:
            raise Refused(f"{target} along a dynamic axis")
        return found(self, node, operands)

    def _concerns(self, node: Node) -> bool:
        """Whether padding enters or leaves a node."""
        inputs = [self.axes.get(n) for n in node.all_input_nodes]
        if any(map(has_padding, inputs)) or self._moves(node.meta.get("val")):
            return True
        return any(map(self.is_number, node.all_input_nodes))

    def is_number(self, node: Node) -> bool:
        """Whether a node is a number that depends on a dynamic size."""
        meta = node.meta.get("val")
        if isinstance(meta, torch.SymInt):
            return len(set(self.at_points(meta))) > 1
        return isinstance(meta, (torch.SymFloat, torch.SymBool))

    def _moves(self, meta: Any) -> bool:
        if isinstance(meta, (list, tuple)):
            return any(map(self._moves, meta))
        if not isinstance(meta, torch.Tensor):
            return False
        return any(len(set(self.at_points(size))) > 1 for size in meta.shape)

    def _compare(self, node: Node, meta: Any, found: Any) -> None:
        """Hold a rule's answer against the sizes that torch announced."""
        if isinstance(meta, (list, tuple)):
            for i, each in enumerate(meta):
                self._compare(node, each, None if found is None else found[i])
            return
        if not isinstance(meta, torch.Tensor):
            return
        axes = found if found is not None else (None,) * meta.dim()
        for size, axis in zip(meta.shape, axes, strict=True):
            values = self.at_points(size)
            expected = [
                values[0] if axis is None else axis.outer * point[axis.symbol] * axis.inner
                for point in self.points
            ]
            if values != expected:
                raise Refused(f"{node.target} changes the sizes of a dynamic axis")


def has_padding(axes: Any) -> bool:
    """Whether there is padding in a value: its axes, or a list of several values'."""
    if isinstance(axes, list):
        return any(map(has_padding, axes))
    return axes is not None and any(axis is not None for axis in axes)
