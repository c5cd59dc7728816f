"""Skip through long uniform loops.

The grid of a kernel becomes one loop of up to some hundred thousand iterations, most of which do
the same. After the path through the loop has repeated itself with some period, and every integer of
the state has moved by the same amount in two periods, the same will go on until a comparison comes
out differently or a load finds another value. Both can be foreseen from the amounts, so whole
periods are skipped without changing the result: the state moves by that many times its amount, and
what was counted in one period is counted that many times.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tpu_kernels.compiler.cost.machine import Machine
from tpu_kernels.compiler.cost.translate import Reference, Translation
from tpu_kernels.compiler.cost.values import NAMESPACE, UNKNOWN

_FIRST_LOOK = 48  # iterations before the first attempt; the next ones follow at growing distances
_GROWTH = 1.5
_MIN_SKIP = 4  # periods; less is not worth it
_TIME_TOLERANCE = 1e-4  # of a period's length, for rounding and for a queue that still settles
_REGISTER = re.compile(r"E\[(\d+)\]")


@dataclass
class _Snapshot:
    """State at the start of an iteration."""

    t: float
    registers: list[Any]
    smem: dict[Any, Any]
    pending: tuple[Any, ...]
    backlog: list[float]
    counts: Counter[str]
    visits: Counter[int]


class _Loop:
    """What is known of one loop, named by the block that it starts with."""

    def __init__(self) -> None:
        self.paths: list[int] = []
        self.look_at = _FIRST_LOOK
        self.period = 0
        self.snapshots: list[_Snapshot] = []

    def postpone(self) -> None:
        self.snapshots, self.period = [], 0
        self.look_at = int(len(self.paths) * _GROWTH) + _FIRST_LOOK


class LoopSkipper:
    """Watches a run and skips periods of its loops.

    Args:
        program: The program that runs.
        machine: Its machine.
        registers: Its registers.
        visits: Its count of visits by block.
    """

    def __init__(
        self, program: Translation, machine: Machine, registers: list[Any], visits: Counter[int]
    ) -> None:
        self._machine = machine
        self._registers = registers
        self._visits = visits
        self._comparisons = [(_getter(a), _getter(b)) for a, b, _ in program.comparisons]
        outcomes = [
            int(found[1]) for *_, out in program.comparisons if (found := _REGISTER.match(out))
        ]
        self._outcomes = itemgetter(*outcomes, 0, 0)
        self._loads = [_compiled(address) for address in program.loads]
        self._loops: dict[int, _Loop] = {}
        self._path = 0
        self._paths_at: dict[int, int] = {}
        self.skipped = 0

    def step(self, position: int, following: int) -> None:
        """Take note of a step; called after each block.

        Args:
            position: The block that ran.
            following: The block that will run next.
        """
        self._path = hash((self._path, position))
        if following > position or following < 0:
            return
        loop = self._loops.get(following)
        if loop is None:
            loop = self._loops[following] = _Loop()
        # Where a comparison selects a value instead of a branch, its outcome is part of the way.
        loop.paths.append(hash((self._path, self._outcomes(self._registers))))
        # The path is counted from the loop's own start, so that it does not depend on what came
        # before.
        self._path = 0
        if len(loop.paths) >= loop.look_at:
            self._look(loop)

    def _look(self, loop: _Loop) -> None:
        if loop.period == 0:
            # The longest one lasts longest: a short one ends where an outer index moves on.
            loop.period = max(periods_of(loop.paths), default=0)
            if loop.period == 0:
                loop.postpone()
                return
        paths, period = loop.paths, loop.period
        if paths[-period:] != paths[-2 * period : -period]:
            loop.postpone()
            return
        loop.snapshots.append(self._snapshot())
        if len(loop.snapshots) < 3:
            loop.look_at = len(paths) + period
            return
        periods = self._periods_to_skip(*loop.snapshots)
        if periods >= _MIN_SKIP and periods * period >= len(paths) // 4:
            self._skip(loop, periods)
            paths.extend(paths[-period:] * periods)
            loop.postpone()
        elif periods == -1 and period * 8 <= len(paths):
            # Buffers alternate with a period of their own, which need not divide that of the path.
            loop.snapshots = []
            loop.period = period * 2
            loop.look_at = len(paths) + 1
        else:
            loop.postpone()

    def _snapshot(self) -> _Snapshot:
        machine = self._machine
        return _Snapshot(
            machine.t,
            list(self._registers),
            dict(machine.smem),
            machine.pending(),
            machine.backlog(),
            machine.counts.copy(),
            self._visits.copy(),
        )

    def _periods_to_skip(self, first: _Snapshot, second: _Snapshot, third: _Snapshot) -> int:
        """How many periods will be like the last two; -1 if those two were not alike."""
        length = third.t - second.t
        if abs(length - (second.t - first.t)) > _TIME_TOLERANCE * length:
            return -1
        if not first.pending == second.pending == third.pending:
            return -1
        # A queue in front of HBM that still grows will make the later periods longer.
        if len(second.backlog) != len(third.backlog):
            return -1
        for lag, next_lag in zip(second.backlog, third.backlog, strict=True):
            if abs(lag - next_lag) > _TIME_TOLERANCE * length:
                return -1
        if first.smem.keys() != third.smem.keys():
            return -1
        rates = _rates(first.registers, second.registers, third.registers)
        cells = list(third.smem)
        memory = _rates(
            [first.smem[cell] for cell in cells],
            [second.smem.get(cell) for cell in cells],
            [third.smem[cell] for cell in cells],
        )
        if rates is None or memory is None:
            return -1
        limit = 1 << 40
        before, now = second.registers, third.registers
        for left, right in self._comparisons:
            difference, earlier = _minus(left(now), right(now)), _minus(left(before), right(before))
            if difference is None or earlier is None or difference == earlier:
                continue
            rate = difference - earlier
            if difference == 0 or (difference > 0) != (rate > 0):
                limit = min(limit, (abs(difference) - 1) // abs(rate))
        moving = {cell for cell, rate in zip(cells, memory, strict=True) if rate}
        for address in self._loads:
            limit = min(limit, self._steady_loads(address, before, now, moving, limit))
            if limit < _MIN_SKIP:
                return 0
        return 0 if limit == 1 << 40 else limit

    def _steady_loads(
        self, address: Any, before: list[Any], now: list[Any], moving: set[Any], limit: int
    ) -> int:
        """For how many periods a load at a moving address goes on as it does."""
        at, earlier = address(now), address(before)
        if at is UNKNOWN or earlier is UNKNOWN or at == earlier:
            return limit
        smem, step = self._machine.smem, at - earlier
        if moving & {at, earlier}:
            return 0
        value, previous = smem.get(at, UNKNOWN), smem.get(earlier, UNKNOWN)
        rate = _minus(value, previous)
        if rate is None:
            return limit if value is UNKNOWN and previous is UNKNOWN else 0
        periods = 0
        while periods < limit:
            following = smem.get(at + step * (periods + 1), UNKNOWN)
            if _minus(following, value) != rate:
                break
            value, periods = following, periods + 1
        return periods

    def _skip(self, loop: _Loop, periods: int) -> None:
        _, second, third = loop.snapshots
        machine, registers = self._machine, self._registers
        for index, (before, now) in enumerate(zip(second.registers, third.registers, strict=True)):
            if before is not UNKNOWN and before != now:
                registers[index] = now + (now - before) * periods
        for cell, now in third.smem.items():
            before = second.smem[cell]
            if before is not UNKNOWN and before != now:
                machine.smem[cell] = now + (now - before) * periods
        for name, now in third.counts.items():
            machine.counts[name] += (now - second.counts[name]) * periods
        for block, now in third.visits.items():
            more = (now - second.visits[block]) * periods
            self._visits[block] += more
            self.skipped += more
        machine.advance((third.t - second.t) * periods)


def periods_of(items: list[int]) -> list[int]:
    """Return the periods with which the end of a list repeats itself at least three times.

    Args:
        items: The list.

    Returns:
        The periods in ascending order, without multiples of the one before.

    Example:
        >>> periods_of([9, 1, 1, 2, 1, 1, 2, 1, 1, 2])
        [3]
        >>> periods_of([1, 1, 1, 1, 2] * 3 + [1, 1, 1, 1])
        [1, 5]
        >>> periods_of([1, 2, 3, 4])
        []
    """
    backwards = items[::-1]
    border = [0] * len(backwards)  # length of the longest border of each beginning (Knuth et al.)
    found: list[int] = []
    length = 0
    for position in range(1, len(backwards)):
        while length and backwards[position] != backwards[length]:
            length = border[length - 1]
        if backwards[position] == backwards[length]:
            length += 1
        border[position] = length
        period = position + 1 - length
        if position + 1 >= 3 * period and (not found or period > found[-1]):
            found.append(period)
    return found


def _rates(first: list[Any], second: list[Any], third: list[Any]) -> list[int] | None:
    """Change of each value per period, None if one of them did not change evenly."""
    rates = []
    for a, b, c in zip(first, second, third, strict=True):
        if b is c and a is b:
            rates.append(0)
            continue
        known = [value is not UNKNOWN and value is not None for value in (a, b, c)]
        if not all(known):
            if any(known):
                return None
            rates.append(0)
            continue
        if c - b != b - a:
            return None
        rates.append(c - b)
    return rates


def _minus(a: Any, b: Any) -> int | None:
    return None if a is UNKNOWN or b is UNKNOWN else a - b


def _getter(reference: Reference) -> Any:
    if isinstance(reference, int):
        return lambda registers: reference
    found = _REGISTER.fullmatch(reference)
    if found is None:
        return lambda registers: UNKNOWN
    index = int(found[1])
    return lambda registers: registers[index]


def _compiled(address: str) -> Any:
    return eval(f"lambda E: {address}", dict(NAMESPACE))
