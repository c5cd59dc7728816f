"""Sizes that vary within bounds: arguments are padded to few sizes, and each has one program.

Only sizes with a greatest value (`mark_dynamic`), and only where `lowering.padding` finds that the
padding cannot reach what is there. Otherwise each size has its own program, as without bounds, and
the reason is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tpu_kernels import _compat_torch
from tpu_kernels.errors import ArgumentError
from tpu_kernels.lowering import fakes, padding, plan
from tpu_kernels.lowering import padding_rules as padding_rules  # what `padding` goes by


def mark_dynamic(tensor: torch.Tensor, dim: int, *, min: int = 2, max: int) -> None:
    """Let a dimension vary within bounds for `torch.compile`, which then makes one graph for it.

    With ``backend="tpu"`` the graph is compiled for few sizes ("buckets": powers of two and their
    midpoints) and arguments are padded, where that cannot change a result.

    Args:
        tensor: An argument of the compiled function.
        dim: The dimension.
        min: Its least size, at least 2.
        max: Its greatest size.

    Raises:
        ArgumentError: The bounds do not hold the tensor's own size, or there is no such dimension.

    Example:
        >>> import torch
        >>> x = torch.ones(5, 3)
        >>> mark_dynamic(x, 0, max=64)
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"mark_dynamic: a tensor of shape {tuple(tensor.shape)} has no {dim=}")
    if not 2 <= min <= tensor.shape[dim] <= max:
        raise ArgumentError(
            f"mark_dynamic: a size of {tensor.shape[dim]} is not within {min} and {max}",
            hint="min is at least 2: torch makes graphs of their own for the sizes 0 and 1",
        )
    torch._dynamo.mark_dynamic(tensor, dim % tensor.dim(), min=min, max=max)


def bucket(size: int, low: int, high: int) -> int:
    """The size that a size is padded to: a power of two or the midpoint of two, within bounds.

    Example:
        >>> [bucket(n, 2, 40) for n in (2, 5, 6, 7, 13, 33)]
        [2, 6, 6, 8, 16, 40]
    """
    power = 1 << math.ceil(math.log2(size)) if size > 1 else 1
    middle = power * 3 // 4
    chosen = middle if middle >= size and power >= 4 else power
    return min(max(chosen, low), high)


class Buckets:
    """The buckets of one graph.

    Args:
        graph: The graph.
        bounds: Least and greatest value of each bounded symbol.
    """

    def __init__(self, graph: GraphModule, bounds: dict[Any, tuple[int, int]]) -> None:
        self.graph = graph
        self.bounds = bounds
        self.inputs = fakes.placeholders(graph)
        self.metas = [node.meta.get("val") for node in self.inputs]
        self.outputs = [n for n in _flat(plan.outputs(graph)) if isinstance(n, Node)]
        self._plans: dict[tuple[int, ...], dict[Node, Any] | str] = {}

    @classmethod
    def of(cls, graph: GraphModule) -> Buckets | None:
        """The buckets of a graph, None if no size of it is bounded."""
        bounds: dict[Any, tuple[int, int]] = {}
        for node in fakes.placeholders(graph):
            meta = node.meta.get("val")
            sizes = meta.shape if isinstance(meta, torch.Tensor) else (meta,)
            for size in sizes:
                symbol = _compat_torch.expression_of(size)
                found = _compat_torch.bounds_of(size) if symbol is not None else None
                if symbol is not None and symbol.is_Symbol and found and found[0] < found[1]:
                    bounds[symbol] = found
        flat = isinstance(plan.outputs(graph), (list, tuple))
        return cls(graph, bounds) if bounds and flat else None

    def sizes(self, args: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bounded sizes of a call, and what they are padded to."""
        known = fakes.Sizes()
        for meta, value in zip(self.metas, args, strict=True):
            known.learn(meta, value)
        actual = tuple(known.symbol(symbol) for symbol in self.bounds)
        return actual, tuple(
            bucket(n, *limits) for n, limits in zip(actual, self.bounds.values(), strict=True)
        )

    def plan(self, padded: tuple[int, ...], args: Sequence[Any]) -> dict[Node, Any] | str:
        """Where padding lies in each value, or why there must be none."""
        found = self._plans.get(padded)
        if found is None:
            found = self._plans[padded] = self._analyse(padded, args)
        return found

    def refuse(self, padded: tuple[int, ...], reason: str) -> str:
        """Pad no more to these sizes."""
        self._plans[padded] = reason
        return reason

    def _analyse(self, padded: tuple[int, ...], args: Sequence[Any]) -> dict[Node, Any] | str:
        known = fakes.Sizes()
        for meta, value in zip(self.metas, args, strict=True):
            known.learn(meta, value)
        points = []
        for less in (0, 1, 2):
            point = known.values()
            for (symbol, (low, _)), n in zip(self.bounds.items(), padded, strict=True):
                point[symbol] = max(n - less, low)
            points.append(point)
        for node in plan.calls(self.graph):
            reason = plan.reason_to_stay(node)
            if reason is not None or plan.drawn_by_torch(node):
                return f"{node.target} runs outside of the program"
        try:
            return padding.Analysis(self.graph, points).run()
        except padding.Refused as error:
            return str(error)

    def run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        actual: tuple[int, ...],
        padded: tuple[int, ...],
        axes: dict[Node, Any],
    ) -> list[Any]:
        """Call with padded arguments, and take from the results what is not padding."""
        known = fakes.Sizes()
        for meta, value in zip(self.metas, args, strict=True):
            known.learn(meta, value)
        grown = {**known.values(), **dict(zip(self.bounds, padded, strict=True))}
        rows = dict(zip(self.bounds, actual, strict=True))
        given = [
            self._grown(value, meta, axes.get(node), grown)
            for node, meta, value in zip(self.inputs, self.metas, args, strict=True)
        ]
        results = call(*given)
        return [
            self._taken(result, node, axes, known, rows, grown)
            for result, node in zip(results, plan.outputs(self.graph), strict=True)
        ]

    def _grown(self, value: Any, meta: Any, axes: Any, grown: dict[Any, int]) -> Any:
        if not isinstance(value, torch.Tensor):
            return fakes.Sizes.of(grown).value(meta) if isinstance(meta, torch.SymInt) else value
        if axes is None or not any(axes):
            return value
        shape = [
            n if a is None else grown[a.symbol] for n, a in zip(value.shape, axes, strict=True)
        ]
        found = value.new_zeros(shape)
        found[tuple(slice(n) for n in value.shape)] = value.detach()
        return found

    def _taken(
        self,
        result: Any,
        node: Any,
        places: dict[Node, Any],
        known: fakes.Sizes,
        rows: dict[Any, int],
        grown: dict[Any, int],
    ) -> Any:
        if not isinstance(node, Node):
            return result
        meta: Any = node.meta.get("val")
        if not isinstance(result, torch.Tensor):
            return known.value(meta) if isinstance(meta, torch.SymInt) else result
        for dim, axis in enumerate(places.get(node) or ()):
            if axis is None:
                continue
            n = rows[axis.symbol]
            if axis.outer == 1:
                result = result.narrow(dim, 0, n * axis.inner)
                continue
            apart = result.unflatten(dim, (axis.outer, grown[axis.symbol] * axis.inner))
            result = apart.narrow(dim + 1, 0, n * axis.inner).flatten(dim, dim + 1)
        shape, stride = known.all(meta.shape), known.all(meta.stride())
        if shape is None or stride is None or result.stride() == stride:
            return result
        fresh = torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device)
        return fresh.copy_(result)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
