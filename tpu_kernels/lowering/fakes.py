"""Fake tensors with concrete sizes, to ask torch what it would do at the shapes of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from tpu_kernels import _compat_torch
from tpu_kernels.lowering.rules import Unlowered
from tpu_kernels.lowering.values import is_array, torch_dtype


class Sizes:
    """The values of a graph's symbolic sizes in one specialisation."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    @classmethod
    def of(cls, values: Mapping[Any, int]) -> Sizes:
        """Sizes whose symbols have these values."""
        found = cls()
        found._values.update({s: sympy.Integer(n) for s, n in values.items()})
        return found

    def learn(self, fake: Any, actual: Any) -> None:
        """Read the symbols of a placeholder off its actual argument."""
        if isinstance(fake, torch.Tensor) and isinstance(actual, torch.Tensor):
            for size, value in zip(fake.shape, actual.shape, strict=True):
                self.learn(size, value)
        elif isinstance(fake, torch.SymInt):
            expression = _compat_torch.expression_of(fake)
            if expression is not None and expression.is_Symbol:
                self._values[expression] = sympy.Integer(int(actual))

    def symbol(self, symbol: Any) -> int:
        """The value of a symbol that has been learned."""
        return int(self._values[symbol])

    def values(self) -> dict[Any, int]:
        """The values of all symbols that have been learned."""
        return {symbol: int(value) for symbol, value in self._values.items()}

    def value(self, size: Any) -> int | None:
        """A size as a number, None if that cannot be told."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = _compat_torch.expression_of(size)
        if expression is None:
            return int(size)
        found = sympy.sympify(expression).xreplace(self._values)
        return int(found) if found.is_Integer else None

    def all(self, sizes: Sequence[Any]) -> tuple[int, ...] | None:
        """Several sizes as numbers, None if one cannot be told."""
        found = [self.value(size) for size in sizes]
        return None if None in found else tuple(found)  # type: ignore[arg-type]


class Faker:
    """Makes fake tensors that stand for the values of a graph's nodes.

    Args:
        sizes: The values of symbolic sizes.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.mode = _compat_torch.fake_mode()
        self._sizes = sizes

    def of(self, value: Any, meta: Any) -> Any:
        """A fake for an array, with dtype, strides and device from the node's own; anything else
        unchanged."""
        if isinstance(value, (list, tuple)):
            metas = meta if isinstance(meta, (list, tuple)) else [None] * len(value)
            return type(value)(self.of(v, m) for v, m in zip(value, metas, strict=True))
        if not is_array(value):
            return value
        with self.mode:
            if not isinstance(meta, torch.Tensor):
                return torch.empty(value.shape, dtype=torch_dtype(value))
            stride = self._sizes.all(meta.stride())
            if stride is None:
                return torch.empty(value.shape, dtype=meta.dtype, device=meta.device)
            return torch.empty_strided(value.shape, stride, dtype=meta.dtype, device=meta.device)


def metas_of(arguments: Any) -> Any:
    """The fake values of the nodes among arguments, in the same structure."""
    return torch.fx.node.map_arg(arguments, lambda node: node.meta.get("val"))


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: Any,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> tuple[torch.fx.GraphModule, list[int]]:
    """Trace a torch function at fake arguments to a functional graph.

    Returns:
        The graph, a placeholder for each tensor of the flat arguments, and the positions of those
        among the flat arguments.

    Raises:
        Unlowered: torch cannot trace it.
    """
    flat, spec = torch.utils._pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def of_tensors(*tensors: Any) -> Any:
        filled = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        positional, named = torch.utils._pytree.tree_unflatten(filled, spec)
        return function(*positional, **named)

    try:
        with mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta():
            graph = _compat_torch.functional_graph(
                of_tensors, [flat[place] for place in places], decompositions, keep_meta=True
            )
    except Unlowered:
        raise
    except Exception as error:
        raise Unlowered(f"torch cannot trace it: {type(error).__name__}: {error}") from error
    return graph, places


def same_shape(meta: Any, array: Any, sizes: Sizes) -> bool:
    """Whether an array has the shape that torch announced, as far as that is known."""
    if array.ndim != meta.dim():
        return False
    expected = [sizes.value(size) for size in meta.shape]
    return all(n is None or n == m for n, m in zip(expected, array.shape, strict=True))


def placeholders(graph: torch.fx.GraphModule) -> list[Node]:
    """The input nodes of a graph, in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]
