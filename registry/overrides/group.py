"""Several overrides that are put in force and ended together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tpu_kernels.registry.overrides.handle import Override


class OverrideGroup:
    """Overrides that stand for one thing, as one: a context manager and a switch.

    Args:
        members: The overrides, by the name of their operator.
    """

    def __init__(self, members: Mapping[str, Override]) -> None:
        self.members = dict(members)
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for member in self.members.values():
                stack.enter_context(member)
            self._stacks.append(stack.pop_all())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stacks.pop().__exit__(kind, error, trace)

    def enable(self) -> Self:
        """Put the overrides in force for every thread until `disable`; returns itself."""
        for member in self.members.values():
            member.enable()
        return self

    def disable(self) -> None:
        """Undo `enable`."""
        for member in self.members.values():
            member.disable()

    def remove(self) -> None:
        """End the overrides everywhere."""
        for member in self.members.values():
            member.remove()

    @property
    def hits(self) -> int:
        """Calls that the implementations answered."""
        return sum(member.hits for member in self.members.values())

    @property
    def last_decline(self) -> str | None:
        """Why a call was last left to torch."""
        reasons = [m.last_decline for m in self.members.values() if m.last_decline]
        return reasons[0] if reasons else None
