"""The device guard: what torch asks of a device around every operator that records a gradient.

A guard written in Python is called from C++ that must not throw (``getStream`` in autograd), and on
the way to Python a pending Ctrl-C is raised there, which ends the process. The questions have
constant answers, so the guard gets a virtual table of functions that return them: no interpreter,
no lock, and an operator under autograd is faster.

The order of the table is that of ``c10/core/impl/DeviceGuardImplInterface.h``. It is verified by
the object's class name, by asking the original entries in a forked child, and by a rehearsal.
"""

from __future__ import annotations

import ctypes
import time

import torch

from tpu_kernels._compat_torch import privateuse1_device_type
from tpu_kernels.backends.device import native
from tpu_kernels.backends.device.probe import peek_pointer, rehearse
from tpu_kernels.errors import DeviceError

_KNOWN_CLASS = "N5torch3acc17PythonDeviceGuardE"
_SLOTS = 26  # two destructors at the end
_TYPE, _DEVICE_COUNT, _GET_STREAM = 0, 15, 5
_RETURN_DEVICE = (1, 2)  # exchangeDevice, getDevice
_DO_NOTHING = (11, 13, 20, 21)  # destroyEvent, block, synchronizeEvent, synchronizeDevice
_RECORD, _QUERY_EVENT, _ELAPSED_TIME = 12, 14, 23
# getStream, getDefaultStream, getStreamFromGlobalPool, getNewStream, exchangeStream
_RETURN_STREAM = (_GET_STREAM, 6, 7, 8, 9)


class _Stream(ctypes.Structure):
    """``c10::Stream``, which C++ returns in two registers: the device, then the id."""

    _fields_ = (
        ("device_type", ctypes.c_int8),
        ("device_index", ctypes.c_int8),
        ("id", ctypes.c_int64),
    )


def register() -> None:
    """Let the guard of the simulated device answer without Python.

    Raises:
        DeviceError: If torch's guard is laid out differently, or the rehearsal failed.
    """
    device = privateuse1_device_type()
    registry = native.symbol("libc10.so", "_ZN3c104impl26device_guard_impl_registryE")
    guard = peek_pointer(native.address_of(registry) + 8 * device)
    table = peek_pointer(guard)
    name = native.class_name(table)
    if name != _KNOWN_CLASS:
        raise DeviceError(f"torch's device guard is {name}, which the simulation does not know")

    def replace() -> None:
        # A Device is its type and, in the next byte, its index 0; a Stream is a Device and id 0.
        answer = native.return_constant(device)
        nothing = native.return_constant(0)
        changes = dict.fromkeys((_TYPE, *_RETURN_DEVICE, *_RETURN_STREAM), answer)
        changes |= dict.fromkeys(_DO_NOTHING, nothing)
        # An event is not an object but the nanosecond at which it was recorded.
        changes[_RECORD] = native.store_clock()
        changes[_QUERY_EVENT] = native.return_constant(1)
        changes[_ELAPSED_TIME] = native.milliseconds_between()
        native.replace_table(guard, table, _SLOTS, changes)

    def problem() -> str | None:
        found = _original_answers(guard, table)
        if found != (device, 1, device, 0, 0):
            return f"torch's device guard answers {found}"
        replace()
        return _problem()

    rehearse(problem, "the device's guard")
    replace()


def _original_answers(guard: int, table: int) -> tuple[int, int, int, int, int]:
    """Ask three entries of the original table; runs in a child that may die of it."""
    entries = native.table_entries(table, _SLOTS)
    number = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
    stream = ctypes.CFUNCTYPE(_Stream, ctypes.c_void_p, ctypes.c_int16)
    current = stream(entries[_GET_STREAM])(guard, privateuse1_device_type())
    return (
        number(entries[_TYPE])(guard),
        number(entries[_DEVICE_COUNT])(guard),
        current.device_type,
        max(current.device_index, 0),
        current.id,
    )


def _problem() -> str | None:
    """Use the new guard through public calls; return what is wrong with it, or None."""
    stream = torch.accelerator.current_stream()
    if str(stream.device) != "tpu:0" or stream.stream_id != 0:
        return f"the current stream is {stream}"
    event, later = (torch.Event(device="tpu", enable_timing=True) for _ in range(2))
    event.record(stream)
    before = time.monotonic()
    later.record(stream)
    later.synchronize()
    elapsed = event.elapsed_time(later)
    if not later.query() or not 0 <= elapsed < (time.monotonic() - before) * 1e3 + 1e3:
        return f"two events lie {elapsed} ms apart"
    with torch.accelerator.device_index(0):
        x = torch.ones(2, device="tpu", requires_grad=True)
        (gradient,) = torch.autograd.grad((x * 3).sum(), x)
    return None if gradient.tolist() == [3.0, 3.0] else "a gradient came out wrong"
