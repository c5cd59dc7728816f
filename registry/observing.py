"""Who wants to know which calls of which kernels programs are made for (recording of workloads).

A program is made once for each combination of shapes, dtypes and static values; that is when
observers hear of the call, not each time it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.registry.operator import Call

Observer = Callable[[KernelSpec, Call, Mapping[str, Any]], None]
"""``observer(spec, call, static values)``; a tunable that the caller left open is None."""

_observers: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Tell an observer of every program that is made from now on."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Tell an observer nothing more; it need not be known."""
    _observers[:] = [other for other in _observers if other is not observer]


def tell(spec: KernelSpec, call: Call, statics: Mapping[str, Any]) -> None:
    """Tell all observers of a call."""
    for observer in tuple(_observers):
        observer(spec, call, statics)
