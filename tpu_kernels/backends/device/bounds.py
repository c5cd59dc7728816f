"""Which arguments of an operator are indices, and what they must lie within.

The simulated device's kernels are the CPU's, most of which check; a TPU's clamp or drop what lies
outside. Debug mode checks before the call, so that the error names operator, value and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Found(NamedTuple):
    """An index argument.

    Attributes:
        indices: The tensor of indices.
        size: What they must be below.
        what: What is indexed, for messages.
        least: The least that they may be.
        ignored: A value that is no index.
    """

    indices: Tensor
    size: int
    what: str
    least: int = 0
    ignored: int | None = None


def indices(name: str, arguments: Mapping[str, Any]) -> Iterator[Found]:
    """Yield the index arguments of a call.

    Args:
        name: The operator's base name, such as ``"embedding"``.
        arguments: Its arguments by name.
    """
    rule = _RULES.get(name.rstrip("_"))
    if rule is not None:
        yield from rule(arguments)


def has_indices(name: str) -> bool:
    """Return whether `indices` knows an operator, by its base name."""
    return name.rstrip("_") in _RULES


def _along_dim(a: Mapping[str, Any]) -> Iterator[Found]:
    whole, dim = a["self"], a["dim"]
    if isinstance(dim, int) and whole.dim():
        size = whole.shape[dim]
        yield Found(a["index"], size, f"dimension {dim} of size {size}")


def _embedding(a: Mapping[str, Any]) -> Iterator[Found]:
    rows = a["weight"].shape[0]
    yield Found(a["indices"], rows, f"a table of {rows} rows")


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
            yield Found(index, size, f"dimension {dim} of size {size}", -size)
            dim += 1


def _take(a: Mapping[str, Any]) -> Iterator[Found]:
    count = a["self"].numel()
    yield Found(a["index"], count, f"{count} elements", -count)


def _target(a: Mapping[str, Any]) -> Iterator[Found]:
    classes = a["self"].shape[1 if a["self"].dim() > 1 else 0]
    yield Found(a["target"], classes, f"{classes} classes", ignored=a["ignore_index"])


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


def offender(found: Found, index: Tensor) -> int | None:
    """Return the first index that lies outside, None if all lie inside.

    Args:
        found: What they must lie within.
        index: Their values, on the CPU.
    """
    if index.numel() == 0:
        return None
    outside = (index < found.least) | (index >= found.size)
    if found.ignored is not None:
        outside &= index != found.ignored
    return int(index[outside][0]) if bool(outside.any()) else None


def by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by their names in the schema, with its defaults."""
    found = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    found.update(zip([a.name for a in schema.arguments], args, strict=False))
    found.update(kwargs)
    return found
