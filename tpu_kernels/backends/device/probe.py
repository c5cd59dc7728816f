"""Looking at foreign memory, and trying things that might crash, without endangering the process.

What the device assumes about C++ objects is first *read* through the kernel, which answers an
error where a bad pointer would otherwise be a segmentation fault, and then *tried* in a forked
child, whose death is only a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import struct
from collections.abc import Callable

from tpu_kernels.errors import DeviceError

REHEARSAL_SECONDS = 10


def peek(address: int, size: int) -> bytes:
    """Read memory of this process without the risk of a crash.

    Args:
        address: Where to read.
        size: Bytes to read.

    Returns:
        The bytes.

    Raises:
        DeviceError: If the memory is not mapped, or cannot be read this way here.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            data = os.pread(memory, size, address)
        finally:
            os.close(memory)
    except (OSError, OverflowError) as error:
        raise DeviceError(f"cannot read {size} bytes at {address:#x}: {error}") from error
    if len(data) != size:
        raise DeviceError(f"only {len(data)} of {size} bytes at {address:#x} can be read")
    return data


def peek_pointer(address: int) -> int:
    """Read one 8-byte pointer at an address, as `peek` does."""
    return int(struct.unpack("<Q", peek(address, 8))[0])


def rehearse(action: Callable[[], str | None], what: str) -> None:
    """Run an action in a forked child and let it pass only if the child lives and agrees.

    The fork bypasses Python's own fork hooks: the child runs nothing but the action and leaves
    without any clean-up, so that other threads and libraries of the process do not matter to it.

    Args:
        action: What to try. Returns None if all is well, else what is wrong. Must do its work in
            this thread (a forked child has no others).
        what: What is tried, for the message.

    Raises:
        DeviceError: If the child died, hung, or reported a problem.
    """
    reader, writer = os.pipe()
    try:
        # PyDLL keeps the interpreter lock over the call, so the child certainly owns it.
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            _run_in_child(action, writer)
        os.close(writer)
        writer = -1
        if child < 0:
            raise DeviceError(f"{what} could not be rehearsed: fork failed")
        with os.fdopen(os.dup(reader), "rb") as answers:
            answer = answers.read().decode(errors="replace")
        status = 0
        with contextlib.suppress(ChildProcessError):  # somebody else collects this one's children
            _, status = os.waitpid(child, 0)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    if answer == "ok":
        return
    raise DeviceError(f"{what} failed its rehearsal: {answer or f'the child died ({status})'}")


def _run_in_child(action: Callable[[], str | None], writer: int) -> None:
    # A crash here is an expected answer: no core file, no traceback on the user's terminal.
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.PyDLL(None).alarm(REHEARSAL_SECONDS)  # the default action of SIGALRM ends a hang
        ctypes.PyDLL(None).signal(14, None)
        problem = action()
        os.write(writer, (problem or "ok").encode())
    except BaseException as error:  # any failure at all is the answer, and nothing may escape
        os.write(writer, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)
