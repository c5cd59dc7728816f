"""Passes "races", "bounds" and "nan": the TPU interpreter, which simulates memories and copies."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from tpu_kernels.verify.passes.edges import differing
from tpu_kernels.verify.passes.isolated import Lost, Outcome, lost, run_isolated, tpu_runs
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed, guarded

PASSES = ("races", "bounds", "nan")
_MOST_STEPS = 2048  # a step costs about a millisecond
_MOST_BYTES = 256 << 20
_OUT_OF_BOUNDS = re.compile(r"Out-of-bounds [^\n]*|[^\n]*[Oo]ut of bounds[^\n]*")
_REVISITED = re.compile(r"Revisited block [^\n]*")
_SEMAPHORE = re.compile(r"Semaphore \d+ has non-zero count[^\n]*")
_PAIRS = "every start() of a copy needs its wait(), every signal its wait"
_RACE_LINE = re.compile(r"(?P<file>/[^\s:]+\.py):(?P<line>\d+)")


def run(subject: Subject, names: Sequence[str]) -> dict[str, CheckRow]:
    """Run the passes among `names`, sharing runs of the interpreter.

    Args:
        subject: What to check.
        names: Names of `PASSES`.

    Returns:
        A row for each.
    """
    started = time.perf_counter()
    reason = unsuitable(subject)
    if reason is not None:
        return {name: CheckRow(name, "skipped", reason) for name in names}
    modes: dict[str, dict[str, Any]] = {}
    if "races" in names or "bounds" in names:
        bounds = "raise" if "bounds" in names else "uninitialized"
        modes["strict"] = {"detect_races": "races" in names, "out_of_bounds_reads": bounds}
    if "nan" in names or "bounds" in names:
        modes["nan"] = {"out_of_bounds_reads": "uninitialized"}
    if "nan" in names:
        zero = {"uninitialized_memory": "zero"}
        modes["zero"] = {"out_of_bounds_reads": "uninitialized", **zero}
    if "races" in names and subject.copy_starts:
        # A copy that nobody waits for never happens in the other runs, so leaves no trace there.
        modes["eager"] = {"dma_execution_mode": "eager", "out_of_bounds_reads": "uninitialized"}
    runs = [interpreted(subject, **mode) for mode in modes.values()]
    found = run_isolated(tpu_runs, (runs, subject.arrays), subject.timeout_s)
    if isinstance(found, Lost):
        row = lost(names[0], found, subject)
        return {name: dataclasses.replace(row, name=name) for name in names}
    outcomes = dict(zip(modes, found, strict=True))
    judges: dict[str, Callable[[], CheckRow]] = {
        "races": lambda: _races(subject, outcomes),
        "bounds": lambda: _bounds(subject, outcomes),
        "nan": lambda: _nan(subject, outcomes),
    }
    seconds = (time.perf_counter() - started) / len(names)
    rows = {name: guarded(name, judges[name]) for name in names}
    return {name: dataclasses.replace(row, seconds=seconds) for name, row in rows.items()}


def unsuitable(subject: Subject) -> str | None:
    """Why the TPU interpreter is not run, None if it can be."""
    if not subject.calls:
        return "the program calls no Pallas kernel"
    steps = sum(math.prod(size or 1 for size in call.grid) for call in subject.calls)
    if steps > _MOST_STEPS:
        return f"{steps} grid steps take too long in the interpreter: pass smaller arguments"
    size = sum(array.nbytes for array in subject.arrays)
    if size > _MOST_BYTES:
        return f"{size >> 20} MiB of arguments are too much for it: pass smaller ones"
    return None


def interpreted(subject: Subject, **parameters: Any) -> Callable[..., Any]:
    """The program with the TPU interpreter's parameters."""
    from jax.experimental.pallas import tpu as pltpu

    if subject.bound is not None and subject.bound.kernel.spec.language == "helion":
        # Its pipelines copy whole tiles; on a TPU, arrays in HBM are padded to tiles.
        parameters = {"buffer_bounds": "padded", **parameters}
    return subject.interpreted(pltpu.InterpretParams(**parameters))


def _races(subject: Subject, outcomes: dict[str, Outcome]) -> CheckRow:
    outcome = outcomes["strict"]
    leak = _SEMAPHORE.search(outcome.printed)
    eager = outcomes.get("eager")
    unwaited = None if eager is None else _SEMAPHORE.search(eager.printed)
    if outcome.raced:
        report = outcome.printed.partition("RACE DETECTED")[2].strip().splitlines()
        told = [line.strip() for line in report if line.strip() and "clock:" not in line][:2]
        what = "\n".join(["data race: two accesses that nothing orders", *told])
        hint = "wait for the copy (.wait()) before its source or destination is used again"
        return failed("races", what, _first_place("\n".join(told)) or subject.call_place, hint)
    if leak is not None:
        return failed("races", f"semaphore leak: {leak[0]}", subject.call_place, _PAIRS)
    if unwaited is not None:
        what = f"a copy is started and never waited for: {unwaited[0]}"
        return failed("races", what, _only(subject.copy_starts) or subject.call_place, _PAIRS)
    stopped = _stopped("races", subject, outcome)
    return stopped or CheckRow("races", "ok", "no data race, no semaphore left signalled")


def _bounds(subject: Subject, outcomes: dict[str, Outcome]) -> CheckRow:
    for outcome in outcomes.values():
        message = _OUT_OF_BOUNDS.search(outcome.error or "")
        if message is not None:
            where = outcome.place or subject.call_place
            return failed("bounds", message[0], where, "clamp or mask the index")
    stopped = _stopped("bounds", subject, outcomes["strict"])
    return stopped or CheckRow("bounds", "ok", "every read and write lies inside its buffer")


def _nan(subject: Subject, outcomes: dict[str, Outcome]) -> CheckRow:
    strict = outcomes.get("strict")
    if strict is not None and _OUT_OF_BOUNDS.search(strict.error or ""):
        return CheckRow(
            "nan", "skipped", "what lies out of bounds is never written (pass 'bounds')"
        )
    filled, zero = outcomes["nan"], outcomes["zero"]
    stopped = _stopped("nan", subject, filled) or _stopped("nan", subject, zero)
    if stopped is not None:
        return stopped
    difference = differing([filled, zero])
    if difference is None:
        return CheckRow("nan", "ok", "no result depends on uninitialised memory")
    output, element = difference
    what = (
        f"output {output} depends on memory that was never written, such as element {element}: it "
        "changes with what fresh buffers hold"
    )
    ragged = any(block.leftovers for call in subject.calls for block in call.inputs)
    hint = "write every element of an output or scratch buffer before it is read"
    if ragged:
        hint += "; blocks overhang an array here, so pass 'edges' tells whether that is the cause"
    return failed("nan", what, subject.call_place, hint)


def _stopped(name: str, subject: Subject, outcome: Outcome) -> CheckRow | None:
    """A row where the interpreter gave up before the end, None if it did not."""
    if outcome.error is None:
        return None
    if _OUT_OF_BOUNDS.search(outcome.error):
        return CheckRow(name, "skipped", "the run stops at an access out of bounds (pass 'bounds')")
    revisited = _REVISITED.search(outcome.error)
    if revisited is not None:
        return CheckRow(name, "skipped", f"the run stops (pass 'grid'): {revisited[0]}")
    first = next(line for line in outcome.error.splitlines() if line.strip())
    if outcome.error_type == "NotImplementedError":
        return CheckRow(name, "unavailable", f"the interpreter cannot run this kernel: {first}")
    what = f"the interpreter raised {outcome.error_type}: {first}"
    return failed(name, what, outcome.place or subject.call_place)


def _only(places: Sequence[str | None]) -> str | None:
    return places[0] if len(set(places)) == 1 else None


def _first_place(text: str) -> str | None:
    match = _RACE_LINE.search(text)
    return None if match is None else f"{match['file']}:{match['line']}"
