"""What to call a function in messages, where it is written, and when two are the same."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload


def name_of(function: Callable[..., Any]) -> str:
    """Return a kernel's or an operator's own name, else the module and qualified name.

    Example:
        >>> import torch
        >>> name_of(torch.ops.aten.mm.out), name_of(name_of).rpartition(".")[2]
        ('aten::mm.out', 'name_of')
    """
    if isinstance(function, OpOverload):
        return str(function.name())
    name = getattr(function, "name", None)
    if isinstance(name, str):
        return name
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        return repr(function)
    # Where a local function is defined says `where`; the way there would fill the line.
    return f"{getattr(function, '__module__', '?')}.{qualname.rpartition('<locals>.')[2]}"


def where(function: Callable[..., Any]) -> str | None:
    """Return ``file:line`` of a function or kernel, or None for what has no Python source."""
    source = getattr(getattr(function, "spec", None), "source", None)
    if source is not None:
        return str(source)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def content(function: Callable[..., Any] | None) -> Any:
    """Return something equal for functions that do the same.

    A lambda is made anew each time its line is reached; to compiled graphs, which are guarded by
    the overrides in force, it should be the same one.
    """
    if isinstance(function, types.FunctionType) and not (
        function.__closure__ or function.__defaults__ or function.__kwdefaults__
    ):
        return function.__module__, function.__code__
    return function
