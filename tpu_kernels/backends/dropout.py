"""Dropout in two: the mask, which torch draws by its shape alone, and a product of the program."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten


def split(graph: GraphModule) -> None:
    """Replace ``native_dropout`` in a graph by a mask and a product, as its CPU kernel computes it.

    Args:
        graph: Edited in place. Dropout that does nothing stays as it is.
    """
    nodes = [n for n in graph.graph.nodes if n.target is _aten.native_dropout.default]
    for node in nodes:
        source, p, train = node.args[0], node.args[1], node.args[2]
        plain = isinstance(source, Node) and isinstance(p, float) and train is not False
        if plain and p > 0 and all(_is_item(user) for user in node.users):
            _replace(graph, node, source, 1.0 - p)
    if nodes:
        graph.graph.eliminate_dead_code()
        graph.recompile()


def _is_item(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _replace(graph: GraphModule, node: Node, source: Any, kept: float) -> None:
    value = source.meta["val"]
    scale = 1.0 / kept if kept else 0.0
    with graph.graph.inserting_before(node):
        blank = _call(graph, node, _aten.empty_like.default, (source,), {"dtype": torch.bool})
        mask = _call(graph, node, _aten.bernoulli.p, (blank, kept), {})
        masked = _call(graph, node, _aten.mul.Tensor, (source, mask), {})
        scaled = _call(graph, node, _aten.mul.Tensor, (masked, scale), {})
    with value.fake_mode if hasattr(value, "fake_mode") else torch.no_grad():
        blank.meta["val"] = mask.meta["val"] = torch.empty_like(value, dtype=torch.bool)
        masked.meta["val"] = scaled.meta["val"] = torch.empty_like(value)
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] else scaled)
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)


def _call(graph: GraphModule, like: Node, target: Any, args: Any, kwargs: Any) -> Node:
    made = graph.graph.call_function(target, args, kwargs)
    for name in ("nn_module_stack", "stack_trace", "seq_nr"):
        if name in like.meta:
            made.meta[name] = like.meta[name]
    return made
