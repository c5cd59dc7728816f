"""Every private name of torch_tpu that the package uses, one small function each, with the reason.

Written for torch_tpu 0.2.0. Nothing here is called unless torch_tpu is loaded, and nothing else in
the package may reach into it, so that a new release means reading this file. `missing_names` tells
which of them a release has moved.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PRIVATE_NAMES = (
    "torch_tpu._loader:_init_device",
    "torch_tpu._loader:_DEVICE_INITIALIZED",
    "torch_tpu._internal.pallas.tpu_torch_pallas:register_custom_kernel",
    "torch_tpu._internal.pallas.tpu_torch_pallas:lookup_custom_kernel",
    "torch_tpu._internal.pallas.tpu_torch_pallas:call_custom_kernel",
    "torch_tpu._internal.precision.precision_impl:_get_precision",
    "torch_tpu._internal.precision.precision_impl:Precision",
    "torch_tpu._internal.utils.hardware:get_tpu_device_name",
    "torch_tpu._internal.execution_mode.execution_mode_impl:_get_eager_mode",
    "torch_tpu._internal.execution_mode.execution_mode_impl:_push_eager_mode",
    "torch_tpu._internal.execution_mode.execution_mode_impl:_pop_eager_mode",
    "torch_tpu._internal.execution_mode.execution_mode_impl:_EagerMode.INTERNAL_COMPILE_FX_GRAPH",
    "torch_tpu._internal.compile.tpu_torch_compile:placeholder_like",
    "torch_tpu._internal.compile.tpu_torch_compile:build_mlir",
    "torch_tpu._internal.compile.tpu_torch_compile:serialize_mlir_text",
)
"""``module:attribute`` of everything below."""


def missing_names() -> list[str]:
    """Return the names of `PRIVATE_NAMES` that the installed torch_tpu does not have.

    Importing them loads torch_tpu.
    """
    return [name for name in PRIVATE_NAMES if not _resolves(name)]


def _resolves(name: str) -> bool:
    module, _, attribute = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return False
    return True


# ---------------------------------------------------------------------------------------------
# Device.


def claim_device() -> None:
    """Let torch_tpu claim torch's PrivateUse1 device.

    Its public entry point does so only where it finds a TPU on the PCI bus.
    """
    importlib.import_module("torch_tpu._loader")._init_device("tpu")


def device_claimed() -> bool:
    """Return whether torch_tpu has claimed the device; must not import it."""
    loader = sys.modules.get("torch_tpu._loader")
    return bool(getattr(loader, "_DEVICE_INITIALIZED", False))


def device_name() -> str:
    """Return the name of the chip, such as ``"TPU v6e"``.

    The public ``torch.tpu.get_device_name`` starts the device and warns that it is experimental.
    """
    hardware = importlib.import_module("torch_tpu._internal.utils.hardware")
    return str(hardware.get_tpu_device_name())


# ---------------------------------------------------------------------------------------------
# Kernel calls. The public `torch.tpu.pallas.jax_op` binds signatures and builds a text key in
# Python at each call (57 to 175 µs); these three functions are what it ends in (5 µs).


def kernel_functions() -> tuple[Callable[..., None], Callable[..., bool], Callable[..., Any]]:
    """Return ``register(name, key, serialized_mlir_module=)``, ``lookup(name, key)`` and
    ``call(name, key, inputs=, output_shapes=, donate_argnums=, device_assignment=)``."""
    pallas = importlib.import_module("torch_tpu._internal.pallas.tpu_torch_pallas")
    return pallas.register_custom_kernel, pallas.lookup_custom_kernel, pallas.call_custom_kernel


def why_no_fast_calls() -> str | None:
    """Return why the functions of `kernel_functions` are not to be relied on, or None."""
    version = importlib.metadata.version("torch_tpu")
    if not version.startswith("0.2."):
        return f"torch_tpu {version} is not a release that this was tested with (0.2)"
    gone = [name for name in PRIVATE_NAMES if "_custom_kernel" in name and not _resolves(name)]
    return f"torch_tpu {version} has no {', '.join(gone)}" if gone else None


# ---------------------------------------------------------------------------------------------
# State of the calling thread.


def is_tracing() -> bool:
    """Return whether operations of this thread are recorded for a module instead of run."""
    mode = _execution_mode()
    return bool(mode._get_eager_mode() == mode._EagerMode.INTERNAL_COMPILE_FX_GRAPH)


@functools.cache
def _execution_mode() -> Any:
    # Below the public `torch.tpu.set_eager_mode`, which warns at each use and has no name for the
    # mode of graphs.
    return importlib.import_module("torch_tpu._internal.execution_mode.execution_mode_impl")


def precision() -> str:
    """Return the matmul precision in force: ``"default"``, ``"high"`` or ``"highest"``.

    `torch.get_float32_matmul_precision` does not see the scope of ``torch.tpu.precision``.
    """
    found = importlib.import_module("torch_tpu._internal.precision.precision_impl")._get_precision()
    return str(found).rpartition(".")[2].lower()


# ---------------------------------------------------------------------------------------------
# Lowering without compiling or running.


@contextlib.contextmanager
def tracing_mode() -> Iterator[None]:
    """Provide a scope in which operations are recorded for one StableHLO module."""
    mode = _execution_mode()
    mode._push_eager_mode(mode._EagerMode.INTERNAL_COMPILE_FX_GRAPH)
    try:
        yield
    finally:
        mode._pop_eager_mode()


def placeholder_like(tensor: Any) -> Any:
    """Return a tensor that stands for a program's argument."""
    return importlib.import_module(
        "torch_tpu._internal.compile.tpu_torch_compile"
    ).placeholder_like(tensor)


def stablehlo_text(outputs: Sequence[Any], placeholders: Sequence[Any]) -> str:
    """Return the module that computes outputs from placeholders, as text with locations."""
    compile_ = importlib.import_module("torch_tpu._internal.compile.tpu_torch_compile")
    module = compile_.build_mlir(list(outputs), list(placeholders))
    return str(compile_.serialize_mlir_text(module, enable_debug_info=True))
