"""A page of small machine-code functions that stand in for functions of a PJRT plug-in.

A stand-in must not be a Python call-back: XLA calls these from its own threads, and a call-back
would need the GIL that the waiting Python thread may hold. Every function here follows the System V
calling convention of x86-64: one pointer to an argument struct in ``rdi``, an error pointer (0 is
success) in ``rax``. Offsets are those of the fields in the argument struct.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence

PAGE_BYTES = 1 << 16
SUCCEED = b"\x31\xc0\xc3"  # xor eax, eax; ret


class CodePage:
    """Executable memory that is filled with functions, one after the other, and never freed."""

    def __init__(self) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, PAGE_BYTES, prot=protection)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._used = 0

    def add(self, code: bytes) -> int:
        """Write a function; returns its address."""
        start = self._used
        self._memory[start : start + len(code)] = code
        self._used = (start + len(code) + 15) & ~15
        return self._address + start


def store_int32(offset: int, value: int) -> bytes:
    """``args->field = value`` for a 32-bit field."""
    return b"\xc7\x87" + struct.pack("<ii", offset, value)  # mov dword [rdi+offset], value


def store_int64(offset: int, value: int) -> bytes:
    """``args->field = value`` for a 64-bit field; the value must fit 31 bits."""
    return b"\x48\xc7\x87" + struct.pack("<ii", offset, value)  # mov qword [rdi+offset], value


def store_bool(offset: int, value: bool) -> bytes:
    """``args->field = value`` for a C++ bool."""
    return b"\xc6\x87" + struct.pack("<iB", offset, value)  # mov byte [rdi+offset], value


def store_pointer(offset: int, address: int) -> bytes:
    """``args->field = address`` for a pointer field below offset 128."""
    load = b"\x48\xb8" + struct.pack("<Q", address)  # mov rax, address
    return load + b"\x48\x89\x47" + struct.pack("<B", offset)  # mov [rdi+offset], rax


def fill_array(offset: int, values: Sequence[int]) -> bytes:
    """``args->field[i] = values[i]`` for a field that points to 32-bit integers of the caller."""
    code = b"\x48\x8b\x87" + struct.pack("<i", offset)  # mov rax, [rdi+offset]
    for index, value in enumerate(values):
        code += b"\xc7\x40" + struct.pack("<Bi", 4 * index, value)  # mov dword [rax+4i], value
    return code


def jump(address: int) -> bytes:
    """Continue in another function with the same arguments."""
    return b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0"  # mov rax, address; jmp rax


def failure(function: int) -> bytes:
    """Return an error that the plug-in itself makes.

    An error object is the plug-in's own type, so the only way to one is to provoke it: `function`
    is called with an argument struct that claims to have no bytes.
    """
    return (
        b"\x48\x83\xec\x48"  # sub rsp, 72
        b"\x48\xc7\x04\x24\0\0\0\0"  # mov qword [rsp], 0
        b"\x48\xc7\x44\x24\x08\0\0\0\0"  # mov qword [rsp+8], 0
        b"\x48\x89\xe7"  # mov rdi, rsp
        b"\x48\xb8" + struct.pack("<Q", function) + b"\xff\xd0"  # mov rax, function; call rax
        b"\x48\x83\xc4\x48\xc3"  # add rsp, 72; ret
    )


def call_then_store(function: int, pointers: Sequence[tuple[int, int]]) -> bytes:
    """Call a function with the same arguments, then set pointer fields of the struct.

    Args:
        function: Address of the function; its error is returned.
        pointers: Offset (below 128) and value of each field.
    """
    code = b"\x53\x48\x89\xfb"  # push rbx; mov rbx, rdi
    code += b"\x48\xb8" + struct.pack("<Q", function) + b"\xff\xd0"  # mov rax, function; call rax
    for offset, value in pointers:
        code += b"\x48\xb9" + struct.pack("<Q", value)  # mov rcx, value
        code += b"\x48\x89\x4b" + struct.pack("<B", offset)  # mov [rbx+offset], rcx
    return code + b"\x5b\xc3"  # pop rbx; ret
