"""Which arguments of an operator are indices, and what they must lie within.

The simulated device's kernels are the CPU's, most of which check; a TPU's clamp or drop what lies
outside. Debug mode checks before the call, so that the error names operator, value and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Found = tuple[Tensor, int, str, int]
"""Indices, the size that they must be below, what is indexed, the least that they may be."""


def indices(name: str, arguments: Mapping[str, Any]) -> Iterator[Found]:
    """Yield the index arguments of a call.

    Args:
        name: The operator's base name, such as ``"embedding"``.
        arguments: Its arguments by name.
    """
    rule = _RULES.get(name.rstrip("_"))
    if rule is not None:
        yield from rule(arguments)


def _along_dim(a: Mapping[str, Any]) -> Iterator[Found]:
    whole, dim = a["self"], a["dim"]
    if isinstance(dim, int) and whole.dim():
        yield a["index"], whole.shape[dim], f"dimension {dim} of size {whole.shape[dim]}", 0


def _embedding(a: Mapping[str, Any]) -> Iterator[Found]:
    rows = a["weight"].shape[0]
    yield a["indices"], rows, f"a table of {rows} rows", 0


def _advanced(a: Mapping[str, Any]) -> Iterator[Found]:
    """`x[i, j]`: negative indices count from the end; masks are no indices."""
    whole, dim = a["self"], 0
    for index in a["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            size = whole.shape[dim]
            yield index, size, f"dimension {dim} of size {size}", -size
            dim += 1


def _take(a: Mapping[str, Any]) -> Iterator[Found]:
    count = a["self"].numel()
    yield a["index"], count, f"{count} elements", -count


def _target(a: Mapping[str, Any]) -> Iterator[Found]:
    classes = a["self"].shape[1 if a["self"].dim() > 1 else 0]
    target = a["target"]
    yield target[target != a["ignore_index"]], classes, f"{classes} classes", 0


_RULES: dict[str, Callable[[Mapping[str, Any]], Iterator[Found]]] = {
    "embedding": _embedding,
    "index": _advanced,
    "index_put": _advanced,
    "_index_put_impl": _advanced,
    "_unsafe_index": _advanced,
    "_unsafe_index_put": _advanced,
    "nll_loss_forward": _target,
    "nll_loss2d_forward": _target,
    "take": _take,
    **dict.fromkeys(
        ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add",
         "index_copy", "index_fill"),
        _along_dim,
    ),
}  # fmt: skip


def offender(index: Tensor, size: int, least: int) -> int | None:
    """Return the first index that lies outside, None if all lie inside.

    Args:
        index: Indices, on the CPU.
        size: What they must be below.
        least: The least that they may be.
    """
    if index.numel() == 0:
        return None
    outside = (index < least) | (index >= size)
    return int(index[outside][0]) if bool(outside.any()) else None


def by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by their names in the schema, with its defaults."""
    found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    found.update(zip([a.name for a in schema.arguments], args, strict=False))
    found.update(kwargs)
    return found
