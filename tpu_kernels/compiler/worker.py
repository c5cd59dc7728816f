"""A compile worker: a process that takes jobs until its parent goes away.

libtpu keeps global state, takes lock files, writes to standard error and ends the process when it
meets something that it did not expect; so does code under tuning. All of that stays in here. Start
it with ``python -m tpu_kernels.compiler.worker FOLDER``; it reads one JSON object per line from
standard input and answers one per line on standard output. Payloads lie in files of FOLDER, which
belongs to this worker alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import resource
import select
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

_PARENT_CHECK_S = 1.0


def main(arguments: list[str]) -> int:
    """Serve jobs until standard input closes.

    Args:
        arguments: The worker's folder.

    Returns:
        Exit status.
    """
    folder = Path(arguments[0])
    # Answers go to the pipe that was standard output; whatever libtpu or a candidate prints goes to
    # the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # To the log as well: where the author's code is when the process aborts or is out of time.
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, os.getppid(), folder), daemon=True).start()

    import jax  # noqa: F401 (before the parent starts counting the first job's time)

    from tpu_kernels.compiler import jobs

    _answer(answers, {"ready": True})
    while True:
        job = json.loads(lines.get())
        try:
            result = jobs.run(job, folder, lambda: _answer(answers, {"loaded": True}))
        except BaseException as error:
            # Even SystemExit of a candidate is a result: the parent must hear of it, and the worker
            # goes on.
            result = {**jobs.failure("worker", error), "traceback": traceback.format_exc()}
        result["rss_bytes"] = _resident_bytes()
        _answer(answers, result)


def _listen(lines: queue.SimpleQueue[str], parent: int, folder: Path) -> None:
    """Pass on lines of standard input; end the process when the parent is gone, whatever the main
    thread does.

    The parent's death closes the pipe, unless a process that the parent forked still holds it;
    hence the check of the parent's id as well.
    """
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], _PARENT_CHECK_S)
        chunk = os.read(0, 1 << 16) if ready else None
        if os.getppid() != parent or chunk == b"":
            # Nobody is left to remove the folder, or to hear of a failure to do so.
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        if chunk is None:
            continue
        *complete, pending = (pending + chunk).split(b"\n")
        for line in complete:
            lines.put(line.decode())


def _answer(stream: IO[str], message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
