"""Which nodes of a graph become programs, and which run one by one outside of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from tpu_kernels import _compat_torch
from tpu_kernels.lowering import decompositions, rules
from tpu_kernels.lowering.families.random import HOST, is_random
from tpu_kernels.registry import backend_table


@dataclasses.dataclass(frozen=True)
class Segment:
    """Nodes that run together.

    Attributes:
        host: Whether they run one by one, by torch; else they are one program.
        nodes: In order.
    """

    host: bool
    nodes: tuple[Node, ...]


def calls(graph: GraphModule) -> list[Node]:
    """The nodes of a graph that compute something."""
    return [n for n in graph.graph.nodes if n.op.startswith("call_")]


def outputs(graph: GraphModule) -> Any:
    """What a graph returns: nodes and constants in some structure."""
    return next(n for n in graph.graph.nodes if n.op == "output").args[0]


def reason_to_stay(node: Node) -> str | None:
    """Why a node cannot be part of a program, judged by its operator alone; None if it may be."""
    target = node.target
    if node.op != "call_function":
        return f"a {node.op}"
    if not isinstance(target, OpOverload):
        higher = isinstance(target, torch._ops.HigherOrderOperator)
        known = not higher or rules.find_higher_order(target) is not None
        return None if known else "a higher-order operator"
    if _compat_torch.schema_of(target).is_mutable:
        return "it writes to its arguments"
    if rules.find(target) is not None or target in decompositions.table():
        return None
    if backend_table.operator_of(target) is not None or _compat_torch.can_decompose(target):
        return None
    return "no lowering and no decomposition"


def drawn_by_torch(node: Node) -> bool:
    """Whether a node draws random numbers that depend on nothing but shapes."""
    target = node.target
    return isinstance(target, OpOverload) and target.name() in HOST


def draws(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, OpOverload) and is_random(node.target)


def writes(node: Node) -> bool:
    """Whether a node writes to a tensor that the graph was given."""
    target = node.target
    return isinstance(target, OpOverload) and bool(_compat_torch.schema_of(target).is_mutable)


def needs(node: Node) -> list[Node]:
    """The nodes that a node waits for: random numbers by shape wait for no tensor."""
    if not drawn_by_torch(node):
        return list(node.all_input_nodes)
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.Tensor)]


def segments(graph: GraphModule, host: Iterable[Node]) -> list[Segment]:
    """Split a graph into as few programs as its order allows.

    Args:
        graph: The graph.
        host: The nodes that run outside of programs.

    Returns:
        Segments in the order in which they run. Random numbers are drawn in the graph's order, and
        what writes to the graph's inputs runs last, in order.
    """
    outside = _with_their_items(graph, set(host))
    done: set[Node] = {n for n in graph.graph.nodes if n.op in ("placeholder", "get_attr")}
    waiting = calls(graph)
    last = [n for n in waiting if n in outside and writes(n)]
    waiting = [n for n in waiting if n not in set(last)]
    found: list[Segment] = []
    idle = 0
    on_host = True
    while waiting:
        taken = _ready(waiting, outside, done, on_host)
        if taken:
            found.append(Segment(on_host, tuple(taken)))
            chosen = set(taken)
            waiting = [n for n in waiting if n not in chosen]
            idle = 0
        else:
            idle += 1
            if idle > 1:  # only a node that waits for a write can be left
                found.append(Segment(True, tuple(waiting)))
                break
        on_host = not on_host
    if last:
        found.append(Segment(True, tuple(last)))
    return found


def _ready(waiting: Sequence[Node], outside: set[Node], done: set[Node], host: bool) -> list[Node]:
    taken: list[Node] = []
    blocked = False  # by a random node that cannot run yet: later ones must not overtake it
    for node in waiting:
        mine = (node in outside) == host
        ready = all(n in done for n in needs(node))
        ordered = draws(node) and node in outside
        if mine and ready and not (ordered and blocked):
            taken.append(node)
            done.add(node)
        elif ordered:
            blocked = True
    return taken


def _with_their_items(graph: GraphModule, host: set[Node]) -> set[Node]:
    """The nodes outside of programs, with the `getitem` nodes that take their results apart."""
    found = set(host)
    for node in calls(graph):
        if not isinstance(node.target, OpOverload) and _takes_apart(node):
            source = node.args[0]
            if isinstance(source, Node) and source in found:
                found.add(node)
    return found


def _takes_apart(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
