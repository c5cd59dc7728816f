"""The PJRT C API as a table of function pointers that can be changed in memory.

PJRT is the interface between a framework and an XLA compiler with its device (libtpu is one such
plug-in). Its functions take one pointer to a struct that starts with its size and an extension
pointer; the order of the functions in the table never changes, new ones are added at the end
(openxla/xla, ``xla/pjrt/c/pjrt_c_api.h``).
"""

from __future__ import annotations

import ctypes
import mmap

from tpu_kernels.errors import DeviceError

# PJRT_Api: size_t struct_size; PJRT_Extension_Base* extension_start; then the version struct
# {size_t size; void* extension; int major; int minor}; then the functions.
_EXTENSION = 8
_MINOR = 36
_FUNCTIONS = 40
INDEX = {
    "Client_Create": 10,
    "Client_PlatformName": 12,
    "Executable_NumOutputs": 44,
    "Executable_OutputMemoryKinds": 47,
}
"""Positions in the function table of what is used here."""


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
