"""Tuning: config spaces, search, measuring, selection, the cache, and lookups by calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kernels.tuning.activity import Activity
    from tpu_kernels.tuning.cache import TuningCache
    from tpu_kernels.tuning.cluster import RayWorkers
    from tpu_kernels.tuning.helion_search import search_helion
    from tpu_kernels.tuning.lookup import cache_key
    from tpu_kernels.tuning.recording import record
    from tpu_kernels.tuning.report import TuneReport, TuneRow
    from tpu_kernels.tuning.selection import Selection, select
    from tpu_kernels.tuning.session import Progress
    from tpu_kernels.tuning.tuner import SimulatedTime, TuningFallback, autotune
    from tpu_kernels.tuning.workload import Workload

# Lazy: the cache is read by processes that need neither torch nor JAX.
_WHERE = {
    "Activity": "activity",
    "Progress": "session",
    "RayWorkers": "cluster",
    "SimulatedTime": "tuner",
    "TuneReport": "report",
    "TuneRow": "report",
    "TuningCache": "cache",
    "TuningFallback": "tuner",
    "Selection": "selection",
    "autotune": "tuner",
    "Workload": "workload",
    "cache_key": "lookup",
    "record": "recording",
    "search_helion": "helion_search",
    "select": "selection",
}

__all__ = [
    "Activity",
    "Progress",
    "RayWorkers",
    "Selection",
    "SimulatedTime",
    "TuneReport",
    "TuneRow",
    "TuningCache",
    "TuningFallback",
    "Workload",
    "autotune",
    "cache_key",
    "record",
    "search_helion",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    value = globals()[name] = getattr(module, name)
    return value
