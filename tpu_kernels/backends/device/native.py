"""A few bytes of machine code, where torch wants a C++ function and Python must not be the answer.

torch calls its allocator and its generator factory from anywhere: threads without the interpreter
lock, destructors, the middle of a Ctrl-C. A Python callback there can be interrupted half-way and
leave C++ with garbage. These functions are a dozen instructions of x86-64 (System V ABI), which
nothing can interrupt.

Whatever C++ is given an address of here lies in memory that belongs to no Python object. torch's
threads and static objects outlive the interpreter, which frees every object on its way out, those
in module globals too. Above all the unwind tables: when any thread of the process unwinds (the
autograd and OpenMP threads do as they end), libgcc reads every table that was registered.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from tpu_kernels._compat_torch import library_folder
from tpu_kernels.backends.device.probe import peek, peek_pointer
from tpu_kernels.errors import DeviceError

_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def symbol(library: str, name: str) -> Any:
    """Return one exported function or object of torch's shared libraries.

    Args:
        library: File name such as ``libc10.so``.
        name: Mangled C++ name.

    Raises:
        DeviceError: If this torch has no such library or symbol.
    """
    try:
        return getattr(ctypes.CDLL(str(library_folder() / library)), name)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"this torch has no {name} in {library}: {error}") from error


def address_of(function: Any) -> int:
    """Return the address of a symbol that `symbol` returned."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def place(data: bytes) -> int:
    """Copy bytes into memory that is never freed, not even when the interpreter ends.

    Args:
        data: What to place, at most a page.

    Returns:
        The address of the copy, which is read-only and aligned to a page.

    Raises:
        DeviceError: If the system has no memory left.
    """
    address = _new_page()
    _fill(address, data, mmap.PROT_READ)
    return address


def make_executable(code: bytes, frame: Callable[[int], bytes] | None = None) -> int:
    """Place machine code in memory for the life of the process.

    Args:
        code: Position-independent x86-64 code.
        frame: Given the code's address, returns the unwind table that lets C++ exceptions pass
            through it. Needed if the code calls anything that may throw.

    Returns:
        The address of the code.

    Raises:
        DeviceError: If the system does not allow new executable memory.
    """
    address = _new_page()
    if frame is None:
        _fill(address, code, mmap.PROT_READ | mmap.PROT_EXEC)
        return address
    try:
        register = ctypes.CDLL("libgcc_s.so.1").__register_frame
    except (OSError, AttributeError) as error:
        raise DeviceError(f"cannot register unwind information: {error}") from error
    code += b"\0" * (-len(code) % 8)
    _fill(address, code + frame(address), mmap.PROT_READ | mmap.PROT_EXEC)
    register.argtypes, register.restype = [ctypes.c_void_p], None
    register(address + len(code))
    return address


def call_then_store16(function: int, second: int, offset: int, value: int) -> int:
    """Make ``f(result, _, n) { function(result, second, n); *(u16 *)(result + offset) = value; }``.

    This is a C++ member function that returns an object through memory (``result``): the call is
    forwarded to another object's member, and one field of what it returned is changed.

    Args:
        function: Address of the function to call.
        second: What it gets as its second argument, the object.
        offset: Offset of the 16-bit field in the result, below 128.
        value: The field's new value.

    Returns:
        The address of the made function.
    """
    code = (
        b"\x53"  # push rbx
        b"\x48\x89\xfb"  # mov rbx, rdi
        b"\x48\xbe" + struct.pack("<Q", second) +  # mov rsi, second
        b"\x48\xb8" + struct.pack("<Q", function) +  # mov rax, function
        b"\xff\xd0"  # call rax
        b"\x66\xc7\x43" + struct.pack("<BH", offset, value) +  # mov word [rbx + offset], value
        b"\x48\x89\xd8"  # mov rax, rbx
        b"\x5b"  # pop rbx
        b"\xc3"  # ret
    )  # fmt: skip

    def frame(address: int) -> bytes:
        # DWARF: the return address is at CFA-8; after `push rbx` the CFA is rsp+16, rbx at CFA-16.
        common = struct.pack("<IB", 0, 1) + b"\0" + b"\x01\x78\x10" + b"\x0c\x07\x08\x90\x01"
        entry = struct.pack("<QQ", address, len(code)) + b"\x41\x0e\x10\x83\x02"
        common = _padded(common)
        first = struct.pack("<I", len(common)) + common
        entry = _padded(struct.pack("<I", len(first) + 4) + entry)
        return first + struct.pack("<I", len(entry)) + entry + b"\0\0\0\0"

    return make_executable(code, frame)


def jump_with(function: int, second: int) -> int:
    """Make ``f(result, ...) { return function(result, second); }``, as a jump without a frame.

    Args:
        function: Address of the function to go to.
        second: What it gets as its second argument.

    Returns:
        The address of the made function.
    """
    return make_executable(
        b"\x48\xbe" + struct.pack("<Q", second)  # mov rsi, second
        + b"\x48\xb8" + struct.pack("<Q", function)  # mov rax, function
        + b"\xff\xe0"  # jmp rax
    )  # fmt: skip


def return_constant(value: int) -> int:
    """Make ``f(...) { return value; }``, with zero in the second return register.

    Args:
        value: A number that fits 31 bits.

    Returns:
        The address of the made function.
    """
    # mov eax, value; xor edx, edx; ret
    return make_executable(b"\xb8" + struct.pack("<i", value) + b"\x31\xd2\xc3")


def store_clock() -> int:
    """Make ``f(_, target, ...) { *target = nanoseconds of the monotonic clock; }``.

    Returns:
        The address of the made function.
    """
    clock_gettime = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value or 0
    return make_executable(
        b"\x53"  # push rbx
        b"\x48\x83\xec\x10"  # sub rsp, 16
        b"\x48\x89\xf3"  # mov rbx, rsi
        b"\xbf" + struct.pack("<i", time.CLOCK_MONOTONIC) +  # mov edi, CLOCK_MONOTONIC
        b"\x48\x89\xe6"  # mov rsi, rsp
        b"\x48\xb8" + struct.pack("<Q", clock_gettime) +  # mov rax, clock_gettime
        b"\xff\xd0"  # call rax
        b"\x48\x69\x04\x24" + struct.pack("<i", 10**9) +  # imul rax, [rsp], 1000000000
        b"\x48\x03\x44\x24\x08"  # add rax, [rsp + 8]
        b"\x48\x89\x03"  # mov [rbx], rax
        b"\x48\x83\xc4\x10"  # add rsp, 16
        b"\x5b"  # pop rbx
        b"\xc3"  # ret
    )  # fmt: skip


def milliseconds_between() -> int:
    """Make ``double f(_, start, end, ...) { return (end - start) / 1e6; }``, for nanoseconds.

    Returns:
        The address of the made function.
    """
    return make_executable(
        b"\x48\x29\xf2"  # sub rdx, rsi
        b"\xf2\x48\x0f\x2a\xc2"  # cvtsi2sd xmm0, rdx
        b"\x48\xb8" + struct.pack("<d", 1e6) +  # mov rax, 1e6
        b"\x66\x48\x0f\x6e\xc8"  # movq xmm1, rax
        b"\xf2\x0f\x5e\xc1"  # divsd xmm0, xmm1
        b"\xc3"  # ret
    )  # fmt: skip


def class_name(table: int) -> str:
    """Return the mangled name of the C++ class that a virtual table belongs to.

    Raises:
        DeviceError: If there is no readable type information before the table.
    """
    name = peek(peek_pointer(peek_pointer(table - 8) + 8), 64)
    return name.partition(b"\0")[0].decode(errors="replace")


def table_entries(table: int, slots: int) -> tuple[int, ...]:
    """Return the function addresses of a virtual table."""
    return struct.unpack(f"<{slots}Q", peek(table, 8 * slots))


def replace_table(instance: int, table: int, slots: int, changes: Mapping[int, int]) -> None:
    """Give one C++ object a copy of its virtual table with some entries changed.

    Args:
        instance: Address of the object, whose first word points to its table.
        table: Its present table.
        slots: Number of entries in the table.
        changes: New function address by slot.
    """
    ctypes.c_uint64.from_address(instance).value = copy_table(table, slots, changes)


def copy_table(table: int, slots: int, changes: Mapping[int, int]) -> int:
    """Copy a virtual table with some entries changed; see `replace_table`.

    Returns:
        The address of the copy's first entry.
    """
    # The offset and the type information before the first entry go along: torch uses dynamic_cast.
    words = list(table_entries(table - 16, slots + 2))
    for slot, function in changes.items():
        words[2 + slot] = function
    return place(struct.pack(f"<{len(words)}Q", *words)) + 16


def _new_page() -> int:
    """Return the address of a new page, from the system directly: no Python object owns it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    writable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, mmap.PAGESIZE, writable, private, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise DeviceError(f"this system gives no more memory (errno {ctypes.get_errno()})")
    return int(address)


def _fill(address: int, data: bytes, protection: int) -> None:
    """Write a page and give it its final protection."""
    if len(data) > mmap.PAGESIZE:
        raise DeviceError(f"{len(data)} bytes do not fit a page of {mmap.PAGESIZE}")
    ctypes.memmove(address, data, len(data))
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(mmap.PAGESIZE)
    if libc.mprotect(ctypes.c_void_p(address), size, protection) != 0:
        kind = "executable" if protection & mmap.PROT_EXEC else "read-only"
        raise DeviceError(f"this system does not allow {kind} memory (errno {ctypes.get_errno()})")


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-(len(data) + 4) % 8)
