"""In which order candidates are tried, and which need not be tried at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Parameters that give a kernel more room: a larger value fits where a smaller one did not.
_ROOM = ("limit", "vmem")


def dominates(bigger: Mapping[str, Any], smaller: Mapping[str, Any]) -> bool:
    """Whether a config asks for at least as much of everything as another one.

    If the smaller one runs out of VMEM, so does the bigger one under the same limit. Sizes (numbers
    or tuples of them) may grow; every other value, and every parameter that raises a limit, has to
    be the same.

    Args:
        bigger: The config in question.
        smaller: A config that ran out of VMEM.

    Example:
        >>> dominates({"block": (512, 256), "acc": "f32"}, {"block": (256, 256), "acc": "f32"})
        True
        >>> dominates({"block": (512, 128)}, {"block": (256, 256)})
        False
    """
    if bigger.keys() != smaller.keys():
        return False
    return all(
        value == smaller[name]
        if any(word in name for word in _ROOM)
        else _at_least(value, smaller[name])
        for name, value in bigger.items()
    )


def _at_least(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_at_least, value, other))
    numbers = isinstance(value, int | float) and isinstance(other, int | float)
    if not numbers or isinstance(value, bool) or isinstance(other, bool):
        return bool(value == other)
    return bool(value >= other)


def dominated(config: Mapping[str, Any], failed: Sequence[Mapping[str, Any]]) -> Any:
    """Return the config among those that ran out of VMEM that this one dominates, or None."""
    return next((other for other in failed if dominates(config, other)), None)


def order(count: int, costs: Mapping[int, float], first: int | None = None) -> list[int]:
    """Order candidates for trying: the current config, then by estimated cost.

    Whatever ends the search early, a budget or Ctrl-C, then leaves the likely ones tried.

    Args:
        count: Number of candidates.
        costs: Estimates by index; candidates without one come last, in their own order.
        first: Index of the config in force now, if it is a candidate.

    Example:
        >>> order(4, {0: 3.0, 1: 1.0, 3: 2.0}, first=2)
        [2, 1, 3, 0]
    """
    known = sorted(range(count), key=lambda i: (costs.get(i, float("inf")), i))
    return known if first is None else [first, *(i for i in known if i != first)]
