"""The real TPU compiler, ahead of time, on a machine without a TPU."""

from __future__ import annotations

from tpu_kernels.compiler.chips import Chip, Target, chips, resolve
from tpu_kernels.compiler.compile import Request, compile_all, compile_function
from tpu_kernels.compiler.pool import shutdown, worker_pool
from tpu_kernels.compiler.report import CompileReport, CompileReports
from tpu_kernels.compiler.versions import jax_version, libtpu_version, why_unavailable

__all__ = [
    "Chip",
    "CompileReport",
    "CompileReports",
    "Request",
    "Target",
    "chips",
    "compile_all",
    "compile_function",
    "jax_version",
    "libtpu_version",
    "resolve",
    "shutdown",
    "why_unavailable",
    "worker_pool",
]
