"""`lower`: a graph of torch operators as JAX functions, with what is left over between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import torch
from jax import lax
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_kernels.errors import DTypeError
from tpu_kernels.lowering import fakes, plan
from tpu_kernels.lowering.context import Keys, drawing_from
from tpu_kernels.lowering.evaluate import DynamicOutput, Evaluator, constant
from tpu_kernels.lowering.overriding import Counts, Overrides
from tpu_kernels.lowering.values import is_array, jax_dtype
from tpu_kernels.registry.engine import Engine


@dataclasses.dataclass(frozen=True)
class Form:
    """How an output's memory lies where it is not row-major.

    Attributes:
        order: The dimensions from the outermost in memory; the program returns them so.
        inverse: The permutation that restores the tensor's own order.
        shape: The tensor's shape, where dimensions of stride 0 are left out of memory.
    """

    order: tuple[int, ...]
    inverse: tuple[int, ...]
    narrow: tuple[int, ...]
    shape: tuple[int, ...]

    def of_program(self, array: Any) -> Any:
        """What the program returns."""
        for axis in self.narrow:
            array = lax.slice_in_dim(array, 0, 1, 1, axis)
        return lax.transpose(array, self.order)

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The output, as a view of the memory that the program returned."""
        found = tensor.permute(self.inverse)
        return found.expand(self.shape) if self.narrow else found


def form_of(meta: Any, sizes: fakes.Sizes) -> Form | None:
    """How the memory of an output must lie; None for row-major, and for what no permutation is."""
    if not isinstance(meta, torch.Tensor):
        return None
    shape, stride = sizes.all(meta.shape), sizes.all(meta.stride())
    if shape is None or stride is None or 0 in shape:
        return None
    narrow = tuple(i for i, s in enumerate(stride) if s == 0 and shape[i] > 1)
    order = tuple(
        sorted(range(len(shape)), key=lambda i: (-stride[i], i) if shape[i] > 1 else (0, i))
    )
    step = 1
    kept = [i for i in order if shape[i] > 1 and i not in narrow]
    for axis in reversed(kept):
        if stride[axis] != step:
            return None  # gaps or overlaps
        step *= shape[axis]
    if not narrow and kept == sorted(kept):
        return None
    inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
    return Form(order, inverse, narrow, shape)


def gaps_of(meta: Any, sizes: fakes.Sizes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of an output whose elements do not lie side by side; None if they do."""
    if not isinstance(meta, torch.Tensor):
        return None
    shape, stride = sizes.all(meta.shape), sizes.all(meta.stride())
    if shape is None or stride is None or 0 in shape:
        return None
    pairs = [(n, s) for n, s in zip(shape, stride, strict=True) if n > 1]
    extent = 1
    for n, s in sorted(pairs, key=lambda pair: pair[1]):
        if s < extent:  # elements share memory
            return None
        extent += s * (n - 1)
    return None if extent == math.prod(shape) else (shape, stride)


@dataclasses.dataclass
class Program:
    """One JAX function out of a graph.

    Attributes:
        function: Takes the arrays of `inputs` (and a random key, if `draws`), returns those of
            `outputs`.
        inputs: Nodes whose values it takes.
        outputs: Nodes whose values it returns.
        structs: Shape and dtype of each array that it takes.
        draws: Whether it takes a random key as its first argument.
    """

    function: Callable[..., Any]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    structs: tuple[Any, ...]
    draws: bool = False


@dataclasses.dataclass
class Lowered:
    """A graph as programs and nodes between them.

    Attributes:
        steps: Programs, and nodes that run by torch, in order.
        constants: Values of nodes that are no tensors.
        forms: How outputs lie in memory where they are not row-major.
        gaps: Shape and strides of outputs that have gaps in memory.
        unlowered: Nodes outside of programs for want of a lowering, and why.
        evaluator: What traced the programs, with the values of symbolic sizes.
        launches: The operators of kernels in the programs, once for each node.
        counts: What a run counts for the overrides in the programs.
    """

    steps: list[Program | Node]
    constants: dict[Node, Any]
    forms: dict[Node, Form]
    unlowered: dict[Node, str]
    evaluator: Evaluator
    launches: tuple[Any, ...] = ()
    counts: Counts | None = None
    gaps: dict[Node, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    @property
    def programs(self) -> list[Program]:
        """The programs in order."""
        return [step for step in self.steps if isinstance(step, Program)]


class Unplannable(Exception):
    """The graph cannot be split before it runs: sizes depend on values."""


def lower(
    graph: GraphModule,
    arguments: Sequence[Any],
    engine: Engine,
    *,
    host_random: bool = True,
    split: bool = True,
) -> Lowered:
    """Lower a graph for the shapes of given arguments.

    Must be called, and its functions traced, with 64-bit types switched on in JAX where they are to
    stay 64 bits wide.

    Args:
        graph: Graph of ATen operators; functional, except for writes to its inputs.
        arguments: A tensor (any kind that has shape and dtype) or number for each placeholder.
        engine: How kernels are traced.
        host_random: Whether torch draws the random numbers; else programs do, from a key.
        split: Whether nodes without a lowering run between programs; else the program returns
            zeros for them, and `Lowered.unlowered` names them.

    Returns:
        The programs, traced once.

    Raises:
        Unplannable: A size depends on values.
    """
    inputs = fakes.placeholders(graph)
    sizes = fakes.Sizes()
    for node, argument in zip(inputs, arguments, strict=True):
        sizes.learn(node.meta.get("val"), argument)
    unlowered: dict[Node, str] = {}
    outside: set[Node] = set()
    for node in plan.calls(graph):
        reason = plan.reason_to_stay(node)
        if plan.writes(node) and any(user.op != "output" for user in node.users):
            raise Unplannable(f"{node.target} writes to a tensor that is read again")
        if reason is not None and (split or plan.writes(node)):
            outside.add(node)
            if not plan.writes(node):
                unlowered[node] = reason
        elif host_random and plan.drawn_by_torch(node):
            outside.add(node)
    while True:
        try:
            lowered = _attempt(graph, inputs, arguments, outside, engine, sizes, host_random)
        except DynamicOutput as error:
            raise Unplannable("a size depends on values") from error
        except DTypeError as error:
            raise Unplannable(error.problem) from error
        failed = lowered.evaluator.unlowered
        if not failed or not split:
            lowered.unlowered.update({**unlowered, **failed})
            lowered.launches = tuple(lowered.evaluator.launches)
            lowered.counts = lowered.evaluator.overrides.counts()
            return lowered
        unlowered.update(failed)
        outside.update(failed)


def _attempt(
    graph: GraphModule,
    inputs: Sequence[Node],
    arguments: Sequence[Any],
    outside: set[Node],
    engine: Engine,
    sizes: fakes.Sizes,
    host_random: bool,
) -> Lowered:
    evaluator = Evaluator(engine, sizes, Overrides())
    constants: dict[Node, Any] = {
        node: argument
        for node, argument in zip(inputs, arguments, strict=True)
        if not isinstance(argument, torch.Tensor)
    }
    for node in graph.graph.nodes:
        if node.op == "get_attr" and not isinstance(getattr(graph, node.target), torch.Tensor):
            constants[node] = getattr(graph, node.target)
    returned = set(_nodes_in(plan.outputs(graph)))
    lowered = Lowered([], constants, {}, {}, evaluator)
    parts = plan.segments(graph, outside)
    arrays = {
        node: _struct(argument)
        for node, argument in zip(inputs, arguments, strict=True)
        if isinstance(argument, torch.Tensor)
    }
    for position, part in enumerate(parts):
        if part.host:
            for node in part.nodes:
                lowered.steps.append(node)
                _learn_host(node, arrays, constants, sizes)
            continue
        later = {n for p in parts[position + 1 :] for node in p.nodes for n in plan.needs(node)}
        draws = not host_random and any(plan.draws(node) for node in part.nodes)
        program = _program(graph, part, lowered, returned, later | returned, arrays, draws=draws)
        if program is not None:
            lowered.steps.append(program)
    return lowered


def _learn_host(
    node: Node, arrays: dict[Node, Any], constants: dict[Node, Any], sizes: fakes.Sizes
) -> None:
    """What is known of a node's result before it runs."""
    meta = node.meta.get("val")
    if isinstance(meta, torch.Tensor):
        shape = sizes.all(meta.shape)
        if shape is None:
            raise DynamicOutput
        arrays[node] = jax.ShapeDtypeStruct(shape, jax_dtype(meta.dtype))
    elif isinstance(meta, (torch.SymInt, int)) and not isinstance(meta, bool):
        value = sizes.value(meta)
        if value is None:
            raise DynamicOutput
        constants[node] = value
    elif isinstance(meta, (torch.SymFloat, torch.SymBool)):
        raise DynamicOutput


def _struct(tensor: torch.Tensor) -> Any:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))


def _nodes_in(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def _program(
    graph: GraphModule,
    part: plan.Segment,
    lowered: Lowered,
    returned: set[Node],
    used_later: set[Node],
    arrays: dict[Node, Any],
    *,
    draws: bool,
) -> Program | None:
    """Make a segment's function and trace it once, which tells what its nodes are."""
    inside = set(part.nodes)
    evaluator, constants, sizes = lowered.evaluator, lowered.constants, lowered.evaluator.sizes
    attributes = {n: getattr(graph, n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    wanted = [n for node in part.nodes for n in plan.needs(node) if n not in inside]
    inputs = tuple(dict.fromkeys(n for n in wanted if n in arrays))
    outputs = [n for n in part.nodes if n in used_later]
    known: dict[Node, Any] = {}

    def evaluated(key: Any, values: Sequence[Any]) -> dict[Node, Any]:
        found: dict[Node, Any] = dict(constants)
        for node, tensor in attributes.items():
            if node in wanted and node not in found:
                found[node] = constant(tensor)
        found.update(zip(inputs, values, strict=True))
        with drawing_from(Keys(key) if draws else None):
            evaluator.run(part.nodes, found)
        return found

    def first(*values: Any) -> Any:
        found = evaluated(values[0] if draws else None, values[1:] if draws else values)
        known.update({n: found[n] for n in part.nodes if not _holds_arrays(found[n])})
        return [found[n] for n in outputs if n not in known]

    structs = [arrays[n] for n in inputs]
    if draws:
        structs.insert(0, key_struct())
    jaxpr, shapes = jax.make_jaxpr(first, return_shape=True)(*structs)
    constants.update(known)
    outputs = [n for n in outputs if n not in known]
    arrays.update(zip(outputs, shapes, strict=True))
    for node in outputs:
        form = form_of(node.meta.get("val"), sizes) if node in returned else None
        if form is not None:
            lowered.forms[node] = form
        elif node in returned:
            gaps = gaps_of(node.meta.get("val"), sizes)
            if gaps is not None:
                lowered.gaps[node] = gaps
    if not outputs:
        return None
    function = _function(jaxpr, shapes, outputs, lowered.forms)
    return Program(function, inputs, tuple(outputs), tuple(structs), draws)


def _function(
    jaxpr: Any, shapes: Sequence[Any], outputs: Sequence[Node], forms: dict[Node, Form]
) -> Callable[..., Any]:
    """The traced program as a function; torch's side of it has been evaluated for good."""
    flat = jax.extend.core.jaxpr_as_fun(jaxpr)
    tree = jax.tree.structure(shapes)

    def function(*values: Any) -> Any:
        results = jax.tree.unflatten(tree, flat(*values))
        return tuple(
            forms[n].of_program(result) if n in forms else result
            for n, result in zip(outputs, results, strict=True)
        )

    function.__name__ = function.__qualname__ = "graph"
    return function


def key_struct() -> Any:
    """Shape and dtype of the random key that a program takes."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_arrays(each) for each in value)
    return is_array(value)
