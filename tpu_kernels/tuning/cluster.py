"""A tuning job spread over the machines of a Ray cluster (extra ``ray``).

`RayWorkers` takes the place of the pool of worker processes: it hands each candidate to an actor,
which has a worker process of its own on its machine. Everything else, the order of candidates, what
is left out, the choice and the cache, stays in the process that tunes, so results merge by
themselves. A machine that goes away costs time, not results: its candidates are tried again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tpu_kernels.compiler.pool import Job, Outcome, Pool
from tpu_kernels.errors import MissingDependency, TuningError

_POLL_S = 0.5
_START_LIMIT_S = 300.0  # a machine may have to be rented before an actor starts
_GRACE_S = 300.0  # beyond a job's own limit, before its machine is given up
_RETRIES = 2  # a candidate that takes its machine down must not take all of them


class Runner(Protocol):
    """What an actor does with a job."""

    def run(self, job: Job) -> Outcome:
        """Do one job."""
        ...


def available() -> bool:
    """Whether Ray is installed."""
    return importlib.util.find_spec("ray") is not None


class RayWorkers:
    """Actors on a Ray cluster, each with one worker process.

    The package has to be installed on the machines, in the same version; functions of scripts
    travel by value, modules have to be importable there (Ray's ``runtime_env`` can ship them).

    Args:
        address: The cluster, such as ``"auto"`` or ``"ray://host:10001"``; None for a new one on
            this machine. What this process is connected to already comes before both.
        count: How many actors; by default one per CPU of the cluster.
        resources: What each reserves beside a CPU, such as ``{"TPU": 1}``.
        runner: Makes what does the jobs in each actor; by default a `Pool` of one worker.

    Attributes:
        max_workers: How many jobs run at once.
        lost: How many actors died at work so far.

    Raises:
        MissingDependency: Ray is not installed.
        TuningError: There is no such cluster.

    A context manager: on leaving, the actors end, and the cluster if it was started here.

    Example:
        >>> import tpu_kernels as tk
        >>> from tpu_kernels.ops.matmul import matmul
        >>> with RayWorkers("auto") as workers:  # doctest: +SKIP
        ...     tk.autotune(matmul, (x, y), target="v6e", workers=workers)
    """

    def __init__(
        self,
        address: str | None = None,
        count: int | None = None,
        *,
        resources: Mapping[str, float] | None = None,
        runner: Callable[[], Runner] | None = None,
    ) -> None:
        if not available():
            raise MissingDependency(
                "tuning on a cluster needs the package ray",
                hint="pip install 'tpu_kernels[ray]'",
            )
        import ray

        self._ray: Any = ray
        self._owned = _connect(ray, address, count)
        self._options = {"num_cpus": 1, "resources": dict(resources or {}), "max_restarts": 0}
        self._runner = runner or _one_worker
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        self.max_workers = count or max(1, cores)
        self.lost = 0
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}
        self._objects: dict[tuple[str, int], Any] = {}
        self._since = time.monotonic()

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        for actor in [*self._idle, *self._starting.values()]:
            self._end(actor)
        self._idle, self._starting = [], {}
        if self._owned:
            self._owned = False
            self._ray.shutdown()

    def run(self, job: Job) -> Outcome:
        """Do one job; jobs one after the other go to the same machine, as long as it lives."""
        return next(outcome for _, outcome in self.run_all([job]))

    def run_all(
        self, jobs: Sequence[Job], started: Callable[[int], None] | None = None
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Do jobs in parallel.

        Args:
            jobs: The jobs.
            started: Called with the index of each job that an actor takes up.

        Yields:
            Index and outcome of each job, in the order in which they end. Leaving the loop early
            ends what still runs.

        Raises:
            TuningError: No actor can be started.
        """
        waiting = deque(range(len(jobs)))
        running: dict[Any, tuple[Any, int, float]] = {}
        losses: Counter[int] = Counter()
        self._since = time.monotonic()
        try:
            while waiting or running:
                self._recruit(len(running), min(self.max_workers, len(waiting) + len(running)))
                while waiting and self._idle:
                    actor, index = self._idle.pop(), waiting.popleft()
                    job = jobs[index]
                    reference = actor.run.remote(job, *map(self._shared, job.files))
                    running[reference] = (actor, index, time.monotonic())
                    if started is not None:
                        started(index)
                ended, _ = self._ray.wait(
                    [*running, *self._starting], num_returns=1, timeout=_POLL_S
                )
                for reference in ended:
                    if reference in self._starting:
                        self._take_in(reference, alone=not running)
                        continue
                    actor, index, _ = running.pop(reference)
                    outcome = self._outcome(reference, actor)
                    if outcome is None:
                        losses[index] += 1
                        if losses[index] <= _RETRIES:
                            waiting.appendleft(index)
                            continue
                        detail = f"its machine or actor was lost {losses[index]} times"
                        outcome = Outcome("crashed", detail=detail)
                    yield index, outcome
                self._give_up(jobs, running)
        finally:
            for actor, _, _ in running.values():
                self._end(actor)

    def _shared(self, file: str) -> Any:
        """A file's contents as an object of the cluster, which travels to each machine once."""
        identity = (file, os.stat(file).st_mtime_ns)
        if identity not in self._objects:
            self._objects = {identity: self._ray.put(Path(file).read_bytes())}
        return self._objects[identity]

    def _recruit(self, at_work: int, wanted: int) -> None:
        """Start actors up to the number that is wanted."""
        for _ in range(wanted - at_work - len(self._idle) - len(self._starting)):
            remote = self._ray.remote(**self._options)(Actor)
            actor = remote.remote(self._runner)
            self._starting[actor.ready.remote()] = actor

    def _take_in(self, reference: Any, *, alone: bool) -> None:
        """An actor that was starting is ready, or has failed to start."""
        actor = self._starting.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._end(actor)
            self.lost += 1
            if alone and not self._idle and not self._starting and self.lost > self.max_workers:
                raise TuningError(
                    f"no actor starts on the Ray cluster: {str(error).strip().splitlines()[-1]}",
                    hint="install tpu_kernels on its machines, in the version that is used here",
                ) from error
        else:
            self._idle.append(actor)

    def _outcome(self, reference: Any, actor: Any) -> Outcome | None:
        """What an actor made of its job, None if the actor is gone."""
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(reference)
        except errors.RayTaskError as error:  # the actor lives: its disk is full, or the like
            outcome = Outcome("crashed", detail=f"crashed: {error.cause!r}")
        except errors.RayError:
            self.lost += 1
            self._end(actor)
            return None
        self._idle.append(actor)
        return outcome

    def _give_up(self, jobs: Sequence[Job], running: Mapping[Any, tuple[Any, int, float]]) -> None:
        """End actors that are silent for longer than any job may take, and wait not for ever."""
        now = time.monotonic()
        for actor, index, since in running.values():
            if now - since > jobs[index].timeout_s + _GRACE_S:
                self._end(actor)  # `wait` then reports its job as lost
        if running or self._idle:
            self._since = now
        elif now - self._since > _START_LIMIT_S:
            raise TuningError(
                f"no actor has started on the Ray cluster within {_START_LIMIT_S:g} s",
                hint="`ray status` says what it waits for; ask for fewer workers or resources",
            )

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it may be gone, and so may the cluster
            self._ray.kill(actor, no_restart=True)


class Actor:
    """One worker on a machine of the cluster; Ray runs the methods there.

    Args:
        runner: Makes what does the jobs.
    """

    def __init__(self, runner: Callable[[], Runner]) -> None:
        self._runner = runner()
        self._copies: set[Path] = set()

    def ready(self) -> int:
        """Answer, so that the tuning process knows that the actor has started."""
        return os.getpid()

    def run(self, job: Job, *contents: bytes) -> Outcome:
        """Do a job.

        Args:
            job: The job.
            *contents: What its files hold, for a machine that does not have them.
        """
        files = {Path(name) for name in job.files}
        for old in self._copies - files:
            old.unlink(missing_ok=True)
        self._copies &= files
        for name, data in zip(job.files, contents, strict=True):
            file = Path(name)
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                self._copies.add(file)
        return self._runner.run(job)


def _one_worker() -> Runner:
    return Pool(max_workers=1, idle_s=_GRACE_S)


def _connect(ray: Any, address: str | None, count: int | None) -> bool:
    """Connect to a cluster; return whether it was started here and has to be ended."""
    if ray.is_initialized():
        return False
    # A cluster of this machine alone; RAY_ADDRESS in the environment would take its place.
    own = {"address": "local", "num_cpus": count, "include_dashboard": False}
    options = own if address is None else {"address": address}
    try:
        ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise TuningError(
            f"no Ray cluster at {address!r}: {error}",
            hint="start one by `ray start --head`, or leave the address out",
        ) from error
    return True
