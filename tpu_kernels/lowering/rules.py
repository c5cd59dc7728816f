"""The table of lowerings: for each torch operator the JAX function that computes it.

A rule takes what the operator takes, with `jax.Array` for tensors, and returns arrays of exactly
the shape and dtype that torch would return. What only says where a tensor lies (``device``,
``layout``, ``pin_memory``, ``memory_format``) is left out before a rule is called.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

Rule = Callable[..., Any]

FAMILIES = (
    "activations",
    "attention",
    "binary",
    "convolution",
    "creation",
    "fourier",
    "indexing",
    "lists",
    "linalg",
    "normalisation",
    "optimizers",
    "pooling",
    "prims",
    "products",
    "random",
    "reductions",
    "resampling",
    "scatter",
    "sorting",
    "unary",
    "views",
)
"""The modules of `tpu_kernels.lowering.families` that hold the rules."""

_rules: dict[OpOverload, Rule] = {}
_higher: dict[Any, Rule] = {}


class Unlowered(Exception):
    """A rule does not cover this call; the node runs outside of the program.

    Args:
        reason: Why, in a few words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function as the rule of operators; a decorator.

    Args:
        *names: Overloads such as ``"aten.add.Tensor"``; without a namespace, ``aten`` is meant, and
            without an overload, ``default``.

    Raises:
        AttributeError: If torch has no such operator.
    """

    def enter(rule: Rule) -> Rule:
        for name in names:
            _rules[overload(name)] = rule
        return rule

    return enter


def overload(name: str) -> OpOverload:
    """Look an operator up by the short name that `lowers` takes.

    Example:
        >>> str(overload("mm")), str(overload("aten.add.Tensor"))
        ('aten.mm.default', 'aten.add.Tensor')
    """
    parts = name.split(".")
    if parts[0] not in ("aten", "prims"):
        parts.insert(0, "aten")
    if len(parts) == 2:
        parts.append("default")
    return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])  # type: ignore[no-any-return]


@functools.cache
def _load() -> None:
    for family in FAMILIES:
        importlib.import_module(f"tpu_kernels.lowering.families.{family}")


def find(op: Any) -> Rule | None:
    """Return the rule of an operator, None if it has none of its own."""
    _load()
    return _rules.get(op)


def lower_higher_order(op: Any, rule: Rule) -> None:
    """Enter the rule of a higher-order operator, whose arguments include graphs.

    Args:
        op: The operator.
        rule: Called with the evaluator, the node, and the operator's arguments.
    """
    _higher[op] = rule


def find_higher_order(op: Any) -> Rule | None:
    """Return the rule of a higher-order operator, None if it has none."""
    return _higher.get(op)


def operators() -> tuple[OpOverload, ...]:
    """Return every operator that has a rule of its own, by name.

    Example:
        >>> overload("addmm") in operators()
        True
    """
    _load()
    return tuple(sorted(_rules, key=str))
