"""``torch.tpu``: the device module of the simulated device, in the shape of TorchTPU's.

The device is one host-memory device. Random numbers come from torch's CPU generator, so that a
model draws the same numbers on ``"cpu"`` and on ``"tpu"``. ``eager_mode`` and
``allow_excess_precision`` are properties, as in TorchTPU: assigning to them changes the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tpu_kernels.backends.device import modes
from tpu_kernels.backends.device.memory import (
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
)
from tpu_kernels.backends.device.modes import EagerMode, set_eager_mode
from tpu_kernels.backends.device.precision import Precision, precision
from tpu_kernels.backends.device.streams import Event, Stream, StreamContext
from tpu_kernels.compiler.chips import resolve
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError, DeviceError

__all__ = [
    "EagerMode",
    "Event",
    "Precision",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_built",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "precision",
    "reset_peak_memory_stats",
    "seed",
    "set_device",
    "set_eager_mode",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "topology_aware_mesh",
]

DeviceLike = torch.device | str | int | None


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of the device without asking hardware.

    Attributes:
        name: Name of the device; says that it is simulated.
        total_memory: HBM of a device of that generation in bytes; the simulation has the host's.
        chip: TPU generation that it stands for, such as ``"v6e"``.
        multi_processor_count: 1, as in TorchTPU.
        simulated: Always True here.
    """

    name: str
    total_memory: int
    chip: str
    multi_processor_count: int = 1
    simulated: bool = True


class device:
    """Context manager that selects a device; there is one, so it only checks the index.

    Args:
        device: A device, an index or None.
    """

    def __init__(self, device: DeviceLike = None) -> None:
        _check(device)

    def __enter__(self) -> device:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class device_of(device):
    """Context manager that selects the device of a tensor; does nothing for tensors elsewhere.

    Args:
        obj: A tensor or storage.
    """

    def __init__(self, obj: Any) -> None:
        super().__init__()


def _check(device: DeviceLike) -> None:
    if isinstance(device, int):
        index: int | None = device
    else:
        parsed = torch.device("tpu" if device is None else device)
        if parsed.type != "tpu":
            raise DeviceError(f"expected a tpu device, got {parsed}", hint="use device='tpu'")
        index = parsed.index
    if index not in (None, -1, 0):
        raise DeviceError(f"tpu:{index} does not exist: the simulation has one device, tpu:0")


def is_available() -> bool:
    """Return True: the device was installed."""
    return True


def is_built() -> bool:
    """Return True: nothing has to be built."""
    return True


def is_initialized() -> bool:
    """Return True: installing initialises the device."""
    return True


def init() -> None:
    """Do nothing; installing initialised the device."""


_lazy_init = init


def device_count() -> int:
    """Return 1."""
    return 1


def current_device() -> int:
    """Return 0, the index of the only device."""
    return 0


def set_device(device: DeviceLike) -> None:
    """Select a device.

    Args:
        device: A device or an index; only ``tpu:0`` exists.

    Raises:
        DeviceError: If there is no such device.
    """
    _check(device)


def get_device_name(device: DeviceLike = None) -> str:
    """Return the device's name, which says that it is simulated and which chip it stands for."""
    _check(device)
    return f"Simulated TPU {settings().sim_chip} (host memory)"


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return the properties of the device."""
    chip = resolve(settings().sim_chip).chip
    return DeviceProperties(get_device_name(device), chip.hbm_bytes, chip.name)


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """Return ``{"supported_dtypes": ...}``: every dtype that the host has."""
    _check(device)
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {"supported_dtypes": found}


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work: run what deferred mode has recorded."""
    _check(device)
    modes.finish()


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the only stream."""
    _check(device)
    return torch.accelerator.current_stream()


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the only stream."""
    return current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    """Select a stream; they all are in the order of calls.

    Args:
        stream: A stream of the device.

    Raises:
        DeviceError: If it belongs to another device.
    """
    StreamContext(stream)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager that selects a stream."""
    return StreamContext(stream)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: bfloat16 is the TPU's native dtype."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that ``torch.autocast("tpu")`` takes."""
    return [torch.bfloat16, torch.float16]


def empty_cache() -> None:
    """Do nothing: the host's allocator keeps no cache that could be emptied."""


def _is_in_bad_fork() -> bool:
    return False  # host memory survives a fork


def manual_seed(seed: int) -> None:
    """Seed the random numbers, which the simulated device shares with the CPU."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random numbers of all devices, of which there is one."""
    manual_seed(seed)


def seed() -> int:
    """Seed the random numbers from the system and return the seed."""
    return torch.default_generator.seed()


def initial_seed() -> int:
    """Return the seed in force."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the generator's state, a uint8 CPU tensor."""
    _check(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Restore a state that `get_rng_state` returned."""
    _check(device)
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the generator states of all devices, of which there is one."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restore what `get_rng_state_all` returned."""
    for state in new_states:
        set_rng_state(state)


default_generators = (torch.default_generator,)
"""The generator of each device: the CPU's, since the device draws the CPU's random numbers."""


def topology_aware_mesh(*args: Any, **kwargs: Any) -> Any:
    """Refuse: a mesh that follows the wiring of TPUs needs TPUs.

    Raises:
        DeviceError: Always.
    """
    raise DeviceError(
        "topology_aware_mesh lays a mesh over real TPUs; the simulated device is one chip",
        hint="torch.distributed.device_mesh.init_device_mesh('cpu', ...) runs on CPUs",
    )


class _Module(ModuleType):
    _excess = False

    @property
    def eager_mode(self) -> EagerMode:
        """The mode of the calling thread; assigning changes that of the process."""
        return modes.current()

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode) -> None:
        modes.set_process(mode)

    @property
    def allow_excess_precision(self) -> bool:
        """Whether the TPU's compiler may keep more precision than asked; of no effect here."""
        return self._excess

    @allow_excess_precision.setter
    def allow_excess_precision(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ArgumentError(f"allow_excess_precision is True or False, not {value!r}")
        self._excess = value


sys.modules[__name__].__class__ = _Module
