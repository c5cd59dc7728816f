"""Streams and events of a device whose work is done, or recorded, when a call returns."""

from __future__ import annotations

import time
from typing import Any, Self

import torch

from tpu_kernels.backends.device import modes
from tpu_kernels.errors import DeviceError


class Event:
    """A point in the work of a stream, with the interface of `torch.Event`.

    Args:
        enable_timing: Whether `elapsed_time` will be asked.
        blocking: Accepted, and of no effect.
        interprocess: Accepted, and of no effect.
        external: Accepted, and of no effect.
        device: Accepted, and of no effect.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> None:
        self._time: float | None = None
        self._timed = enable_timing

    def record(self, stream: torch.Stream | None = None) -> Self:
        """Mark this moment; all earlier work is done, what deferred mode has recorded included."""
        finish()
        self._time = time.perf_counter()
        return self

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make a stream wait for the event, which has always happened."""

    def query(self) -> bool:
        """Return True: what came before the event is done."""
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


class Stream(torch.Stream):
    """A stream of the device: a name for the order in which calls are made anyway.

    Args:
        device: ``"tpu"`` or None.
        priority: Accepted, and of no effect.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, device=torch.device("tpu", 0), priority=priority)

    def wait_event(self, event: Any) -> None:
        """Let later work wait for an event, which has always happened."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let later work wait for another stream's, which is done."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one by default, and return it."""
        found = Event() if event is None else event
        found.record(self)
        return found

    def query(self) -> bool:
        """Return True: work is done when the call that asked for it returns."""
        return True

    def synchronize(self) -> None:
        """Wait for the stream's work."""
        finish()


class StreamContext:
    """Context manager that selects a stream; there is one order of work, so it only checks.

    Args:
        stream: A stream of the device, or None.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        if stream is not None and stream.device.type != "tpu":
            raise DeviceError(f"expected a stream of the tpu device, got {stream}")
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        return self.stream

    def __exit__(self, *exception: object) -> None:
        return None


def finish() -> None:
    """Run what deferred mode has recorded in the calling thread."""
    modes.finish()
