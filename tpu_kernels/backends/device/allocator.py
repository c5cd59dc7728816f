"""The allocator behind ``torch.UntypedStorage(n, device="tpu")``: the CPU's, with another label.

`copy.deepcopy`, `torch.load` and pickling make storages this way, and torch dereferences a null
pointer if a device has no allocator. Ours is an object with a copy of the CPU allocator's virtual
table in which ``allocate`` forwards to the CPU allocator and then writes the device into the
returned ``DataPtr``.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from tpu_kernels._compat_torch import privateuse1_device_type
from tpu_kernels.backends.device import native
from tpu_kernels.backends.device.probe import peek_pointer, rehearse
from tpu_kernels.errors import DeviceError

_DEVICE_OFFSET = 24  # DataPtr: void *data, {void *context, deleter}, then int8 type, int8 index
_SLOTS = 6  # ~A, ~A (deleting), allocate, is_simple_data_ptr, raw_deleter, copy_data
_ALLOCATE = 2
_KNOWN_CLASS = "N3c1019DefaultCPUAllocatorE"


def register() -> None:
    """Give the simulated device its allocator.

    Raises:
        DeviceError: If torch's CPU allocator is not the known one, or the rehearsal failed.
    """
    # Until all is verified the plain CPU allocator stands in: its storages are on the wrong device,
    # which ends in an error message, where no allocator at all would end in a crash.
    _set_allocator(_cpu_allocator())
    cpu_allocator, table = _inspect()

    def attempt() -> str | None:
        _register(cpu_allocator, table)
        return _problem()

    rehearse(attempt, "the device's allocator")
    _register(cpu_allocator, table)


def _cpu_allocator() -> int:
    get_cpu_allocator = native.symbol("libc10.so", "_ZN3c1015GetCPUAllocatorEv")
    get_cpu_allocator.restype = ctypes.c_void_p
    return int(get_cpu_allocator() or 0)


def _set_allocator(allocator: int) -> None:
    set_allocator = native.symbol(
        "libc10.so", "_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh"
    )
    set_allocator.argtypes = [ctypes.c_int8, ctypes.c_void_p, ctypes.c_uint8]
    set_allocator.restype = None
    set_allocator(privateuse1_device_type(), allocator, 255)  # the highest priority


def _inspect() -> tuple[int, int]:
    """Return the CPU allocator and its virtual table, after checking that it is the known class."""
    cpu_allocator = _cpu_allocator()
    table = peek_pointer(cpu_allocator)
    known_table = native.address_of(native.symbol("libc10.so", "_ZTVN3c1019DefaultCPUAllocatorE"))
    if table != known_table + 16 or native.class_name(table) != _KNOWN_CLASS:
        raise DeviceError("torch's CPU allocator is not the class that the simulation knows")
    return cpu_allocator, table


def _register(cpu_allocator: int, table: int) -> None:
    device = privateuse1_device_type()  # the low byte; the high byte is the index, 0
    original = native.table_entries(table, _SLOTS)[_ALLOCATE]
    allocate = native.call_then_store16(original, cpu_allocator, _DEVICE_OFFSET, device)
    own_table = native.copy_table(table, _SLOTS, {_ALLOCATE: allocate})
    # The whole object is the pointer to its table.
    _set_allocator(native.place(struct.pack("<Q", own_table)))


def _problem() -> str | None:
    """Use the registered allocator through public calls; return what is wrong with it, or None."""
    storage = torch.UntypedStorage(64, device="tpu")
    if str(storage.device) != "tpu:0" or storage.nbytes() != 64 or storage.data_ptr() % 64:
        return f"a storage came out as {storage.nbytes()} bytes on {storage.device}"
    storage.fill_(7)  # type: ignore[attr-defined]
    if storage.cpu().tolist() != [7] * 64:
        return "a storage does not hold what was written into it"
    copy = storage.clone()
    del storage
    if copy.cpu().tolist() != [7] * 64:
        return "a copied storage lost its contents"
    try:
        torch.UntypedStorage(1 << 60, device="tpu")
    except RuntimeError:
        return None
    return "an impossible allocation succeeded"
