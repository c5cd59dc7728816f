"""``torch.tpu``: the device module of the simulated device, in the shape of TorchTPU's.

The device is one host-memory device: work is done when a call returns, so streams and events are
trivially complete. Random numbers come from torch's CPU generator, so that a model draws the same
numbers on ``"cpu"`` and on ``"tpu"``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels.config import settings
from tpu_kernels.errors import DeviceError

Stream = torch.Stream
DeviceLike = torch.device | str | int | None


@dataclass(frozen=True)
class DeviceProperties:
    """What is known of the device without asking hardware.

    Attributes:
        name: Name of the device; says that it is simulated.
        chip: TPU generation that it stands for, such as ``"v6e"``.
        simulated: Always True here.
    """

    name: str
    chip: str
    simulated: bool = True


class Event:
    """A point in the work of a stream, with the interface of `torch.Event`.

    Args:
        enable_timing: Whether `elapsed_time` will be asked.
    """

    def __init__(self, *args: Any, enable_timing: bool = False, **kwargs: Any) -> None:
        self._time: float | None = None
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Mark this moment; all earlier work is already done."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event, which has always happened."""

    def query(self) -> bool:
        """Return True: work is done when the call that asked for it returns."""
        return True

    def synchronize(self) -> None:
        """Wait for the event, which has always happened."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds of host time between two recorded events.

        Args:
            end_event: The later event.

        Raises:
            DeviceError: If either event was not recorded, or not made with ``enable_timing=True``.
        """
        if not (self._timed and end_event._timed) or self._time is None or end_event._time is None:
            raise DeviceError(
                "elapsed_time needs two recorded events with timing",
                hint="create both with Event(enable_timing=True) and call record() on each",
            )
        return (end_event._time - self._time) * 1e3


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
    return DeviceProperties(name=get_device_name(device), chip=settings().sim_chip)


def get_device_capability(device: DeviceLike = None) -> dict[str, Any]:
    """Return ``{"supported_dtypes": ...}``: every dtype that the host has."""
    _check(device)
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {"supported_dtypes": found}


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work, which is always done already."""
    _check(device)


def current_stream(device: DeviceLike = None) -> Stream:
    """Return the only stream."""
    _check(device)
    return torch.accelerator.current_stream()


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
