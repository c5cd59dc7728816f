"""Makes TorchTPU accept an XLA:CPU plug-in in libtpu's place, by changing its function table.

Three things are missing from a CPU plug-in:

* TorchTPU asks for TPU-only options when it creates the client: they are replaced by
  ``cpu_device_count=1``;
* it asks the TpuTopology extension (type 16) where its chip is: an extension that describes one
  process, one chip and one core is put in front of the plug-in's chain;
* plug-ins older than PJRT API 0.110 cannot say in which memory an executable's outputs are: all of
  them are in ``"device"``.

The layout of the extension is that of ``xla/pjrt/c/pjrt_c_api_tpu_topology_extension.h``.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tpu_kernels.backends.torch_tpu.machine_code import (
    SUCCEED,
    CodePage,
    call_then_store,
    failure,
    fill_array,
    jump,
    store_bool,
    store_int32,
    store_int64,
    store_pointer,
)
from tpu_kernels.backends.torch_tpu.pjrt_api import PjrtApi

_TPU_TOPOLOGY = 16
_KNOWS_MEMORY_KINDS = 110  # minor version of the PJRT API
_MOST_OUTPUTS = 4096

_alive: list[Any] = []  # memory that the plug-in now points to: as long as the process


def patch(api: PjrtApi) -> None:
    """Change the table of a CPU plug-in that no client was made with yet.

    Args:
        api: The plug-in.

    Raises:
        DeviceError: The table cannot be written to.
    """
    api.unlock()
    page = CodePage()
    _alive.extend((api, page))
    _create_with_one_device(api, page)
    api.extensions.value = _topology_extension(api, page)
    if api.minor < _KNOWS_MEMORY_KINDS:
        _add_memory_kinds(api, page)


def _create_with_one_device(api: PjrtApi, page: CodePage) -> None:
    name = ctypes.create_string_buffer(b"cpu_device_count")
    # PJRT_NamedValue: size, extension, name, its length, kind 1 (int64), value, number of values.
    option = (ctypes.c_int64 * 7)(56, 0, ctypes.addressof(name), 16, 1, 1, 1)
    _alive.extend((name, option))
    create = api.slot("Client_Create")
    # PJRT_Client_Create_Args: create_options at 16, num_options at 24.
    code = store_pointer(16, ctypes.addressof(option)) + store_int64(24, 1) + jump(create.value)
    create.value = page.add(code)


def _topology_extension(api: PjrtApi, page: CodePage) -> int:
    """An extension that knows one process with one chip of one core, at the origin."""
    refuse = page.add(failure(api.slot("Client_PlatformName").value))

    def answer(code: bytes) -> int:
        return page.add(code + SUCCEED)

    def triple(array: int, count: int, value: int) -> int:
        return answer(fill_array(array, (value,) * 3) + store_int64(count, 3))

    no, count_of_one = answer(store_bool(16, False)), answer(store_int32(16, 1))
    list_of_zero = answer(fill_array(24, (0,)) + store_int64(32, 1))
    chip_zero = answer(store_int32(20, 0) + store_int32(24, 0))
    functions = [
        refuse,  # Subslice
        no,  # IsSubsliceTopology
        refuse,  # SubsliceDeviceIdFromFullDeviceId
        refuse,  # ReplaceHostBounds
        no,  # IsEnhancedBarrierEnabled
        no,  # HasLimitedIciConnectivity
        answer(store_bool(24, True)),  # IsReachableOverLimitedIci
        *[count_of_one] * 9,  # numbers of processes, chips, cores, devices, ...
        list_of_zero,  # ProcessIds
        list_of_zero,  # LogicalDeviceIdsOnProcess
        chip_zero,  # ProcessIdAndIndexOnProcessForChip
        chip_zero,  # ProcessIdAndIndexOnProcessForLogicalDevice
        triple(32, 40, 0),  # ProcessCoordFromId
        answer(store_int32(32, 0)),  # ChipIdFromCoord
        answer(store_int32(36, 0)),  # LogicalDeviceIdFromChipCoordAndCoreIndex
        # ChipCoordAndCoreIndexForLogicalDevice
        answer(fill_array(32, (0, 0, 0)) + store_int64(40, 3) + store_int32(48, 0)),
        *[triple(24, 32, 1)] * 3,  # bounds of chips per process, of chips, of processes
        *[refuse] * 8,  # slice configurations, and what later versions added
    ]
    size = 24 + 8 * len(functions)
    extension = (ctypes.c_uint64 * (size // 8))(
        size, _TPU_TOPOLOGY, api.extensions.value, *functions
    )
    _alive.append(extension)
    return ctypes.addressof(extension)


def _add_memory_kinds(api: PjrtApi, page: CodePage) -> None:
    kind = ctypes.create_string_buffer(b"device")
    kinds = (ctypes.c_uint64 * _MOST_OUTPUTS)(*[ctypes.addressof(kind)] * _MOST_OUTPUTS)
    sizes = (ctypes.c_uint64 * _MOST_OUTPUTS)(*[6] * _MOST_OUTPUTS)
    _alive.extend((kind, kinds, sizes))
    # The struct starts like that of NumOutputs, which fills in the count.
    pointers = [(0x20, ctypes.addressof(kinds)), (0x28, ctypes.addressof(sizes))]
    count_outputs = api.slot("Executable_NumOutputs").value
    api.slot("Executable_OutputMemoryKinds").value = page.add(
        call_then_store(count_outputs, pointers)
    )
