"""See what overrides do: their counts, and which one answered which call of a model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tpu_kernels
from tpu_kernels.registry.overrides.chain import FLAGS, LOCK, current_scope, set_scope
from tpu_kernels.registry.overrides.handle import Override, listed
from tpu_kernels.registry.overrides.targets import Site, qualified

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(tpu_kernels.__file__).parent))
_OWN_PACKAGES = ("tpu_kernels.", "torch.")


@dataclasses.dataclass(frozen=True)
class OverrideRecord:
    """What `overrides` tells of one override.

    Attributes:
        op: The operator's qualified name, such as ``aten::mm``.
        impl: Name of the implementation.
        predicate: Name of the predicate, or None.
        device: ``"tpu"`` or ``"cpu"``.
        scope: ``"process"``, ``"thread"`` or ``"off"``.
        priority: Higher comes first.
        variants: The other overloads that it covers (in-place and out variants).
        hits: Calls that the implementation answered, calls made while a graph is traced included.
        declines: Calls that were left to the next in order.
        last_decline: Why the last of them was.
        errors: Calls in which the implementation or the predicate raised or broke the contract.
        last_error: Text of the last error.
        where: ``file:line`` of the implementation.
    """

    op: str
    impl: str
    predicate: str | None
    device: str
    scope: str
    priority: int
    variants: tuple[str, ...]
    hits: int
    declines: int
    last_decline: str | None
    errors: int
    last_error: str | None
    where: str | None


def overrides() -> list[OverrideRecord]:
    """List every override that has not been removed, oldest first.

    Returns:
        One record each; the counts are those of this moment.

    Example:
        >>> import torch
        >>> from tpu_kernels.registry.overrides import override
        >>> def never(a, b):
        ...     return "not now"
        >>> with override("aten::mm", torch.ops.aten.matmul, device="cpu", when=never):
        ...     y = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        ...     record = overrides()[-1]
        >>> record.op, record.impl, record.scope, record.hits, record.declines, record.last_decline
        ('aten::mm', 'aten::matmul', 'thread', 0, 1, 'not now')
    """
    return [_record(o) for o in listed()]


def _record(override: Override) -> OverrideRecord:
    own = qualified(override.op)
    return OverrideRecord(
        op=own,
        impl=override.impl_name,
        predicate=override.when_name,
        device=override.device,
        scope=override.scope,
        priority=override.priority,
        variants=tuple(dict.fromkeys(name for name, _ in override.sites if name != own)),
        hits=override.hits,
        declines=override.declines,
        last_decline=override.last_decline,
        errors=override.errors,
        last_error=override.last_error,
        where=override.where,
    )


@dataclasses.dataclass(frozen=True)
class CallSite:
    """What happened to the calls of one operator from one line of the user's code.

    Attributes:
        op: The operator's qualified name.
        where: ``file:line`` of the user's code, or ``"?"`` (a backward has no line).
        shapes: Shapes of the tensor arguments, such as ``[8, 128], [128, 64]``.
        ran: Name of the implementation, or None for the original.
        declined: For each override that was asked before, its name and why it declined.
        calls: Number of such calls.
    """

    op: str
    where: str
    shapes: str
    ran: str | None
    declined: tuple[tuple[str, str], ...]
    calls: int


class Recorder:
    """Collects calls while `explain_overrides` runs."""

    def __init__(self) -> None:
        self._calls: dict[CallSite, int] = {}

    def note(
        self,
        site: Site,
        args: tuple[Any, ...],
        ran: str | None,
        declined: list[tuple[str, str]],
    ) -> None:
        """Count one call."""
        shapes = ", ".join(str(list(a.shape)) for a in args if isinstance(a, torch.Tensor))
        call = CallSite(qualified(site.op), _user_line(), shapes, ran, tuple(declined), 1)
        with LOCK:
            self._calls[call] = self._calls.get(call, 0) + 1

    def rows(self) -> tuple[CallSite, ...]:
        """The calls so far, equal ones counted together."""
        return tuple(dataclasses.replace(c, calls=n) for c, n in self._calls.items())


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        module = frame.f_globals.get("__name__", "")
        library = file.startswith(_LIBRARIES) or module.startswith(_OWN_PACKAGES)
        if not library and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation answered which call; printed as text, one line per call site.

    Attributes:
        rows: The call sites in the order of their first call.
    """

    rows: tuple[CallSite, ...]

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            why = "; ".join(f"{name}: {reason}" for name, reason in row.declined)
            lines.append(
                f"{row.calls:4d}x {row.op}({row.shapes}) -> {row.ran or 'original'}"
                f"{f'  [{why}]' if why else ''}  {row.where}"
            )
        return "\n".join(lines) or "no overridden operator was called"


def explain_overrides(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call a function once, and tell for each call of an overridden operator what answered it.

    Args:
        function: A function or model; called once, with whatever it changes.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The call sites; ``str()`` of it is meant for reading.

    Example:
        >>> import torch
        >>> from tpu_kernels.registry.overrides import override
        >>> def half(a, b):
        ...     return a.shape[0] % 2 == 0 or "odd number of rows"
        >>> with override("aten::mm", torch.ops.aten.matmul, device="cpu", when=half):
        ...     rows = explain_overrides(lambda x: x @ x, torch.ones(3, 3)).rows
        >>> rows[0].op, rows[0].shapes, rows[0].ran, rows[0].declined
        ('aten::mm', '[3, 3], [3, 3]', None, (('aten::matmul', 'odd number of rows'),))
    """
    recorder = Recorder()
    with LOCK:
        FLAGS.slow += 1
        FLAGS.scoped += 1
    before = set_scope(current_scope().replaced(recorder=recorder))
    try:
        function(*args, **kwargs)
    finally:
        set_scope(before)
        with LOCK:
            FLAGS.slow -= 1
            FLAGS.scoped -= 1
    return Explanation(recorder.rows())
