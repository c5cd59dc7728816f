"""The PJRT C API as a table of function pointers: calling it, and changing it in memory.

PJRT is the interface between a framework and an XLA compiler with its device (libtpu is one such
plug-in). Its functions take one pointer to a struct that starts with its size and an extension
pointer; the order of the functions in the table never changes, new ones are added at the end
(openxla/xla, ``xla/pjrt/c/pjrt_c_api.h``).
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

from tpu_kernels.errors import CompileError, DeviceError

# PJRT_Api: size_t struct_size; PJRT_Extension_Base* extension_start; then the version struct
# {size_t size; void* extension; int major; int minor}; then the functions.
_EXTENSION = 8
_MINOR = 36
_FUNCTIONS = 40
INDEX = {
    "Error_Destroy": 0,
    "Error_Message": 1,
    "Plugin_Initialize": 3,
    "Client_Create": 10,
    "Client_PlatformName": 12,
    "Executable_Destroy": 40,
    "Executable_NumOutputs": 44,
    "Executable_GetCostAnalysis": 46,
    "Executable_OutputMemoryKinds": 47,
    "TopologyDescription_Create": 82,
    "TopologyDescription_Destroy": 83,
    "Compile": 89,
    "Executable_GetCompiledMemoryStats": 96,
}
"""Positions in the function table of what is used here."""

_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def word(address: int) -> ctypes.c_uint64:
    """The 64-bit word at an address; its ``value`` can be read and set."""
    return ctypes.c_uint64.from_address(address)


class PjrtApi:
    """The function table of a plug-in.

    Args:
        path: The plug-in's shared library; it is loaded and stays loaded.

    Raises:
        DeviceError: The file cannot be loaded, or is no PJRT plug-in.
    """

    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
            get_api = self.library.GetPjrtApi
        except (OSError, AttributeError) as error:
            raise DeviceError(
                f"{path} is no PJRT plug-in: {error}",
                hint="reinstall the package that it belongs to",
            ) from error
        get_api.restype = ctypes.c_void_p
        self.address: int = get_api()

    @property
    def minor(self) -> int:
        """Minor version of the API that the plug-in was built for."""
        return ctypes.c_int32.from_address(self.address + _MINOR).value

    def slot(self, name: str) -> ctypes.c_uint64:
        """The entry of a function in the table."""
        return word(self.address + _FUNCTIONS + 8 * INDEX[name])

    @property
    def extensions(self) -> ctypes.c_uint64:
        """The head of the chain of extensions."""
        return word(self.address + _EXTENSION)

    def unlock(self) -> None:
        """Make the table writable; plug-ins keep it in memory that is not.

        Raises:
            DeviceError: The operating system refuses.
        """
        start = self.address & ~(mmap.PAGESIZE - 1)
        end = self.address + word(self.address).value
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(end - start)
        if libc.mprotect(ctypes.c_void_p(start), size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise DeviceError(
                f"the plug-in's function table cannot be changed (errno {ctypes.get_errno()})",
                hint="a hardened kernel forbids it; use another machine",
            )

    def call(self, name: str, *fields: int, results: int = 0) -> list[int]:
        """Call a function.

        Args:
            name: Its name, without ``PJRT_``.
            *fields: The 64-bit fields of its struct after size and extension.
            results: Number of 64-bit fields after those, which it fills in.

        Returns:
            All words of the struct after the call.

        Raises:
            CompileError: The plug-in reported an error; has its text.
        """
        count = 2 + len(fields) + results
        struct = (ctypes.c_uint64 * count)(8 * count, 0, *fields, *([0] * results))
        error = _Function(self.slot(name).value)(ctypes.addressof(struct))
        if error:
            message = (ctypes.c_uint64 * 5)(40, 0, error, 0, 0)
            _Function(self.slot("Error_Message").value)(ctypes.addressof(message))
            text = ctypes.string_at(message[3], message[4]).decode(errors="replace")
            destroy = (ctypes.c_uint64 * 3)(24, 0, error)
            _Function(self.slot("Error_Destroy").value)(ctypes.addressof(destroy))
            raise CompileError(text)
        return list(struct)


def named_values(address: int, count: int) -> dict[str, Any]:
    """Read an array of ``PJRT_NamedValue`` (56 bytes each)."""
    return dict(_named_value(address + 56 * index) for index in range(count))


def _named_value(address: int) -> tuple[str, Any]:
    name = ctypes.string_at(word(address + 16).value, word(address + 24).value).decode()
    kind = word(address + 32).value & 0xFFFFFFFF
    value: Any = None
    if kind == 0:  # a string: pointer and length
        text = ctypes.string_at(word(address + 40).value, word(address + 48).value)
        value = text.decode(errors="replace")
    elif kind == 1:
        value = ctypes.c_int64.from_address(address + 40).value
    elif kind == 3:
        value = ctypes.c_float.from_address(address + 40).value
    elif kind == 4:
        value = bool(word(address + 40).value & 1)
    return name, value
