"""Trying candidates on this machine's CPU: run, compare with the reference, time, choose.

The programs run in worker processes with the Pallas interpreter. Their times say nothing about a
TPU; they tell working configs from broken ones, and rank pure JAX kernels on the CPU itself.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpu_kernels.compiler.pool import Job, Workers
from tpu_kernels.dsl import dtypes
from tpu_kernels.errors import TuningError
from tpu_kernels.tuning import child, compare
from tpu_kernels.tuning.activity import Activity, Stage
from tpu_kernels.tuning.candidates import Candidate, call_job, failure_row, lost_row
from tpu_kernels.tuning.compiled import Found
from tpu_kernels.tuning.report import TuneRow
from tpu_kernels.tuning.selection import Selection, select

_ROUGH_SAMPLES = 3
_CLOSE = 1.5  # candidates within this factor of the best are timed again, in rounds
_FINALISTS = 8
_SAMPLES_EACH = 40
_FINAL_S = 20.0


@dataclass(frozen=True)
class _Sent:
    """A candidate as the workers know it."""

    candidate: Candidate
    function: Callable[..., Any]
    name: str


def choose(
    rows: Mapping[int, TuneRow],
    default: int | None,
    sample: Callable[[int], float],
    *,
    deadline: float,
    close: float = _CLOSE,
    watch: Callable[[Activity], None] | None = None,
) -> tuple[int, Selection, dict[int, TuneRow]]:
    """Time the best candidates in rounds, and choose.

    Args:
        rows: Rows of the candidates that work, by index; at least one.
        default: Index of the config in force, kept in doubt.
        sample: Times a candidate once, in µs.
        deadline: When to stop (`time.monotonic`).
        close: Those within this factor of the best are timed.
        watch: Told what is running.

    Returns:
        Index of the choice, the selection with its figures, and the rows that have new times.
    """
    ranked = sorted(rows, key=lambda index: rows[index].rank)
    finalists = [i for i in ranked if rows[i].rank <= close * rows[ranked[0]].rank]
    finalists = finalists[:_FINALISTS]
    start = default if default is not None and default in rows else finalists[0]
    if start not in finalists:
        finalists.append(start)
    if watch is not None:
        watch(Activity("timing", tuple(rows[index].config for index in finalists)))
    selection = select(
        [{"index": index} for index in finalists],
        default={"index": start},
        measure=lambda config: sample(config["index"]),
        budget=_SAMPLES_EACH * len(finalists) if len(finalists) > 1 else _ROUGH_SAMPLES,
        budget_s=min(_FINAL_S, max(0.0, deadline - time.monotonic())),
    )
    again = {}
    for figures in selection.samples:
        index = figures.config["index"]
        if figures.samples:
            again[index] = replace(
                rows[index],
                time_us=figures.median_us,
                figures={
                    **rows[index].figures,
                    "spread_us": figures.spread_us,
                    "samples": figures.samples,
                },
            )
    return selection.config["index"], selection, again


class WallSearch:
    """Candidates of one call on the CPU.

    Args:
        candidates: The candidates; they share their tensors.
        wanted: The reference's outputs, None to compare nothing.
        usual: See `compare.change`.
        pool: Workers to use.
        watch: Told what is running.
        tolerance: See `compare.difference`.
        timeout_s: Seconds for one candidate.
        deadline: When to stop (`time.monotonic`).

    A context manager: on leaving, its files are removed.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        wanted: Sequence[torch.Tensor] | None,
        *,
        usual: Sequence[torch.Tensor] | None = None,
        pool: Workers,
        watch: Callable[[Activity], None] | None = None,
        tolerance: float | None = None,
        timeout_s: float,
        deadline: float,
    ) -> None:
        self._wanted = wanted
        self._usual = usual
        self._tolerance = tolerance
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._pool = pool
        self._watch = watch
        self._folder = tempfile.TemporaryDirectory(prefix="tpu_kernels-tuning-")
        self._inputs = str(Path(self._folder.name) / "inputs.pickle")
        self._sent = [_Sent(c, c.function(interpret=True), f"c{c.index}") for c in candidates]
        tensors = candidates[0].bound.tensors if candidates else ()
        values = [dtypes.to_numpy(tensor) for tensor in tensors]
        Path(self._inputs).write_bytes(pickle.dumps(values))

    def __enter__(self) -> WallSearch:
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.cleanup()

    def try_all(self, found: Found) -> None:
        """Run every candidate once, compare its result, and time it roughly."""
        jobs: list[Job] = []
        tried: list[_Sent] = []
        for sent in self._sent:
            if time.monotonic() >= self._deadline:
                skipped = TuneRow(sent.candidate.config, "skipped", "the time budget had ended")
                found(sent.candidate.index, skipped)
                continue
            job = self._job(child.trial, sent, _ROUGH_SAMPLES)
            if job is None:
                reason = (
                    "the kernel cannot be sent to a worker process: it holds what has no pickle"
                )
                found(sent.candidate.index, TuneRow(sent.candidate.config, "error", reason))
                continue
            jobs.append(job)
            tried.append(sent)
        stage = Stage("running", [sent.candidate for sent in tried], self._watch)
        with closing(self._pool.run_all(jobs, stage.started)) as outcomes:
            for position, outcome in outcomes:
                stage.ended(position)
                candidate = tried[position].candidate
                row = lost_row(candidate.config, outcome, self._timeout_s)
                if row is None:
                    row = replace(self._judge(candidate, outcome.value), seconds=outcome.seconds)
                found(candidate.index, row)

    def choose(
        self, rows: Mapping[int, TuneRow], default: int | None
    ) -> tuple[int, Selection, dict[int, TuneRow]]:
        """Time the best candidates again, in rounds, and choose.

        Args:
            rows: Rows of the candidates that work, by index; at least one.
            default: Index of the config in force, kept in doubt.

        Returns:
            Index of the choice, the selection with its figures, and the rows that have new times.
        """
        jobs: dict[int, Job | None] = {}
        by_index = {sent.candidate.index: sent for sent in self._sent}

        def sample(index: int) -> float:
            # Packed once: pickling a kernel costs more than a sample of it.
            if index not in jobs:
                jobs[index] = self._job(child.sample, by_index[index], 1)
            return self._time(jobs[index])

        return choose(rows, default, sample, deadline=self._deadline, watch=self._watch)

    def _job(self, function: Callable[..., Any], sent: _Sent, samples: int) -> Job | None:
        arguments = (sent.function, self._inputs, sent.name, samples)
        return call_job(function, arguments, self._timeout_s, files=(self._inputs,))

    def _time(self, job: Job | None) -> float:
        if job is None:
            raise TuningError("the kernel cannot be sent to a worker process")
        outcome = self._pool.run(job)
        row = lost_row({}, outcome, self._timeout_s)
        if row is not None:
            raise TuningError(f"timing failed: {row.status}: {row.reason}")
        if isinstance(outcome.value, child.Failure):
            raise TuningError(f"timing failed: {outcome.value.type}: {outcome.value.message}")
        return float(outcome.value[0])

    def _judge(self, candidate: Candidate, answer: child.Trial | child.Failure) -> TuneRow:
        if isinstance(answer, child.Failure):
            return failure_row(candidate.config, answer, None)
        got = [dtypes.from_bytes(*packed) for packed in answer.outputs]
        reason = compare.change(got, self._usual)
        if reason is None and self._wanted is not None:
            reason = compare.difference(got, self._wanted, self._tolerance)
        if reason is not None:
            return TuneRow(candidate.config, "wrong", reason)
        return TuneRow(candidate.config, "ok", time_us=statistics.median(answer.times_us))
