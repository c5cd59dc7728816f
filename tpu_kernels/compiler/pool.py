"""A pool of compile workers: warm, bounded, each job with a time and a memory limit.

Whatever a job does, hang, abort or eat all memory, its worker is ended and replaced and the job's
outcome says so. Nothing outlives its use: idle workers are ended after a while, all of them at
exit, when the last `worker_pool` scope closes, and when an exception (Ctrl-C included) leaves a
running `Pool.run_all`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tpu_kernels.compiler.worker_process import WorkerDied, WorkerProcess

_START_LIMIT_S = 180.0  # interpreter and imports, on a machine that may be busy
_POLL_S = 0.25
_MEMORY_PER_WORKER = 2_500_000_000
_RECYCLE_BYTES = 1_500_000_000  # libtpu does not give back what large programs took
_IDLE_S = 60.0


@dataclass(frozen=True)
class Job:
    """Work for a worker.

    Attributes:
        request: The job as `jobs.run` takes it, without its payload.
        payload: What goes with it: StableHLO text or a pickle.
        timeout_s: Seconds that it may take, not counting the start of a worker.
        memory_bytes: Resident memory that its worker may occupy.
        files: Files of this machine that it reads; workers elsewhere get copies at the same paths.
        load_s: Seconds besides that a ``"call"`` job may take to load its payload, which imports
            the author's modules.
    """

    request: dict[str, Any]
    payload: bytes
    timeout_s: float = 600.0
    memory_bytes: int = 12_000_000_000
    files: tuple[str, ...] = ()
    load_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        status: ``"done"``, ``"timeout"`` or ``"crashed"``.
        result: The worker's answer where it is done, else empty.
        detail: What happened, in words, where it is not done.
        log: The end of what the worker had printed, its Python stack included, where it crashed or
            was ended.
        seconds: Time from the start of the job to its end.
        value: What a ``"call"`` job returned.
    """

    status: str
    result: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    log: str = ""
    seconds: float = 0.0
    value: Any = None


class Workers(Protocol):
    """Who does jobs: a `Pool` on this machine, or workers on others.

    Attributes:
        max_workers: How many jobs may run at once.
    """

    max_workers: int

    def run(self, job: Job) -> Outcome:
        """Do one job; jobs one after the other go to the same worker, as long as it lives."""
        ...

    def run_all(
        self, jobs: Sequence[Job], started: Callable[[int], None] | None = None
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Do jobs in parallel; see `Pool.run_all`."""
        ...


class _Running:
    """A job in a worker's hands."""

    def __init__(self, index: int, job: Job) -> None:
        self.index = index
        self.job = job
        self.sent = False
        self.loading = job.load_s > 0
        self.since = time.monotonic()

    def begin(self, worker: WorkerProcess) -> None:
        worker.send(self.job.request, self.job.payload)
        self.sent = True
        self.since = time.monotonic()

    def loaded(self) -> None:
        """From here on the job's own time counts."""
        self.loading = False
        self.since = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def excess(self, worker: WorkerProcess) -> Outcome | None:
        """The outcome if the job is over one of its limits."""
        limit = self.job.timeout_s if self.sent else _START_LIMIT_S
        if self.sent and self.loading:
            limit += self.job.load_s
        if self.seconds > limit:
            if not self.sent:
                detail = f"the worker did not start within {limit:g} s"
                return Outcome("crashed", detail=detail, log=worker.log_tail())
            detail = f"timeout after {limit:g} s"
            return Outcome("timeout", detail=detail, log=worker.stack(), seconds=self.seconds)
        if worker.resident_bytes() > self.job.memory_bytes:
            detail = f"took more than {self.job.memory_bytes / 1e9:.1f} GB of memory"
            return Outcome("crashed", detail=detail, seconds=self.seconds)
        return None


class Pool:
    """Worker processes, started when needed and reused.

    Args:
        max_workers: How many may run at once; by default one per core, and no more than fit into
            memory.
        idle_s: Seconds after which unused workers are ended.
    """

    def __init__(self, max_workers: int | None = None, *, idle_s: float = _IDLE_S) -> None:
        self.max_workers = max_workers or default_workers()
        self._idle_s = idle_s
        self._idle: list[WorkerProcess] = []
        self._count = 0
        self._changed = threading.Condition()
        self._reaper: threading.Timer | None = None

    def run(self, job: Job) -> Outcome:
        """Do one job.

        Args:
            job: The job.

        Returns:
            Its outcome.
        """
        return next(outcome for _, outcome in self.run_all([job]))

    def run_all(
        self, jobs: Sequence[Job], started: Callable[[int], None] | None = None
    ) -> Generator[tuple[int, Outcome], None, None]:
        """Do jobs in parallel.

        Args:
            jobs: The jobs.
            started: Called with the index of each job that a worker takes up.

        Yields:
            Index and outcome of each job, in the order in which they end. Leaving the loop early
            ends what still runs.
        """
        waiting = deque(enumerate(jobs))
        running: dict[WorkerProcess, _Running] = {}
        try:
            while waiting or running:
                while waiting:
                    worker = self._acquire(block=not running)
                    if worker is None:
                        break
                    running[worker] = taken = _Running(*waiting.popleft())
                    if started is not None:
                        started(taken.index)
                    if worker.ready:
                        yield from self._advance(worker, running, begin=True)
                answered, _, _ = select.select(list(running), [], [], _POLL_S)
                for worker in list(running):
                    if worker in answered:
                        yield from self._advance(worker, running, begin=False)
                    elif excess := running[worker].excess(worker):
                        index = running.pop(worker).index
                        self._discard(worker)
                        yield index, excess
        finally:
            for worker in running:
                self._discard(worker)

    def shutdown(self) -> None:
        """End all idle workers now; those at work end with the call that uses them."""
        with self._changed:
            workers, self._idle = self._idle, []
            self._count -= len(workers)
            if self._reaper is not None:
                self._reaper.cancel()
                self._reaper = None
            self._changed.notify_all()
        for worker in workers:
            worker.kill()

    def _advance(
        self, worker: WorkerProcess, running: dict[WorkerProcess, _Running], *, begin: bool
    ) -> Iterator[tuple[int, Outcome]]:
        """Send the job to a ready worker, or take in what a worker has answered."""
        current = running[worker]
        try:
            if begin:
                current.begin(worker)
                return
            message = worker.receive()
            if message is None:
                return
            if not worker.ready:
                worker.ready = True
                current.begin(worker)
                return
            if message.get("loaded"):
                current.loaded()
                message = worker.receive()  # the answer may have come with it
                if message is None:
                    return
        except WorkerDied as death:
            del running[worker]
            self._discard(worker)
            detail = f"crashed: {death.reason}"
            yield (
                current.index,
                Outcome("crashed", detail=detail, log=death.log, seconds=current.seconds),
            )
            return
        value = None
        if "value" in message:
            value = pickle.loads(Path(message["value"]).read_bytes())
        del running[worker]
        self._release(worker, message.get("rss_bytes", 0))
        yield current.index, Outcome("done", result=message, seconds=current.seconds, value=value)

    def _acquire(self, *, block: bool) -> WorkerProcess | None:
        with self._changed:
            while True:
                while self._idle:
                    worker = self._idle.pop()
                    if worker.alive:
                        return worker
                    self._count -= 1
                    worker.kill()
                if self._count < self.max_workers:
                    self._count += 1
                    break
                if not block:
                    return None
                self._changed.wait()
        try:
            return WorkerProcess()
        except BaseException:
            with self._changed:
                self._count -= 1
                self._changed.notify()
            raise

    def _release(self, worker: WorkerProcess, resident: int) -> None:
        if resident > _RECYCLE_BYTES:
            self._discard(worker)
            return
        with self._changed:
            self._idle.append(worker)
            self._changed.notify()
            if self._reaper is not None:
                self._reaper.cancel()
            self._reaper = threading.Timer(self._idle_s, self.shutdown)
            self._reaper.daemon = True
            self._reaper.start()

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._changed:
            self._count -= 1
            self._changed.notify()


def default_workers() -> int:
    """Return how many workers this machine takes: one per core, if they fit into free memory."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, _available_bytes() // _MEMORY_PER_WORKER))


def _available_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return (
            2 * _MEMORY_PER_WORKER
        )  # not Linux: there is no libtpu either, and two workers are modest
    rows = dict(line.split(":", 1) for line in text.splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


_lock = threading.Lock()
_shared: Pool | None = None
_parents: list[Pool] = []
_scopes = 0


def shared_pool() -> Pool:
    """Return this process's pool."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = Pool()
        return _shared


@contextlib.contextmanager
def worker_pool() -> Iterator[Pool]:
    """Keep workers warm for a while: when the outermost such scope closes, no worker is left.

    Yields:
        The process's pool, which `compile_function` uses as well.

    Example:
        >>> with worker_pool() as pool:
        ...     pool.max_workers >= 1
        True
    """
    global _scopes
    with _lock:
        _scopes += 1
    try:
        yield shared_pool()
    finally:
        with _lock:
            _scopes -= 1
            last = _scopes == 0
        if last:
            shutdown()


def shutdown() -> None:
    """End all workers that are not at work."""
    with _lock:
        pool = _shared
    if pool is not None:
        pool.shutdown()


def _forget_after_fork() -> None:
    """A forked child must leave its parent's workers alone."""
    global _shared, _scopes, _lock
    if _shared is not None:
        _parents.append(
            _shared
        )  # its destructor would complain of processes that are not this one's
    _lock = threading.Lock()
    _shared, _scopes = None, 0


atexit.register(shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
