"""Runs the nodes of a torch graph on JAX values, while JAX traces.

Every result is compared with what torch announced for the node: a rule that would be wrong about a
shape or dtype makes its node run outside of the program instead.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_kernels import _compat_torch
from tpu_kernels.dsl import dtypes
from tpu_kernels.errors import DTypeError
from tpu_kernels.lowering import decompositions, fakes, kernels, rules
from tpu_kernels.lowering.overriding import Overrides, implementation, skipped_by
from tpu_kernels.lowering.rules import Unlowered
from tpu_kernels.lowering.values import full, is_array, jax_dtype
from tpu_kernels.registry import backend_table
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.numerics.mxu import jax_precision

# Where a tensor lies, and a source of random numbers, say nothing about values.
_PLACE = frozenset({"device", "generator", "layout", "memory_format", "pin_memory"})
_REASON = 160  # characters of a foreign exception's text

_expansions: dict[Any, tuple[GraphModule, list[int]]] = {}


class Evaluator:
    """Evaluates nodes for one specialisation of a graph.

    Args:
        engine: How kernels are traced.
        sizes: Values of symbolic sizes.
        overrides: The overrides in force.

    Attributes:
        unlowered: For each node that has no JAX form, why. The node's results were zeros.
        launches: The operators of kernels that were inlined, once for each node.
        names: The module that each node came from, if `named` was asked for.
    """

    def __init__(
        self, engine: Engine, sizes: fakes.Sizes, overrides: Overrides, *, named: bool = True
    ) -> None:
        self.engine = engine
        self.sizes = sizes
        self.overrides = overrides
        self.faker = fakes.Faker(sizes)
        self.unlowered: dict[Node, str] = {}
        self.launches: list[Any] = []
        self._named = named

    # ------------------------------------------------------------------ graphs
    def run(self, nodes: Iterable[Node], values: dict[Node, Any]) -> None:
        """Evaluate nodes in order.

        Args:
            nodes: Calls only.
            values: Value of each node that is known; receives the others.
        """
        for node in nodes:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            try:
                with jax.named_scope(scope_of(node)):
                    result = self.call(node.target, args, kwargs, node)
                self._check(result, node.meta.get("val"))
            except Unlowered as error:
                self.unlowered[node] = error.reason
                result = self._stand_in(node.meta.get("val"))
            except DTypeError as error:
                self.unlowered[node] = error.problem
                result = self._stand_in(node.meta.get("val"))
            except (TypeError, ValueError, NotImplementedError, KeyError, IndexError) as error:
                # A rule's own mistake, or a dtype that JAX refuses: torch can still run the node.
                self.unlowered[node] = f"{type(error).__name__}: {str(error)[:_REASON]}"
                result = self._stand_in(node.meta.get("val"))
            values[node] = result

    def _graph(self, graph: GraphModule, inputs: list[Any]) -> Any:
        """Evaluate a whole traced graph; its nodes must all have a JAX form."""
        values: dict[Node, Any] = {}
        remaining = iter(inputs)
        inner = Evaluator(self.engine, self.sizes, self.overrides, named=False)
        inner.faker, inner.launches = self.faker, self.launches
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = constant(getattr(graph, node.target))
            elif node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            else:
                inner.run([node], values)
                if node in inner.unlowered:
                    raise Unlowered(f"{node.target}: {inner.unlowered[node]}")
        raise Unlowered("a graph without outputs")

    # ------------------------------------------------------------------ one call
    def call(self, target: Any, args: Any, kwargs: Any, node: Node) -> Any:
        """Evaluate one call on JAX values."""
        if not isinstance(target, OpOverload):
            higher = rules.find_higher_order(target)
            if higher is not None:
                return higher(self, node, *args, **kwargs)
            return _python_call(target, args, kwargs)
        if self.overrides.concern(target):
            replaced = self._overridden(target, args, kwargs, node)
            if replaced is not None:
                return replaced[0]
        rule = rules.find(target)
        if rule is not None:
            named = {k: v for k, v in kwargs.items() if k not in _PLACE}
            # What torch's products are to be rounded to; a kernel's are its own affair.
            with jax.default_matmul_precision(jax_precision()):
                return rule(*args, **named)
        operator = backend_table.operator_of(target)
        if operator is not None:
            result = kernels.inline(operator, args, kwargs, self.engine)
            self.launches.append(operator)
            return result
        return self._decomposed(target, args, kwargs, node)

    def _decomposed(self, op: OpOverload, args: Any, kwargs: Any, node: Node) -> Any:
        if op not in decompositions.table() and not _compat_torch.can_decompose(op):
            raise Unlowered("no lowering and no decomposition")
        return self._expanded(op, op, args, kwargs, node, decompositions.table())

    def _overridden(self, op: OpOverload, args: Any, kwargs: Any, node: Node) -> tuple[Any] | None:
        stand_ins = self._fakes(args, kwargs, node)
        chosen = self.overrides.choose(op, *stand_ins, skipped_by(node))
        if chosen is None:
            return None
        return (self._expanded(implementation(chosen), op, args, kwargs, node, {}),)

    def _fakes(self, args: Any, kwargs: Any, node: Node) -> tuple[Any, Any]:
        metas = fakes.metas_of((node.args, node.kwargs))
        found = self.faker.of(list(args), list(metas[0]))
        named = {name: self.faker.of(value, metas[1].get(name)) for name, value in kwargs.items()}
        return found, named

    def _expanded(
        self,
        function: Callable[..., Any],
        op: OpOverload,
        args: Any,
        kwargs: Any,
        node: Node,
        table: Mapping[Any, Any],
    ) -> Any:
        """Trace a torch function at this call's shapes, and evaluate what it does."""
        stand_ins, named = self._fakes(args, kwargs, node)
        key = (function, _signature((stand_ins, named))) if function is op else None
        found = _expansions.get(key) if key is not None else None
        if found is None:
            found = fakes.trace(function, stand_ins, named, self.faker.mode, table)
            if function is op and any(n.target is op for n in found[0].graph.nodes):
                raise Unlowered("no lowering, and its decomposition ends in itself")
            if key is not None:
                _expansions[key] = found
        graph, places = found
        flat = torch.utils._pytree.tree_leaves((tuple(args), dict(kwargs)), is_leaf=is_array)
        return self._graph(graph, [flat[place] for place in places])

    # ------------------------------------------------------------------ what torch announced
    def _check(self, result: Any, meta: Any) -> None:
        if isinstance(meta, (list, tuple)):
            if not isinstance(result, (list, tuple)) or len(result) != len(meta):
                raise Unlowered("its rule returns another number of results")
            for each, expected in zip(result, meta, strict=True):
                self._check(each, expected)
        elif isinstance(meta, torch.Tensor):
            if result is None:  # a gradient that nobody asked for
                return
            if not is_array(result):
                raise Unlowered(f"its rule returns a {type(result).__name__}")
            if not fakes.same_shape(meta, result, self.sizes):
                raise Unlowered(
                    f"its rule makes shape {tuple(result.shape)}, torch {tuple(meta.shape)}"
                )
            if result.dtype != jax_dtype(meta.dtype):
                raise Unlowered(f"its rule makes {result.dtype}, torch {meta.dtype}")

    def _stand_in(self, meta: Any) -> Any:
        if isinstance(meta, (list, tuple)):
            return type(meta)(self._stand_in(each) for each in meta)
        if not isinstance(meta, torch.Tensor):
            return self.sizes.value(meta) if isinstance(meta, torch.SymInt) else meta
        shape = self.sizes.all(meta.shape)
        if shape is None:
            raise DynamicOutput
        dtype = meta.dtype if dtypes.is_supported(meta.dtype) else torch.float32
        return full(shape, 0, dtype)


class DynamicOutput(Exception):
    """A node's size depends on values; the graph cannot be planned before it runs."""


def constant(tensor: Any) -> Any:
    """A small tensor that belongs to a graph, as an array."""
    from tpu_kernels.lowering.values import cast

    if not isinstance(tensor, torch.Tensor):
        return tensor
    plain = tensor.detach().cpu()
    if plain.dtype is torch.bfloat16:
        return cast(plain.float().numpy(), torch.bfloat16)
    return cast(plain.numpy(), plain.dtype)


def _python_call(target: Any, args: Any, kwargs: Any) -> Any:
    """Functions of numbers, and `getitem`: what graphs hold besides operators."""
    module = getattr(target, "__module__", "")
    if isinstance(target, torch._ops.HigherOrderOperator) or not callable(target):
        raise Unlowered("a higher-order operator")
    if module in ("_operator", "operator", "math", "builtins") or target in _SYMBOLIC:
        return target(*args, **kwargs)
    raise Unlowered(f"a call of {getattr(target, '__qualname__', target)}")


_SYMBOLIC = frozenset(
    {torch.sym_float, torch.sym_int, torch.sym_ite, torch.sym_max, torch.sym_min, torch.sym_not}
)


def scope_of(node: Node) -> str:
    """The module that a node came from and its operator, as a name in the program."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and entry[0]]
    path = paths[-1].replace("L['self'].", "").replace("L['self']", "") if paths else ""
    op = str(node.target).removeprefix("aten.").partition(".")[0]
    return f"{path}:{op}" if path else op


def _signature(value: Any) -> Any:
    """A hashable stand-in for fakes and other arguments."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(_signature(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    return type(value).__name__, repr(value)


def histogram(unlowered: Mapping[Node, str]) -> dict[str, int]:
    """How often each operator did not lower."""
    return dict(collections.Counter(str(node.target) for node in unlowered))
