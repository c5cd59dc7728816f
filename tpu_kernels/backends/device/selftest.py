"""The assumptions about torch and Python that the simulated device stands on, checked at install.

Each check reads through `probe.peek` first, compares with values known from public calls, and only
then lets the device rely on the layout. A failed check is a `DeviceError` that says which.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

import torch

from tpu_kernels._compat_torch import from_dlpack, key_set, redispatcher, to_dlpack
from tpu_kernels.backends.device import capsule
from tpu_kernels.backends.device.probe import peek
from tpu_kernels.errors import DeviceError

HINT = (
    "the simulated device supports torch 2.13 with CPython on Linux x86-64; run on CPU tensors "
    "instead, or set TPU_KERNELS_SIM_DEVICE=0 to stop looking for it"
)


def check_platform() -> None:
    """Raise a `DeviceError` unless this is CPython on 64-bit x86 Linux."""
    found = f"{platform.python_implementation()} on {sys.platform} {platform.machine()}"
    if (
        sys.platform != "linux"
        or platform.machine() not in ("x86_64", "AMD64")
        or platform.python_implementation() != "CPython"
        or struct.calcsize("P") != 8
    ):
        raise DeviceError(
            f"the simulated tpu device needs CPython on Linux x86-64; this is {found}", hint=HINT
        )
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise DeviceError("the simulated tpu device needs a Python with its global lock", hint=HINT)


def check_capsule() -> None:
    """Check where a capsule keeps its pointer and DLPack its device, by values known otherwise."""
    tensor = torch.empty_strided((3, 5), (7, 1), dtype=torch.float32)
    exported = to_dlpack(tensor)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer = get_pointer(exported, b"dltensor")
    held = peek(id(exported) + capsule.CAPSULE_POINTER_OFFSET, 8)
    if struct.unpack("<Q", held)[0] != pointer:
        raise DeviceError("a PyCapsule keeps its pointer elsewhere in this Python", hint=HINT)
    data, device_type, device_id, ndim, code, bits, lanes, shape, strides, offset = struct.unpack(
        "<QiiiBBHQQQ", peek(pointer, 48)
    )
    seen = (data + offset, device_type, device_id, ndim, code, bits, lanes)
    if seen != (tensor.data_ptr(), capsule.KDL_CPU, 0, 2, 2, 32, 1):
        raise DeviceError("DLPack's struct is laid out differently in this torch", hint=HINT)
    if struct.unpack("<4q", peek(shape, 16) + peek(strides, 16)) != (3, 5, 7, 1):
        raise DeviceError("DLPack's shape and strides are elsewhere in this torch", hint=HINT)
    from_dlpack(exported)  # consumes it, which releases the export


def check_round_trip() -> None:
    """Check that torch takes a rewritten capsule as a tensor on the same memory, both ways."""
    source = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()[1:, ::2]
    there = capsule.wrap(source)
    back = capsule.unwrap(there)
    facts = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (source, there, back)]
    if facts.count(facts[0]) != 3 or there.device.type != "tpu" or back.device.type != "cpu":
        raise DeviceError(
            f"torch imported a device tensor as {there.device}, {tuple(there.shape)}", hint=HINT
        )
    view = redispatcher(torch.ops.aten.as_strided.default)(key_set("CPU"), there, (2,), (1,), 1)
    if view.device.type != "tpu" or view.untyped_storage().data_ptr() != (
        there.untyped_storage().data_ptr()
    ):
        raise DeviceError("torch's view kernels do not take device tensors as they are", hint=HINT)
    if not torch.equal(back, source):
        raise DeviceError("values changed on their way to the device and back", hint=HINT)
