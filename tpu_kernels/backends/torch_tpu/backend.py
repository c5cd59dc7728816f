"""Kernels on tensors of the real TorchTPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

from tpu_kernels import _compat_torch_tpu as compat
from tpu_kernels import versions
from tpu_kernels.backends.torch_tpu import cpu_plugin, detection, programs, routes
from tpu_kernels.backends.torch_tpu.executor import Executor
from tpu_kernels.backends.torch_tpu.tracing import current_purpose
from tpu_kernels.config import settings
from tpu_kernels.errors import DeviceError
from tpu_kernels.registry import backend_table, cache_tag
from tpu_kernels.registry.engine import current_mode
from tpu_kernels.registry.numerics import mxu
from tpu_kernels.registry.operator import Operator

_log = logging.getLogger(__name__)


class TorchTpu:
    """The backend for tensors of TorchTPU's device."""

    name = "tpu (TorchTPU)"
    dispatch_key = "PrivateUse1"
    symbolic_sizes = False

    def implement(self, operator: Operator) -> Callable[..., Any]:
        """The operator's implementation on tensors of TorchTPU."""
        make = programs.fast if call_path() == "fast" else programs.public
        return Executor(operator, make).implementation()


@functools.cache
def call_path() -> Literal["fast", "public"]:
    """How calls reach TorchTPU in this process.

    The fast path needs private functions of TorchTPU. It is taken with the releases that it was
    tested with, unless the setting ``TPU_KERNELS_TORCH_TPU_CALLS`` decides.
    """
    wanted = settings().torch_tpu_calls
    if wanted != "auto":
        return "fast" if wanted == "fast" else "public"
    reason = compat.why_no_fast_calls()
    if reason is None:
        return "fast"
    _log.warning("kernel calls go through torch.tpu.pallas.jax_op, which costs more: %s", reason)
    return "public"


def register() -> None:
    """Give every kernel, present and future, an implementation on TorchTPU's device.

    Raises:
        DeviceError: TorchTPU does not own the device in this process.
        VersionError: It does not work with the versions of other packages here.
    """
    if not detection.owns_device():
        raise DeviceError(
            "kernels cannot register with TorchTPU: it does not own the device 'tpu' here",
            hint="import torch_tpu on a machine with a TPU, or start with "
            "`tpu-kernels run --torch-tpu script.py`",
        )
    versions.check("torch_tpu", "torch", "jax", "libtpu")
    backend_table.add_backend(_BACKEND)
    cache_tag.add_source("torch_tpu", _how_programs_are_made)
    routes.register()
    mxu.ask_precision(compat.precision)


def _how_programs_are_made() -> str:
    """What TorchTPU's executables on disk depend on, and their key does not say."""
    purpose = current_purpose()
    plugin = cpu_plugin.active()
    mode = current_mode()
    return f"{plugin} {purpose.target.topology_name} {purpose.interpret} {mode}"


_BACKEND = TorchTpu()
