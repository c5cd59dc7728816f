"""Write a TPU kernel once, in Pallas, JAX or Helion; get a complete PyTorch operator.

The names below are imported when first used: ``import tpu_kernels`` costs next to nothing, prints
nothing, starts no accelerator and changes no global state.

Example:
    >>> import jax, torch
    >>> import tpu_kernels as tk
    >>> @tk.tpu_kernel("doc::axpy")
    ... def axpy(x: jax.Array, y: jax.Array, alpha: float = 1.0) -> jax.Array:
    ...     return alpha * x + y
    >>> axpy(torch.ones(2), torch.ones(2), 3.0)
    tensor([4., 4.])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpu_kernels.errors import (
    ArgumentError,
    BundleError,
    CompileError,
    ConfigError,
    DeviceError,
    DTypeError,
    GradientError,
    KernelError,
    MissingBackwardError,
    MissingDependency,
    NameClashError,
    OverrideError,
    SignatureError,
    TraceError,
    TuningError,
    UnsupportedOnTarget,
)

if TYPE_CHECKING:
    from tpu_kernels.backends.graphs import compile_stats
    from tpu_kernels.registry.bundle import load, save_bundle
    from tpu_kernels.registry.decorator import tpu_kernel
    from tpu_kernels.registry.kernel import Kernel
    from tpu_kernels.registry.numerics.scope import numerics
    from tpu_kernels.registry.overrides import (
        Decline,
        explain_overrides,
        override,
        override_debug,
        overrides,
    )
    from tpu_kernels.tuning import TuningCache, Workload, autotune, cache_key, record, select
    from tpu_kernels.verify.check import check
    from tpu_kernels.verify.compiling import compile
    from tpu_kernels.verify.pictures import report

__version__ = "0.1.0"

_PACKAGES = ("integrations", "ops", "testing")

_WHERE = {
    "Decline": "tpu_kernels.registry.overrides",
    "Kernel": "tpu_kernels.registry.kernel",
    "TuningCache": "tpu_kernels.tuning",
    "Workload": "tpu_kernels.tuning",
    "autotune": "tpu_kernels.tuning",
    "cache_key": "tpu_kernels.tuning",
    "check": "tpu_kernels.verify.check",
    "compile": "tpu_kernels.verify.compiling",
    "compile_stats": "tpu_kernels.backends.graphs",
    "explain_overrides": "tpu_kernels.registry.overrides",
    "load": "tpu_kernels.registry.bundle",
    "mark_dynamic": "tpu_kernels.backends.buckets",
    "numerics": "tpu_kernels.registry.numerics.scope",
    "override": "tpu_kernels.registry.overrides",
    "override_debug": "tpu_kernels.registry.overrides",
    "overrides": "tpu_kernels.registry.overrides",
    "record": "tpu_kernels.tuning",
    "report": "tpu_kernels.verify.pictures",
    "save_bundle": "tpu_kernels.registry.bundle",
    "select": "tpu_kernels.tuning",
    "tpu_kernel": "tpu_kernels.registry.decorator",
}

__all__ = [
    "ArgumentError",
    "BundleError",
    "CompileError",
    "ConfigError",
    "DTypeError",
    "Decline",
    "DeviceError",
    "GradientError",
    "Kernel",
    "KernelError",
    "MissingBackwardError",
    "MissingDependency",
    "NameClashError",
    "OverrideError",
    "SignatureError",
    "TraceError",
    "TuningCache",
    "TuningError",
    "UnsupportedOnTarget",
    "Workload",
    "autotune",
    "cache_key",
    "check",
    "compile",
    "compile_stats",
    "explain_overrides",
    "load",
    "mark_dynamic",
    "numerics",
    "override",
    "override_debug",
    "overrides",
    "record",
    "report",
    "save_bundle",
    "select",
    "tpu_kernel",
]


def __getattr__(name: str) -> Any:
    module = f"tpu_kernels.{name}" if name in _PACKAGES else _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'tpu_kernels' has no attribute {name!r}")
    importlib.import_module("tpu_kernels.backends").ready()
    importlib.import_module("tpu_kernels.tuning.lookup").install()
    importlib.import_module("tpu_kernels.integrations").install()
    value: Any = importlib.import_module(module)
    if name not in _PACKAGES:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_PACKAGES})
