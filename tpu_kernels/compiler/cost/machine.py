"""What a kernel waits for: the clock, scalar memory, semaphores, and the queue in front of HBM."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tpu_kernels.compiler.cost.timeline import Recorder
from tpu_kernels.compiler.cost.translate import operand_address
from tpu_kernels.compiler.cost.values import UNKNOWN, Value, s32

CALL = "call "  # what the count of a called HLO's runs is named after
UNKNOWN_LOOP = "loop whose end depends on data"
_ON_CHIP_LATENCY = 100  # cycles of a copy that does not touch HBM; such copies are rare and short
_ON_CHIP_BYTES_PER_CYCLE = 256
_POINTER_SHIFT = 4  # DMA operands are addresses in units of 16 bytes on some chips


@dataclass(frozen=True)
class Speed:
    """How fast a TensorCore and its share of HBM are, in cycles of the core.

    Attributes:
        hbm_bytes_per_cycle: Usable bandwidth.
        hbm_latency: Cycles from the end of a transfer's turn in the queue until its semaphore
            counts it.
        granule_bytes: Unit of DMA sizes and of the semaphores that count them.
    """

    hbm_bytes_per_cycle: float
    hbm_latency: float
    granule_bytes: int = 32


@dataclass(frozen=True)
class CallCost:
    """What running another HLO costs its caller.

    Attributes:
        cycles: Its length.
        hbm_busy: Cycles that HBM moves its bytes; copies of the caller's wait for that.
    """

    cycles: float
    hbm_busy: float


class Machine:
    """State that generated code works on; its methods are called from there.

    Args:
        speed: Speed of copies.
        scalars: Integer operands that steer the kernel, by operand number.
        calls: Cost of the HLOs that it calls, by name; others take no time.
    """

    def __init__(
        self,
        speed: Speed,
        scalars: Mapping[int, np.ndarray],
        calls: Mapping[str, CallCost] | None = None,
    ) -> None:
        self.speed = speed
        self.scalars = scalars
        self.call_costs = calls or {}
        self.recorder = Recorder()
        self.t = 0.0
        self.smem: dict[Value, Value] = {0: 0}  # address 0 holds the number of the core
        self.semaphores: dict[Value, deque[tuple[float, int]]] = {}
        self.hbm_free = 0.0
        self.counts: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self._unknown_branches: Counter[int] = Counter()
        self._addresses = {
            address: index
            for index in scalars
            for address in _addresses_of(operand_address(index, is_output=False))
        }

    # --- Called by generated code ---

    def scalar(self, index: int) -> Value:
        """The value of a scalar operand."""
        value = self.scalars.get(index)
        return UNKNOWN if value is None or value.size == 0 else int(value.reshape(-1)[0])

    def holds(self, predicate: Value) -> bool:
        """Whether a predicate holds; one that is not known is taken to."""
        if predicate is UNKNOWN:
            self.warnings["predicate that depends on data"] += 1
            return True
        return bool(predicate)

    def branch(self, position: int, predicate: Value, backward: bool) -> bool:
        """Whether a branch is taken; a loop whose end is not known runs twice."""
        if predicate is not UNKNOWN:
            return bool(predicate)
        if not backward:
            self.warnings["branch that depends on data"] += 1
            return False
        self.warnings[UNKNOWN_LOOP] += 1
        self._unknown_branches[position] += 1
        return self._unknown_branches[position] % 2 == 1

    def signal(self, t: float, semaphore: Value, amount: Value) -> None:
        """Add to a semaphore, or take from it what has arrived first."""
        if semaphore is UNKNOWN or amount is UNKNOWN:
            return
        queue = self._semaphore(semaphore)
        if amount >= 0:
            queue.append((t, amount))
            return
        needed = -amount
        while needed > 0 and queue:
            since, available = queue[0]
            if available <= needed:
                queue.popleft()
                needed -= available
            else:
                queue[0] = (since, available - needed)
                needed = 0
        if needed > 0:
            self.warnings["semaphore below zero"] += 1

    def wait(self, t: float, semaphore: Value, amount: Value) -> float:
        """The time at which a semaphore has counted enough."""
        if semaphore is UNKNOWN or amount is UNKNOWN:
            self.warnings["wait that depends on data"] += 1
            return t
        total = 0
        for arrival, counted in self._semaphore(semaphore):
            total += counted
            if total >= amount:
                if arrival <= t:
                    return t
                self.counts["dma_stall"] += arrival - t  # type: ignore[assignment]
                self.recorder.waits.add((t, arrival))
                return arrival
        self.warnings["wait for a copy that was never started"] += 1
        return t

    def copy(
        self,
        t: float,
        source: str,
        target: str,
        source_address: Value,
        granules: Value,
        target_address: Value,
        semaphore: Value,
    ) -> None:
        """Start a copy; its semaphore counts its granules when it is done."""
        if granules is UNKNOWN:
            self.warnings["copy of unknown size"] += 1
            return
        size = granules * self.speed.granule_bytes
        direction = f"{source}->{target}"
        self.counts[direction] += size
        if target == "smem":
            self._fill_smem(source_address, target_address)
        if "hbm" in (source, target):
            start = max(t, self.hbm_free)
            duration = size / self.speed.hbm_bytes_per_cycle
            self.hbm_free = start + duration
            self.counts["hbm_busy"] += duration
            self.counts["hbm_bytes"] += size
            done = self.hbm_free + self.speed.hbm_latency
        else:
            start = t
            done = t + _ON_CHIP_LATENCY + size / _ON_CHIP_BYTES_PER_CYCLE
        self.recorder.transfers.add((direction, t, start, done, size))
        if semaphore is not UNKNOWN:
            self._semaphore(semaphore).append((done, granules))

    def call(self, t: float, name: str) -> float:
        """Run another HLO; returns when it is done."""
        self.counts[CALL + name] += 1
        cost = self.call_costs.get(name)
        if cost is None:
            return t
        self.hbm_free = max(self.hbm_free, t) + cost.hbm_busy
        return t + cost.cycles

    # --- Called by the simulator ---

    def advance(self, cycles: float) -> None:
        """Move the clock and everything that is on its way, as if the same had happened again."""
        self.t += cycles
        self.hbm_free += cycles
        for queue in self.semaphores.values():
            for position, (arrival, amount) in enumerate(queue):
                queue[position] = (arrival + cycles, amount)

    def pending(self) -> tuple[tuple[Value, int], ...]:
        """What each semaphore has counted or will count, whatever the time."""
        totals = ((name, sum(n for _, n in queue)) for name, queue in self.semaphores.items())
        return tuple(sorted((name, total) for name, total in totals if total))

    def backlog(self) -> list[float]:
        """Cycles until HBM is free, and until each copy on its way arrives."""
        ahead = [self.hbm_free - self.t]
        for _, queue in sorted(self.semaphores.items()):
            ahead.extend(arrival - self.t for arrival, _ in queue)
        return [max(cycles, 0.0) for cycles in ahead]

    def _semaphore(self, name: Value) -> deque[tuple[float, int]]:
        queue = self.semaphores.get(name)
        if queue is None:
            queue = self.semaphores[name] = deque()
        return queue

    def _fill_smem(self, source: Value, target: Value) -> None:
        index = self._addresses.get(source) if source is not UNKNOWN else None
        if index is None or target is UNKNOWN:
            self.warnings["scalars that are not known"] += 1
            return
        values = self.scalars[index].reshape(-1).tolist()
        self.smem.update(zip(range(target, target + len(values)), map(int, values), strict=True))


def _addresses_of(address: int) -> tuple[int, int]:
    return address, s32(address << _POINTER_SHIFT)
