"""Counters of a kernel, cheap enough for the call path and right under threads."""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class KernelStats:
    """What has happened to a kernel in this process.

    Attributes:
        launches: Programs run: forward, backward, batched and so on.
        kernel_compilations: Programs traced and compiled for the device that ran them.
        disk_cache_hits: Programs that were loaded from disk instead.
        reference_fallbacks: Calls answered by the reference because the kernel cannot run on empty
            inputs.
    """

    launches: int = 0
    kernel_compilations: int = 0
    disk_cache_hits: int = 0
    reference_fallbacks: int = 0


class Counters:
    """Mutable counters behind `KernelStats`.

    `itertools.count` is advanced in C under the interpreter lock, so no update is lost between
    threads; an attribute increment would lose some.

    Example:
        >>> counters = Counters()
        >>> for _ in range(3):
        ...     _ = counters.launch()
        >>> counters.snapshot().launches
        3
    """

    NAMES = tuple(f.name for f in dataclasses.fields(KernelStats))

    def __init__(self) -> None:
        self._counts = {name: itertools.count() for name in self.NAMES}
        self.launch = self._counts["launches"].__next__
        self.compilation = self._counts["kernel_compilations"].__next__
        self.disk_hit = self._counts["disk_cache_hits"].__next__
        self.fallback = self._counts["reference_fallbacks"].__next__

    def snapshot(self) -> KernelStats:
        """The counts so far."""
        return KernelStats(**{name: _value(count) for name, count in self._counts.items()})


def _value(count: itertools.count[int]) -> int:
    # The next value stands in the counter's repr, "count(3)"; reading it any other way would
    # advance it.
    return int(repr(count)[len("count(") : -1])
