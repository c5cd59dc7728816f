"""The parent's end of one compile worker: start it, hand it a job, hear its answer, end it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tpu_kernels.compiler import artifacts
from tpu_kernels.compiler.jobs import DUMP_FOLDER

_LOG_TAIL_BYTES = 4000
_STACK_S = 1.0  # for the worker to print where it is
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class WorkerDied(Exception):
    """The worker's process ended without an answer.

    Attributes:
        reason: How it ended, such as ``"SIGABRT"`` or ``"exit status 3"``.
        log: The end of what it had printed.
    """

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log


class WorkerProcess:
    """One worker process and its private folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tpu_kernels-worker-"))
        self.ready = False
        self._received = b""
        self._log = self.folder / "log.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tpu_kernels.compiler.worker", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.folder),
                # A group of its own: Ctrl-C in the terminal reaches the parent only, which then
                # ends the worker together with whatever the worker has started.
                start_new_session=True,
            )
        os.set_blocking(self.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Descriptor that becomes readable when the worker answers or dies."""
        if self._process.stdout is None:
            raise RuntimeError("the worker was started without a pipe")
        return self._process.stdout.fileno()

    def send(self, job: dict[str, Any], payload: bytes) -> None:
        """Hand over a job; the answer comes through `receive`.

        Args:
            job: The job as `jobs.run` takes it, without its payload's path.
            payload: Contents of the payload file.

        Raises:
            WorkerDied: If the process has ended.
        """
        file = self.folder / "payload"
        file.write_bytes(payload)
        line = json.dumps({**job, "payload": str(file)}) + "\n"
        try:
            os.write(self._stdin(), line.encode())
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> dict[str, Any] | None:
        """Read what has arrived.

        Returns:
            The next message, or None if none is complete yet.

        Raises:
            WorkerDied: If the process has ended.
        """
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self.fileno(), 1 << 20)
            if not chunk:
                raise self._death()
            self._received += chunk
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def resident_bytes(self) -> int:
        """Memory that the process occupies, 0 where it cannot be read."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()
        except OSError:
            return 0
        return int(fields[1]) * _PAGE_BYTES

    def log_tail(self) -> str:
        """The end of what the worker has printed."""
        try:
            text = self._log.read_bytes()[-_LOG_TAIL_BYTES:]
        except OSError:
            return ""
        return text.decode(errors="replace").strip()

    def stack(self) -> str:
        """What the worker has printed, ended by the Python stack of its main thread."""
        before = self.log_tail()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline and self.log_tail() == before:
            time.sleep(0.02)
        time.sleep(0.02)  # the stack is written line by line
        return self.log_tail()

    def kill(self) -> None:
        """End the process and all that it started, and remove its folder, if not done already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stdin(self) -> int:
        if self._process.stdin is None:
            raise RuntimeError("the worker was started without a pipe")
        return self._process.stdin.fileno()

    def _death(self) -> WorkerDied:
        status = self._process.wait()
        if status < 0:
            try:
                reason = signal.Signals(-status).name
            except ValueError:
                reason = f"signal {-status}"
        else:
            reason = f"exit status {status}"
        return WorkerDied(reason, self.log_tail())


def _environment(folder: Path) -> dict[str, str]:
    """Variables for a worker: libtpu shall look neither for a TPU nor for a metadata server."""
    flags = [os.environ.get("LIBTPU_INIT_ARGS", ""), artifacts.libtpu_flags(folder / DUMP_FOLDER)]
    return {
        **os.environ,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": " ".join(filter(None, flags)),
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "TMPDIR": str(folder),
        "TPU_ACCELERATOR_TYPE": "v6e-4",  # any valid one: the topology of each compilation decides
        "TPU_LOG_DIR": "disabled",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Helper threads beyond the cores only fight each other: the pool runs as many workers as
        # there are cores.
        "OMP_NUM_THREADS": "1",
    }
