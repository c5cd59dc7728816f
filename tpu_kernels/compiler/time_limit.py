"""A time limit for the author's Python code where it runs in this process, as it does while traced.

Everything that runs a kernel or the compiler does so in a process that can be killed. Tracing does
not need one: it is quick, finds what is on disk without a worker, and its errors keep their
traceback. But an index map may loop for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from tpu_kernels.compiler import locations
from tpu_kernels.errors import TraceTimeout

_AGAIN_S = 0.5  # code that catches everything may have caught it


class _Expired(BaseException):
    """Raised where the thread happens to be; not an `Exception`, so that few handlers take it."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Interrupt the Python code of the block after some time, in whichever thread it runs.

    The interruption comes between two bytecodes, as Ctrl-C does. A call into C that never returns
    cannot be interrupted.

    Args:
        seconds: Time that the block may take.
        what: Says in the error what is too slow.

    Raises:
        TraceTimeout: The block took longer; names the author's line that it was at.

    Example:
        >>> with time_limit(60, "tracing"):
        ...     pass
    """
    thread = threading.get_ident()
    over = threading.Event()
    lock = threading.Lock()

    def expire() -> None:
        pause = seconds
        while not over.wait(pause):
            pause = _AGAIN_S
            with lock:
                if not over.is_set():
                    _raise_in(thread, _Expired)

    watch = threading.Thread(target=expire, name="tpu_kernels time limit", daemon=True)
    watch.start()
    try:
        try:
            yield
        finally:
            with lock:
                over.set()
                _raise_in(thread, None)  # one on its way must not hit elsewhere
    except _Expired as expired:
        over.set()
        place = locations.from_exception(expired)
        raise TraceTimeout(
            f"{what} did not end within {seconds:g} s",
            where=None if place is None else str(place),
            hint="the author's own Python code was running; does a loop there end?",
        ) from expired


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make an exception come up in another thread, or take back one that has not yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
