"""Bounds how many programs stay in memory.

A program takes one to two MiB, and a kernel that meets ever new shapes makes ever new ones. Where
there are more than `LIMIT` of all kernels together, the ones that came first leave; whoever still
needs one loads it from disk in a tenth of a second. Which were used last is not known: to note it
would cost every call.
"""

from __future__ import annotations

import collections
import logging
import threading
import weakref
from collections.abc import Hashable
from typing import Protocol

logger = logging.getLogger(__name__)

LIMIT = 1024
_SHARE = 16  # one in so many leaves at once


class Holder(Protocol):
    """What keeps programs by key."""

    def drop(self, key: Hashable) -> None:
        """Let go of one program, if it is there."""


class Resident:
    """The programs in memory, oldest first.

    Args:
        limit: Programs that may stay.

    Example:
        >>> class Kept(dict):
        ...     def drop(self, key):
        ...         self.pop(key, None)
        >>> kept, resident = Kept(), Resident(limit=2)
        >>> for key in "abc":
        ...     kept[key] = "program"
        ...     resident.enter(kept, key, "doc::kernel")
        >>> list(kept)
        ['b', 'c']
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._told = False
        self._order: collections.OrderedDict[
            tuple[int, Hashable], tuple[weakref.ref[Holder], str]
        ] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def enter(self, holder: Holder, key: Hashable, name: str) -> None:
        """Note a new program, and let the oldest go where there are too many.

        Args:
            holder: Who keeps it; may be of any lifetime.
            key: Under which key.
            name: Its kernel, for the log.
        """
        leaving = []
        with self._lock:
            self._order[id(holder), key] = weakref.ref(holder), name
            self._order.move_to_end((id(holder), key))
            if len(self._order) > self.limit:
                for _ in range(max(self.limit // _SHARE, 1)):
                    (_, old), (reference, _) = self._order.popitem(last=False)
                    leaving.append((reference, old))
                self._tell()
        for reference, old in leaving:
            owner = reference()
            if owner is not None:
                owner.drop(old)

    def _tell(self) -> None:
        if self._told:
            return
        self._told = True
        many, count = collections.Counter(n for _, n in self._order.values()).most_common(1)[0]
        logger.warning(
            "more than %d compiled programs: the oldest leave memory; %r alone has %d, one for each"
            " combination of shapes, dtypes and static values",
            self.limit,
            many,
            count,
        )


programs = Resident()
"""The CPU programs of this process."""
