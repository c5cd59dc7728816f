"""Trying candidates with the TPU compiler: inspect, leave out what cannot fit, compile, rank.

Every candidate is traced, lowered and compiled in worker processes. What the grid and blocks show
to be too large for VMEM is not compiled (the compiler may need minutes to refuse it), nor is what
asks for more than a candidate that ran out of VMEM; identical programs are compiled once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.compile import Request, compile_all
from tpu_kernels.compiler.pool import Workers
from tpu_kernels.compiler.report import CompileReport
from tpu_kernels.tuning import child, search
from tpu_kernels.tuning.activity import Activity, Stage
from tpu_kernels.tuning.candidates import Candidate, call_job, failure_row, lost_row, one_line
from tpu_kernels.tuning.objective import Evidence, Objective, Roofline
from tpu_kernels.tuning.report import TuneRow, config_text

_EXHAUSTIVE = 16  # in a small space everything is compiled, so that the report is complete

Found = Callable[[int, TuneRow], None]
"""Called with index and row as soon as the fate of a candidate is known."""


@dataclass
class Memory:
    """What batches of candidates that are tried one after the other learn from each other.

    Attributes:
        programs: Index of the first candidate of each program, by the program's digest.
        rows: Its row, by index.
        too_large: Config and VMEM limits of candidates that did not fit.
        best: The best figure so far.
        results: What the config in force gives, once that is known.
    """

    programs: dict[str, int] = field(default_factory=dict)
    rows: dict[int, TuneRow] = field(default_factory=dict)
    too_large: list[tuple[Mapping[str, Any], tuple[int | None, ...]]] = field(default_factory=list)
    best: float = math.inf
    results: tuple[str, ...] | None = None


def try_candidates(
    candidates: Sequence[Candidate],
    target: Target,
    objective: Objective,
    found: Found,
    *,
    pool: Workers,
    watch: Callable[[Activity], None] | None = None,
    first: int | None = None,
    timeout_s: float,
    deadline: float,
    compiler: bool = True,
    memory: Memory | None = None,
    prune: bool | None = None,
) -> None:
    """Find the fate of every candidate.

    Args:
        candidates: The candidates.
        target: The chip.
        objective: Gives the figure of those that compile.
        found: Receives the rows.
        pool: Who traces and compiles.
        watch: Told what is running.
        first: Index of the config in force now.
        timeout_s: Seconds for one candidate.
        deadline: When to stop (`time.monotonic`); what is not tried by then is ``"skipped"``.
        compiler: Whether to compile; otherwise figures come from the grid alone.
        memory: What earlier batches of the same search found; it learns from this one.
        prune: Whether to leave out what cannot win; by default in spaces of more than 16.
    """
    memory = memory if memory is not None else Memory()
    inspections = _inspect(candidates, target, found, pool, watch, timeout_s, deadline)
    if first in inspections:
        memory.results = inspections[first].results
    alike = _without_changes(candidates, inspections, memory.results, found)
    fitting = _without_overflows(alike, inspections, target, found)
    unique, copies = _without_copies(fitting, inspections, memory)

    def all_found(index: int, row: TuneRow) -> None:
        found(index, row)
        memory.rows[index] = row
        for copy in copies.pop(index, ()):
            text = f"same program as {config_text(row.config)}"
            reason = f"{text}: {row.reason}" if row.reason else text
            found(copy.index, replace(row, config=copy.config, reason=reason, same_as=index))

    for index in [index for index in copies if index in memory.rows]:
        all_found(index, memory.rows[index])

    if compiler:
        queue = _queue(unique, inspections, target, first)
        wanted = len(queue) > _EXHAUSTIVE if prune is None else prune
        spared = _Spared(inspections, target, objective, memory, prune=wanted)
        _compile(queue, inspections, spared, all_found, pool, watch, timeout_s, deadline)
    else:
        for candidate in unique:
            evidence = Evidence(target.chip, inspections[candidate.index].models)
            all_found(candidate.index, _ok_row(candidate, evidence, objective))


def _inspect(
    candidates: Sequence[Candidate],
    target: Target,
    found: Found,
    pool: Workers,
    watch: Callable[[Activity], None] | None,
    timeout_s: float,
    deadline: float,
) -> dict[int, child.Inspection]:
    """Trace and lower the candidates in workers; what fails becomes a row."""
    inspections: dict[int, child.Inspection] = {}
    packed, jobs = [], []

    def take(candidate: Candidate, answer: Any, seconds: float) -> None:
        if isinstance(answer, child.Inspection):
            inspections[candidate.index] = answer
        else:
            row = failure_row(candidate.config, answer, target)
            found(candidate.index, replace(row, seconds=seconds))

    limit = min(timeout_s, max(1.0, deadline - time.monotonic()))
    for candidate in candidates:
        function = candidate.function(interpret=False, target=target.chip.name)
        arguments = (function, candidate.bound.avals, target.name)
        job = call_job(child.inspect, arguments, limit)
        if job is not None:
            packed.append(candidate)
            jobs.append(job)
            continue
        # Something in it cannot be sent to a worker; tracing here is all that is left.
        started = time.monotonic()
        take(candidate, child.inspect(*arguments), time.monotonic() - started)
    # Closed at once when `found` raises (Ctrl-C): running candidates must not outlive the search.
    stage = Stage("tracing", packed, watch)
    with closing(pool.run_all(jobs, stage.started)) as outcomes:
        for position, outcome in outcomes:
            stage.ended(position)
            candidate = packed[position]
            if (row := lost_row(candidate.config, outcome, limit)) is not None:
                found(candidate.index, row)
            else:
                take(candidate, outcome.value, outcome.seconds)
    return inspections


def _without_changes(
    candidates: Sequence[Candidate],
    inspections: Mapping[int, child.Inspection],
    usual: tuple[str, ...] | None,
    found: Found,
) -> list[Candidate]:
    """Those that give what the config in force gives; see `compare.change`."""
    alike = []
    for candidate in candidates:
        inspection = inspections.get(candidate.index)
        if inspection is None or usual is None or inspection.results == usual:
            alike.append(candidate)
            continue
        pairs = zip_longest(inspection.results, usual, fillvalue="nothing")
        index, (got, wanted) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        reason = f"output {index}: {got}, the config in force gives {wanted}"
        found(candidate.index, TuneRow(candidate.config, "wrong", reason))
    return alike


def _without_overflows(
    candidates: Sequence[Candidate],
    inspections: Mapping[int, child.Inspection],
    target: Target,
    found: Found,
) -> list[Candidate]:
    fitting = []
    for candidate in candidates:
        if candidate.index not in inspections:
            continue
        models = inspections[candidate.index].models
        overflow = next(filter(None, (model.overflow(target.chip) for model in models)), None)
        if overflow is None:
            fitting.append(candidate)
        else:
            found(candidate.index, TuneRow(candidate.config, "vmem", overflow))
    return fitting


def _without_copies(
    candidates: Sequence[Candidate], inspections: Mapping[int, child.Inspection], memory: Memory
) -> tuple[list[Candidate], dict[int, list[Candidate]]]:
    """Separate the first candidate of each program from those with the identical program."""
    unique: list[Candidate] = []
    copies: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        index = memory.programs.setdefault(inspections[candidate.index].digest, candidate.index)
        if index == candidate.index:
            unique.append(candidate)
        else:
            copies.setdefault(index, []).append(candidate)
    return unique, copies


def _queue(
    candidates: Sequence[Candidate],
    inspections: Mapping[int, child.Inspection],
    target: Target,
    first: int | None,
) -> list[Candidate]:
    costs: dict[int, float] = {}
    place = None
    for position, candidate in enumerate(candidates):
        evidence = Evidence(target.chip, inspections[candidate.index].models)
        figure = Roofline().figure(evidence)
        if figure is not None:
            costs[position] = figure
        if candidate.index == first:
            place = position
    return [candidates[i] for i in search.order(len(candidates), costs, place)]


def _compile(
    queue: Sequence[Candidate],
    inspections: Mapping[int, child.Inspection],
    spared: _Spared,
    found: Found,
    pool: Workers,
    watch: Callable[[Activity], None] | None,
    timeout_s: float,
    deadline: float,
) -> None:
    """Compile in small batches: a failure can spare larger candidates, and the budget holds."""
    waiting = list(queue)
    while waiting:
        batch, waiting = waiting[: 2 * pool.max_workers], waiting[2 * pool.max_workers :]
        rows = _compile_batch(batch, inspections, spared, pool, watch, timeout_s, deadline)
        with closing(rows):
            for candidate, row in rows:
                found(candidate.index, row)
                spared.learn(candidate, row)


class _Spared:
    """What the fates of earlier candidates spare us to compile."""

    def __init__(
        self,
        inspections: Mapping[int, child.Inspection],
        target: Target,
        objective: Objective,
        memory: Memory,
        *,
        prune: bool,
    ) -> None:
        self._inspections = inspections
        self.target = target
        self.objective = objective
        self._memory = memory
        self._prune = prune

    def learn(self, candidate: Candidate, row: TuneRow) -> None:
        """Take in the fate of a candidate."""
        if row.status == "vmem":
            self._memory.too_large.append((candidate.config, self._limits(candidate)))
        if row.ok and row.cost is not None:
            self._memory.best = min(self._memory.best, row.cost)

    def row(self, candidate: Candidate) -> TuneRow | None:
        """The row of a candidate that need not be compiled, None for one that has to be."""
        # A kernel may ask for more VMEM with larger blocks; only equal limits can be compared.
        limits = self._limits(candidate)
        failed = [config for config, of in self._memory.too_large if of == limits]
        if (smaller := search.dominated(candidate.config, failed)) is not None:
            reason = f"not tried: asks for no less than {config_text(smaller)}, which did not fit"
            return TuneRow(candidate.config, "vmem", reason)
        if not self._prune:
            return None
        models = self._inspections[candidate.index].models
        floor, best = (
            self.objective.lower_bound(Evidence(self.target.chip, models)),
            self._memory.best,
        )
        if floor is None or floor <= best:
            return None
        reason = f"cannot be better: takes at least {floor:.4g} µs, the best {best:.4g}"
        return TuneRow(candidate.config, "skipped", reason)

    def _limits(self, candidate: Candidate) -> tuple[int | None, ...]:
        return tuple(m.vmem_limit for m in self._inspections[candidate.index].models)


def _compile_batch(
    batch: Sequence[Candidate],
    inspections: Mapping[int, child.Inspection],
    spared: _Spared,
    pool: Workers,
    watch: Callable[[Activity], None] | None,
    timeout_s: float,
    deadline: float,
) -> Generator[tuple[Candidate, TuneRow], None, None]:
    trying, requests = [], []
    target, objective = spared.target, spared.objective
    left = deadline - time.monotonic()
    for candidate in batch:
        if (row := spared.row(candidate)) is not None:
            yield candidate, row
        elif left <= 0:
            yield candidate, TuneRow(candidate.config, "skipped", "the time budget had ended")
        else:
            trying.append(candidate)
            requests.append(_request(candidate, target, min(timeout_s, left)))
    stage = Stage("compiling", trying, watch)
    with closing(compile_all(requests, pool, stage.started)) as reports:
        for position, report in reports:
            stage.ended(position)
            candidate = trying[position]
            evidence = Evidence(target.chip, inspections[candidate.index].models, report)
            if report.ok:
                row = _ok_row(candidate, evidence, objective)
            elif report.status == "timeout" and left < timeout_s:
                reason = "the time budget ended while it was being compiled"
                row = TuneRow(candidate.config, "skipped", reason, seconds=report.seconds)
            else:
                row = _failed_row(candidate, report)
            yield candidate, row


def _request(candidate: Candidate, target: Target, timeout_s: float) -> Request:
    spec = candidate.bound.kernel.spec
    return Request(
        fn=candidate.function(interpret=False, target=target.chip.name),
        avals=candidate.bound.avals,
        target=target,
        name=spec.name,
        where=str(spec.source),
        timeout_s=timeout_s,
        isolate=True,
    )


def _failed_row(candidate: Candidate, report: CompileReport) -> TuneRow:
    status = report.status if report.status != "unavailable" else "error"
    where = f" at {report.where}" if report.where else ""
    return TuneRow(
        candidate.config,
        status,
        one_line(report.error or report.status) + where,
        seconds=report.seconds,
        figures=_figures(report),
    )


def _ok_row(candidate: Candidate, evidence: Evidence, objective: Objective) -> TuneRow:
    report = evidence.report
    return TuneRow(
        candidate.config,
        "ok",
        cost=objective.figure(evidence),
        cost_unit=objective.unit,
        seconds=report.seconds if report is not None else 0.0,
        figures=_figures(report) if report is not None else {},
    )


def _figures(report: CompileReport) -> dict[str, Any]:
    names = ("vmem_bytes", "bundles", "spills", "code_bytes", "hbm_temp_bytes", "cached")
    figures = {name: value for name in names if (value := getattr(report, name)) is not None}
    if report.estimate is not None:
        figures["confidence"] = report.estimate.confidence
        figures["bound"] = [kernel.bound for kernel in report.estimate.kernels]
    return figures
