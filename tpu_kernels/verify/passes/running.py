"""The passes that run the kernel: which of them share a run, and what keeps them from running."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from tpu_kernels.verify.passes import (
    determinism,
    edges,
    gradients,
    interpreter,
    isolated,
    numerics,
    operator,
)
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed_with, guarded

INTERPRETED = interpreter.PASSES
_SINGLE: dict[str, Callable[[Subject], CheckRow]] = {
    "op": operator.run,
    "numerics": numerics.run,
    "grad": gradients.run,
    "edges": edges.run,
    "determinism": determinism.run,
}
PASSES = (*_SINGLE, *INTERPRETED)
_HERE = ("op", "numerics", "grad")


def run(names: Sequence[str], subject: Subject) -> Iterator[CheckRow]:
    """Run passes.

    Args:
        names: Names of `PASSES`.
        subject: What to check.

    Yields:
        One row per pass, in the order of the names.
    """
    if not names:
        return
    blocked = _blocked(names[0], subject)
    if blocked is not None:
        yield blocked
        for name in names[1:]:
            yield CheckRow(name, "skipped", f"the kernel cannot be run: see {names[0]!r}")
        return
    # First what runs in a process of its own: what ends that one would end this one, or hang it.
    wanted = [each for each in names if each in INTERPRETED]
    shared = interpreter.run(subject, wanted) if wanted else {}
    lost = next((name for name, row in shared.items() if row.what.startswith(isolated.ENDED)), None)
    for name in names:
        started = time.perf_counter()
        if name in shared:
            yield shared[name]
            continue
        if lost is not None and name in _HERE:
            yield CheckRow(name, "skipped", f"it would run in this process: see {lost!r}")
            continue
        single = _SINGLE[name]
        row = guarded(name, functools.partial(single, subject))
        yield dataclasses.replace(row, seconds=time.perf_counter() - started)


def _blocked(name: str, subject: Subject) -> CheckRow | None:
    """The first pass's row where the kernel cannot be run at all, None if it can."""
    reason = subject.valueless
    if reason is not None:
        return CheckRow(name, "unavailable", reason)
    try:
        _ = subject.jaxpr
    except Exception as error:  # whatever the author's code raises is a finding
        return failed_with(name, "tracing the kernel", error, subject.where)
    return None
