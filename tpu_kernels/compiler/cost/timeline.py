"""When a kernel copies, computes and waits: the events at the start and the end of a run.

A run has up to some hundred thousand steps that all look alike, and long loops are skipped through,
so only its first and last steps are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_STEPS, LAST_STEPS = 6, 4
_EVENTS = 240  # kept of each kind, at either end of a run


@dataclass(frozen=True)
class Transfer:
    """One copy, in cycles from the kernel's start.

    Attributes:
        direction: Such as ``"hbm->vmem"``.
        issued: When the kernel started it.
        begins: When its turn came in the queue in front of HBM.
        arrives: When its semaphore counts it.
        bytes: Its size.
    """

    direction: str
    issued: float
    begins: float
    arrives: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """The first and last steps of a kernel, in cycles from its start.

    Attributes:
        steps: Number and start of each step kept: an iteration of the outermost loop, which is the
            pipeline over the grid in a Pallas kernel.
        transfers: Copies that those steps overlap.
        waits: Start and end of each wait for a copy.
        cycles: Length of the whole run.
        total_steps: Steps of the whole run.
    """

    steps: tuple[tuple[int, float], ...]
    transfers: tuple[Transfer, ...]
    waits: tuple[tuple[float, float], ...]
    cycles: float
    total_steps: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Make a timeline of what `dataclasses.asdict` returned, lists for tuples included."""
        return cls(
            steps=tuple((int(number), float(at)) for number, at in data["steps"]),
            transfers=tuple(Transfer(**transfer) for transfer in data["transfers"]),
            waits=tuple((float(start), float(end)) for start, end in data["waits"]),
            cycles=float(data["cycles"]),
            total_steps=int(data["total_steps"]),
        )


class Ends:
    """The first and the last of many items."""

    def __init__(self, first: int, last: int) -> None:
        self._first: list[Any] = []
        self._room = first
        self._last: deque[Any] = deque(maxlen=last)

    def add(self, item: Any) -> None:
        """Keep an item, forgetting one between the ends if need be."""
        if len(self._first) < self._room:
            self._first.append(item)
        else:
            self._last.append(item)

    def items(self) -> list[Any]:
        """What was kept, in order."""
        return [*self._first, *self._last]


class Recorder:
    """Takes note of a run's events.

    Attributes:
        transfers: Fields of each `Transfer`, as a tuple: there may be millions.
        waits: Start and end of each wait for a copy.
    """

    def __init__(self) -> None:
        self.transfers = Ends(_EVENTS, _EVENTS)
        self.waits = Ends(_EVENTS, _EVENTS)
        self._loops: dict[int, Ends] = {}
        self._extent: dict[int, int] = {}

    def loop(self, header: int, last: int, t: float, times: int) -> None:
        """Take note of an iteration's start.

        Args:
            header: First bundle of the loop.
            last: Bundle from which it was entered again.
            t: Time.
            times: How often the header was visited before.
        """
        ends = self._loops.get(header)
        if ends is None:
            ends = self._loops[header] = Ends(FIRST_STEPS + 2, LAST_STEPS + 1)
        ends.add((times, t))
        if last - header > self._extent.get(header, 0):
            self._extent[header] = last - header

    def timeline(self, cycles: float, visits: Mapping[int, int]) -> Timeline | None:
        """Return the timeline, None for a kernel that loops not at all.

        Args:
            cycles: Length of the run.
            visits: Visits of each block by first bundle.
        """
        if not self._loops:
            return None
        header = max(self._loops, key=lambda first: self._extent.get(first, 0))
        starts = self._loops[header].items()
        transfers = [Transfer(*fields) for fields in self.transfers.items()]
        # The first iteration is entered from above, not by a branch backwards.
        steps = [(0, _first_step(starts, transfers)), *starts]
        total = visits[header]
        kept = [step for step in steps if step[0] < FIRST_STEPS or step[0] >= total - LAST_STEPS]
        spans = list(_spans(kept, steps, cycles))
        return Timeline(
            tuple(kept),
            tuple(t for t in transfers if _overlaps(spans, t.issued, t.arrives)),
            tuple(w for w in self.waits.items() if _overlaps(spans, *w)),
            cycles,
            total,
        )


def _first_step(starts: Sequence[tuple[int, float]], transfers: Sequence[Transfer]) -> float:
    """When the first iteration began, as far as can be told: not before the first copy was."""
    before = [t.issued for t in transfers if t.issued < starts[0][1]]
    if len(starts) > 1:
        return max(starts[0][1] - (starts[1][1] - starts[0][1]), min(before, default=0.0), 0.0)
    return min(before, default=0.0)


def _spans(
    kept: Sequence[tuple[int, float]], steps: Sequence[tuple[int, float]], cycles: float
) -> list[tuple[float, float]]:
    """From when to when each kept step lasts."""
    following = dict(steps)
    return [(at, following.get(number + 1, cycles)) for number, at in kept]


def _overlaps(spans: Sequence[tuple[float, float]], start: float, end: float) -> bool:
    return any(start < until and end > since for since, until in spans)


def step_ends(timeline: Timeline) -> list[float]:
    """Return when each kept step ends: where the next one starts, or nan if that was not kept.

    Args:
        timeline: A timeline.

    Returns:
        One time for each of its steps, in cycles.

    Example:
        >>> step_ends(Timeline(((0, 0.0), (1, 5.0), (8, 40.0)), (), (), 46.0, 9))
        [5.0, nan, 46.0]
    """
    starts = dict(timeline.steps)
    last = timeline.total_steps - 1
    return [
        starts.get(number + 1, timeline.cycles if number == last else math.nan)
        for number, _ in timeline.steps
    ]
