"""Submodules of ``torch.tpu``: what of TorchTPU's can be meant on the simulated device."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from tpu_kernels.errors import ArgumentError

_options: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "tpu_kernels_compiler_options", default=None
)


@contextlib.contextmanager
def custom_compiler_options(options: Mapping[str, str]) -> Iterator[None]:
    """Accept options for the TPU's compiler, which does not compile what runs here.

    Args:
        options: Values by name of an option of XLA.

    Raises:
        ArgumentError: If it is no mapping of strings.

    Example:
        >>> import torch, tpu_kernels.device
        >>> with torch.tpu.compiler.custom_compiler_options({"xla_optimization_level": "O1"}):
        ...     torch.ones(1, device="tpu").item()
        1.0
    """
    if not isinstance(options, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str) for name, value in options.items()
    ):
        raise ArgumentError(
            f"compiler options are a dict of strings, not {options!r}",
            hint='for example {"xla_optimization_level": "O1"}',
        )
    token = _options.set({**(_options.get() or {}), **options})
    try:
        yield
    finally:
        _options.reset(token)


def optimization_barrier(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as they are: no compiler moves code around here.

    Args:
        inputs: Tensors.

    Returns:
        New tensors of the same values.
    """
    return [tensor.clone() for tensor in inputs]


def register(device_module: Any) -> None:
    """Attach the submodules to ``torch.tpu``.

    Args:
        device_module: ``torch.tpu``.
    """
    submodules: dict[str, dict[str, Any]] = {
        "compiler": {"custom_compiler_options": custom_compiler_options},
        "ops": {"optimization_barrier": optimization_barrier},
    }
    for name, contents in submodules.items():
        full = f"torch.tpu.{name}"
        module = ModuleType(full, f"The part of TorchTPU's {full} that can be simulated.")
        vars(module).update(contents, __all__=sorted(contents))
        setattr(device_module, name, module)
        sys.modules[full] = module
