"""Run the scalar program of a kernel and count what it costs.

One cycle per bundle, more where an MXU is still busy, and what is lost in waiting for copies:
loops, branches, copies and semaphores are executed, so that trip counts, skipped blocks, pipelining
and its ends need no formula.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpu_kernels.compiler.cost.listing import Listing
from tpu_kernels.compiler.cost.loops import LoopSkipper
from tpu_kernels.compiler.cost.machine import CALL, CallCost, Machine, Speed
from tpu_kernels.compiler.cost.timeline import Timeline
from tpu_kernels.compiler.cost.translate import Block, Translation, translate
from tpu_kernels.compiler.cost.values import NAMESPACE, UNKNOWN

_MAX_VISITS = 20_000_000
_CLOCK_CHECK = 8192  # visits between two looks at the wall clock

BlockFunction = Callable[[list[Any], Machine], int]


@dataclass(frozen=True)
class Simulation:
    """What running a kernel costs.

    Attributes:
        cycles: Length in cycles.
        bundles: Bundles issued.
        static_bundles: Bundles in the code.
        mxu_busy: Cycles that the busiest MXU of each block was busy.
        mxu_excess: Cycles by which the busiest MXU exceeded the bundles of its block.
        dma_stall: Cycles spent in waiting for copies.
        hbm_bytes: Bytes moved to or from HBM.
        hbm_busy: Cycles that HBM was moving them.
        copied: Bytes by direction, such as ``"hbm->vmem"``.
        counts: Instructions executed, by unit.
        visits: Executions of each block, by first bundle.
        calls: Calls of other HLOs, by name.
        hottest: The block that takes the most cycles in all.
        warnings: What had to be guessed, counted.
        complete: Whether the kernel ran to its end.
        skipped: Visits that were extrapolated instead of run.
        timeline: Its first and last steps, None if it does not loop.
    """

    cycles: float
    bundles: int
    static_bundles: int
    mxu_busy: int
    mxu_excess: int
    dma_stall: float
    hbm_bytes: int
    hbm_busy: float
    copied: Mapping[str, int]
    counts: Mapping[str, int]
    visits: Mapping[int, int]
    calls: Mapping[str, int]
    hottest: Block
    warnings: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True
    skipped: int = 0
    timeline: Timeline | None = None


def simulate(
    listing: Listing,
    speed: Speed,
    *,
    delay_slots: int | tuple[int, int],
    vmatmul_cycles: Mapping[str, int],
    scalars: Mapping[int, np.ndarray] | None = None,
    calls: Mapping[str, CallCost] | None = None,
    limit_s: float = 60.0,
    extrapolate: bool = True,
) -> Simulation:
    """Run a kernel.

    Args:
        listing: Its generated code.
        speed: Speed of copies.
        delay_slots: Bundles after a branch that are still executed; a pair where it depends on
            the branch's region, the least and the most.
        vmatmul_cycles: Cycles that one matrix instruction keeps its MXU busy, by class of operands.
        scalars: Integer operands that steer it, by operand number.
        calls: What the HLOs that it calls cost, by name.
        limit_s: Seconds after which the run is given up.
        extrapolate: Whether long uniform loops may be skipped through.

    Returns:
        The costs.
    """
    program = translate(listing, delay_slots, vmatmul_cycles)
    functions = _load(program)
    machine = Machine(speed, scalars or {}, calls)
    registers: list[Any] = [UNKNOWN] * (program.registers + 1)
    visits: Counter[int] = Counter()
    skipper = LoopSkipper(program, machine, registers, visits) if extrapolate else None
    position, steps, complete = 0, 0, True
    started = time.monotonic()
    while position >= 0:
        visits[position] += 1
        steps += 1
        following = functions[position](registers, machine)
        if 0 <= following <= position:
            machine.recorder.loop(following, position, machine.t, visits[following])
        if skipper is not None:
            skipper.step(position, following)
        position = following
        if steps % _CLOCK_CHECK == 0 and (
            steps > _MAX_VISITS or time.monotonic() - started > limit_s
        ):
            machine.warnings["given up before its end"] += 1
            complete = False
            break
    return _summary(program, machine, visits, complete, skipper.skipped if skipper else 0)


def _load(program: Translation) -> dict[int, BlockFunction]:
    source = "\n".join(block.source for block in program.blocks.values())
    namespace = dict(NAMESPACE)
    exec(compile(source, "<blocks>", "exec"), namespace)
    return {first: namespace[f"B{first}"] for first in program.blocks}


def _summary(
    program: Translation, machine: Machine, visits: Counter[int], complete: bool, skipped: int
) -> Simulation:
    counts: Counter[str] = Counter()
    bundles = mxu_busy = mxu_excess = 0
    weight = {}
    for first, times in visits.items():
        block = program.blocks[first]
        bundles += times * block.bundles
        mxu_busy += times * block.mxu_busy
        mxu_excess += times * block.mxu_excess
        weight[first] = times * block.cycles
        for unit, number in block.counts.items():
            counts[unit] += times * number
    hottest = max(weight, key=lambda first: weight[first])
    return Simulation(
        cycles=machine.t,
        bundles=bundles,
        static_bundles=sum(block.bundles for block in program.blocks.values()),
        mxu_busy=mxu_busy,
        mxu_excess=mxu_excess,
        dma_stall=machine.counts["dma_stall"],
        hbm_bytes=machine.counts["hbm_bytes"],
        hbm_busy=machine.counts["hbm_busy"],
        copied={
            name: size
            for name, size in machine.counts.items()
            if "->" in name and not name.startswith(CALL)
        },
        counts=dict(counts),
        visits=dict(visits),
        calls={
            name.removeprefix(CALL): times
            for name, times in machine.counts.items()
            if name.startswith(CALL)
        },
        hottest=program.blocks[hottest],
        warnings=dict(program.warnings + machine.warnings),
        complete=complete,
        skipped=skipped,
        timeline=machine.recorder.timeline(machine.t, visits),
    )
