"""Workers: whatever a job does, the user's process goes on and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tpu_kernels.compiler import pickling
from tpu_kernels.compiler.pool import Job, Pool, default_workers


def call(fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **limits: Any) -> Job:
    payload = pickling.dumps((fn, args))
    assert payload is not None
    request = {"kind": "call", "sys_path": pickling.import_path()}
    return Job(request, payload, timeout_s, **limits)


def children(parent: int | None = None) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[1] == str(parent or os.getpid()):
                found.append((entry / "cmdline").read_text())
    return [line for line in found if "tpu_kernels.compiler.worker" in line]


@pytest.fixture
def others() -> set[str]:
    """Workers of the pool that other tests of this process share."""
    return set(children())


@pytest.fixture
def pool(others: set[str]) -> Iterator[Pool]:
    workers = Pool(2)
    yield workers
    workers.shutdown()
    assert set(children()) <= others


def test_jobs_of_every_fate_end_with_their_outcome(pool: Pool) -> None:
    def hang() -> None:
        while True:
            time.sleep(0.01)

    def fail() -> None:
        raise ValueError("no luck")

    jobs = [
        call(hang, timeout_s=1.0),
        call(os.abort),
        call(sys.exit, 3),
        call(fail),
        call(divmod, 17, 5),
        call(os._exit, 7),
    ]
    outcomes = dict(pool.run_all(jobs))
    assert len(outcomes) == len(jobs)
    assert (outcomes[0].status, outcomes[0].detail) == ("timeout", "timeout after 1 s")
    assert (outcomes[1].status, outcomes[1].detail) == ("crashed", "crashed: SIGABRT")
    assert outcomes[2].status == "done"
    assert outcomes[2].result["type"] == "SystemExit"
    assert (outcomes[3].result["type"], outcomes[3].result["message"]) == ("ValueError", "no luck")
    assert outcomes[3].result["where"].startswith(__file__)
    assert outcomes[4].value == (3, 2)
    assert outcomes[5].detail == "crashed: exit status 7"


def test_a_worker_is_reused(pool: Pool) -> None:
    first, second = (pool.run(call(os.getpid)).value for _ in range(2))
    assert first == second != os.getpid()


def test_what_a_job_prints_does_not_reach_the_user(
    pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    def shout() -> None:
        print("out", flush=True)
        os.write(2, b"err\n")
        os.abort()

    outcome = pool.run(call(shout))
    assert (capfd.readouterr().out, capfd.readouterr().err) == ("", "")
    # After that comes where it aborted.
    assert outcome.log.split()[:2] == ["out", "err"]


def test_a_job_that_takes_too_much_memory_is_ended(pool: Pool) -> None:
    def eat() -> None:
        held = []
        while True:
            held.append(bytearray(32 << 20))
            time.sleep(0.02)

    outcome = pool.run(call(eat, memory_bytes=800_000_000))
    assert (outcome.status, outcome.detail) == ("crashed", "took more than 0.8 GB of memory")


def test_leaving_the_loop_ends_what_still_runs(pool: Pool, others: set[str]) -> None:
    outcomes = pool.run_all([call(time.sleep, 60), call(abs, -1)])
    index, outcome = next(outcomes)
    assert (index, outcome.value) == (1, 1)
    outcomes.close()
    pool.shutdown()
    assert set(children()) <= others


def test_idle_workers_end_by_themselves(others: set[str]) -> None:
    workers = Pool(1, idle_s=0.2)
    workers.run(call(abs, -1))
    deadline = time.monotonic() + 20
    while not set(children()) <= others and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(children()) <= others


SCRIPT = """
import sys, time
from tpu_kernels.compiler import pickling
from tpu_kernels.compiler.pool import Job, shared_pool
request = {"kind": "call", "sys_path": pickling.import_path()}
jobs = [Job(request, pickling.dumps((time.sleep, (60,)))) for _ in range(2)]
print("go", flush=True)
for _ in shared_pool().run_all(jobs):
    pass
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_parent_that_is_stopped(sign: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        parent.stdout.readline()
        deadline = time.monotonic() + 30
        while len(children(parent.pid)) < min(2, default_workers()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = _pids(parent.pid)
        folders = [_folder(pid) for pid in workers]
        parent.send_signal(sign)
        parent.wait(timeout=120)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.05)
    assert not any(folder.exists() for folder in folders)


def _folder(pid: str) -> Path:
    return Path(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2].decode())


def _pids(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def test_a_forked_child_leaves_the_workers_alone() -> None:
    script = (
        "import os\n"
        "from tpu_kernels.compiler import pickling\n"
        "from tpu_kernels.compiler.pool import Job, shared_pool\n"
        "request = {'kind': 'call', 'sys_path': pickling.import_path()}\n"
        "job = Job(request, pickling.dumps((os.getpid, ())))\n"
        "first = shared_pool().run(job).value\n"
        "if os.fork() == 0:\n"
        "    os._exit(0 if shared_pool()._count == 0 else 1)\n"
        "assert os.wait()[1] == 0\n"
        "assert shared_pool().run(job).value == first\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_pickled_is_told_apart() -> None:
    assert pickling.dumps(threading.Lock()) is None
