"""Deferred mode: operators on the simulated device are recorded, and run as one program.

An operator that can be part of a program is not run when it is called: its results are placeholders
(`placeholder`), and the call is entered in the thread's queue (`queue`). Whatever needs a value (a
kernel that is not recorded, `item`, a copy to the CPU, printing, the end of an optimiser's step)
runs the queue first (`running`): as one JAX program (`programs`), or one by one.
"""

from __future__ import annotations

from tpu_kernels.backends.deferred.recording import register
from tpu_kernels.backends.deferred.running import DeferredStats, deferred_stats

__all__ = ["DeferredStats", "deferred_stats", "register"]
