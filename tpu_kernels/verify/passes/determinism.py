"""Pass "determinism": two runs agree to the bit, also with parallel axes in another order."""

from __future__ import annotations

from tpu_kernels.verify.passes.edges import differing
from tpu_kernels.verify.passes.interpreter import interpreted, unsuitable
from tpu_kernels.verify.passes.isolated import Lost, lost, run_isolated, tpu_runs
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed

NAME = "determinism"
_SEEDS = (1, 2, 3)


def run(subject: Subject) -> CheckRow:
    """Run the TPU interpreter with several orders of the parallel axes, and compare."""
    reason = unsuitable(subject)
    if reason is not None:
        return CheckRow(NAME, "skipped", reason)
    runs = [interpreted(subject, random_seed=seed) for seed in _SEEDS]
    found = run_isolated(tpu_runs, (runs, subject.arrays), subject.timeout_s)
    if isinstance(found, Lost):
        return lost(NAME, found, subject)
    for outcome in found:
        if outcome.error is not None:
            line = next(line for line in outcome.error.splitlines() if line.strip())
            what = f"the interpreter raised {outcome.error_type}: {line}"
            return failed(NAME, what, outcome.place or subject.call_place)
    difference = differing(found)
    if difference is None:
        return CheckRow(NAME, "ok", f"{len(_SEEDS)} runs with parallel axes shuffled are equal")
    output, element = difference
    what = f"output {output} changes with the order of the parallel axes, at element {element}"
    hint = 'declare the axes that carry state "arbitrary" in dimension_semantics'
    return failed(NAME, what, subject.call_place, hint)
