"""How a session tries its candidates: who does the work, in which batches, judged by what."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tpu_kernels.compiler.pool import Pool, Workers, worker_pool
from tpu_kernels.compiler.time_limit import time_limit
from tpu_kernels.errors import ArgumentError, KernelError
from tpu_kernels.registry import reference as references
from tpu_kernels.tuning import compare, compiled, lookup, space, xla
from tpu_kernels.tuning.activity import Activity
from tpu_kernels.tuning.candidates import Candidate, named_arguments, prepare
from tpu_kernels.tuning.device import CLOSE, DeviceSearch
from tpu_kernels.tuning.guided import Guide
from tpu_kernels.tuning.nearest import distance
from tpu_kernels.tuning.objective import objective as objective_named
from tpu_kernels.tuning.report import TuneRow
from tpu_kernels.tuning.session import WALL, Session
from tpu_kernels.tuning.wall import WallSearch, choose

TIMEOUT_S = {"compiled": 300.0, "wall": 60.0}
_NEIGHBOURS = 4  # configs that won for other shapes, tried first in a guided search


def run(session: Session) -> None:
    """Try the candidates and choose."""
    if session.measure == "device" and session.device is not None:
        _run_on_device(session)
        return
    if session.measure not in WALL:
        with worker_pool() as pool:
            _run_compiled(session, session.workers or pool)
        if session.device is not None:
            _choose_on_device(session, session.working(), close=CLOSE)
        return
    if session.workers is not None:
        _run_on_cpu(session, session.workers)
        return
    # Workers of its own, all gone at the end: times are not taken beside somebody's work, and
    # what a candidate leaves in a process goes with it.
    pool = Pool()
    try:
        _run_on_cpu(session, pool)
    finally:
        pool.shutdown()


def _batches(session: Session, size: int) -> Iterator[list[Candidate]]:
    """The candidates in the order in which to try them."""
    if session.trials is None:
        yield session.bind(range(len(session.configs)))
        return
    guide = Guide(session.configs, seeds=_seeds(session), seed=session.seed)
    for index, row in session.rows.items():
        guide.tell(index, row)
    told = set(session.rows)
    while len(session.rows) < session.trials and time.monotonic() < session.deadline:
        # A model needs results to learn from: batches no larger than what runs at once.
        batch = guide.ask(min(size, session.trials - len(session.rows)))
        if not batch:
            return
        yield session.bind(batch)
        for index in sorted(session.rows.keys() - told):
            guide.tell(index, session.rows[index])
            told.add(index)


def _seeds(session: Session) -> list[int]:
    """The config in force, then those that won for the nearest shapes on this chip."""
    seeds = [] if session.current is None else [session.current]
    session.bind(range(len(session.configs)), stop_at_first=True)
    if session.bound is None:
        return seeds
    request = session.request()
    near = []
    for record in lookup.known(request):
        key = record.key if isinstance(record.key, Mapping) else {}
        if key.get("target") == request.target and "arrays" in key:
            near.append((distance(request.arrays, key["arrays"]), record.config))
    places = {space.identity(config): index for index, config in enumerate(session.configs)}
    for _, config in sorted(near, key=lambda pair: pair[0])[:_NEIGHBOURS]:
        if (index := places.get(space.identity(config))) is not None:
            seeds.append(index)
    return seeds


def _run_compiled(session: Session, pool: Workers) -> None:
    if session.target is None:
        raise ArgumentError(f"measure={session.measure!r} needs a target", hint='target="v6e"')
    goal, memory = objective_named(session.measure), compiled.Memory()
    limit = session.timeout_s or TIMEOUT_S["compiled"]
    for row in session.working().values():
        memory.best = min(memory.best, row.cost if row.cost is not None else math.inf)
    for batch in _batches(session, pool.max_workers):
        compiled.try_candidates(
            batch,
            session.target,
            goal,
            session.found,
            pool=pool,
            watch=session.watch,
            first=session.current,
            timeout_s=limit,
            deadline=session.deadline,
            compiler=session.measure != "roofline",
            memory=memory,
            prune=None if session.trials is None else True,
        )
    if session.against_xla and time.monotonic() < session.deadline:
        left = min(limit, session.deadline - time.monotonic())
        session.baseline = xla.try_reference(
            session.kernel, session.args, session.kwargs, session.target, timeout_s=left
        )


def _run_on_cpu(session: Session, pool: Workers) -> None:
    wanted, usual = reference_outputs(session), usual_outputs(session)
    limit = session.timeout_s or TIMEOUT_S["wall"]

    def trial(candidates: Sequence[Candidate]) -> WallSearch:
        return WallSearch(
            candidates,
            wanted,
            usual=usual,
            pool=pool,
            watch=session.watch,
            tolerance=session.tolerance,
            timeout_s=limit,
            deadline=session.deadline,
        )

    for batch in _batches(session, pool.max_workers):
        if batch:
            with trial(batch) as search:
                search.try_all(session.found)
    working = session.working()
    if len(working) < 2 or time.monotonic() >= session.deadline:
        return
    rows = dict(session.rows)
    again = [
        dataclasses.replace(item, index=index)
        for index in working
        for item in prepare(
            session.kernel, session.args, session.kwargs, [session.configs[index]], ()
        )
        if isinstance(item, Candidate)
    ]
    with trial(again) as search:
        session.chosen, selection, retimed = search.choose(working, session.current)
        session.decision = selection.reason
        session.rows = {**rows, **retimed}


def _run_on_device(session: Session) -> None:
    searching = _device_search(session)
    for batch in _batches(session, 1):
        for candidate in batch:
            if time.monotonic() >= session.deadline:
                return
            _run_in_process(session, searching, candidate)
    if len(working := session.working()) > 1:
        _choose_on_device(session, working, searching)


def _run_in_process(
    session: Session, searching: DeviceSearch, candidate: Candidate, **kept: Any
) -> TuneRow:
    """Run a candidate here; its row keeps what else is known of it."""
    if session.journal is not None:
        with contextlib.suppress(ArgumentError):  # a config that cannot be written down
            session.journal.begin(candidate.config)
    if session.watch is not None:
        session.watch(Activity("running", (candidate.config,)))
    row = dataclasses.replace(searching.trial(candidate), **kept)
    session.found(candidate.index, row)
    return row


def _choose_on_device(
    session: Session,
    working: Mapping[int, TuneRow],
    searching: DeviceSearch | None = None,
    close: float | None = None,
) -> None:
    """Time the best candidates on the device, in rounds, and choose; wrong ones are rows.

    Args:
        session: The search.
        working: The rows of candidates that work.
        searching: What has run them on the device; None where only the compiler has judged them.
        close: Those within this factor of the best are looked at.
    """
    if not working or time.monotonic() >= session.deadline:
        return
    ranked = sorted(working, key=lambda index: working[index].rank)
    best = working[ranked[0]].rank
    near = [i for i in ranked if close is None or working[i].rank <= close * best]
    current = session.current
    if close is not None and current is not None and current in working and current not in near:
        near.append(current)
    candidates = {
        index: dataclasses.replace(item, index=index)
        for index in near
        for item in prepare(
            session.kernel, session.args, session.kwargs, [session.configs[index]], ()
        )
        if isinstance(item, Candidate)
    }
    rows = {index: working[index] for index in candidates}
    if searching is None:
        searching = _device_search(session)
        for index, candidate in candidates.items():
            known = working[index]
            kept = {"cost": known.cost, "cost_unit": known.cost_unit, "figures": known.figures}
            rows[index] = _run_in_process(session, searching, candidate, **kept)
    rows = {index: row for index, row in rows.items() if row.ok}
    if not rows:
        return
    timer = searching
    session.chosen, selection, retimed = choose(
        rows,
        session.current,
        lambda index: timer.sample(candidates[index]),
        deadline=session.deadline,
        watch=session.watch,
    )
    session.decision = f"{selection.reason} (on {session.device.name if session.device else ''})"
    session.rows |= retimed


def _device_search(session: Session) -> DeviceSearch:
    arguments = named_arguments(session.kernel, session.args, session.kwargs)
    wanted = reference_outputs(session)
    return DeviceSearch(session.kernel, arguments, wanted, session.tolerance)


def reference_outputs(session: Session) -> list[torch.Tensor] | None:
    """What the reference makes of the arguments on the CPU, as the kernel orders results."""
    if session.reference is None:
        return None
    spec = dataclasses.replace(session.kernel.spec, reference=session.reference)
    values = {
        name: _on_cpu(value)
        for name, value in named_arguments(session.kernel, session.args, session.kwargs).items()
    }
    with torch.no_grad():
        outputs, new = references.results(spec, values)
    return compare.leaves(outputs) + compare.leaves(list(new.values()))


def usual_outputs(session: Session) -> list[torch.Tensor] | None:
    """Shapes and dtypes that the operator gives now, None where the call needs a config for it."""
    kernel = session.kernel
    values = {
        name: _on_meta(value)
        for name, value in named_arguments(kernel, session.args, session.kwargs).items()
    }
    try:
        inspect.signature(kernel).bind(**values)
    except TypeError:
        return None  # a parameter without a default, which every config sets
    try:
        limit = session.timeout_s or TIMEOUT_S["wall"]
        with torch.no_grad(), time_limit(limit, "tracing"):
            return compare.leaves(kernel(**values))
    except KernelError:
        return None


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(item) for item in value)
    return value


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
