"""A Helion kernel on a GPU: what Helion's Triton backend generates, under the same operator."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tpu_kernels import _compat_helion
from tpu_kernels.dsl import helion_config
from tpu_kernels.dsl.helion_capture import for_helion
from tpu_kernels.errors import ConfigError, MissingDependency

_OF_PALLAS = "pallas_"  # configs tuned for a TPU say things that Triton has no use for


class GpuFunction:
    """Runs a Helion kernel through Triton.

    Args:
        kernel: The `helion.Kernel`.
        mutates: Names of the arguments that it writes to.
        where: Its ``file:line``.
    """

    def __init__(self, kernel: Any, mutates: Sequence[str], where: str) -> None:
        self._source = kernel
        self._mutates = tuple(mutates)
        self._where = where
        self._kernel: Any = None

    def __call__(self, values: Mapping[str, Any], config: Any = None) -> Any:
        """Run the kernel.

        Args:
            values: Its arguments by name; tensors on one GPU (or on the CPU, in Triton's
                interpreter).
            config: A `helion.Config` or its text; None for the kernel's own, or Helion's default.

        Returns:
            What the kernel returns, as fresh row-major tensors; arguments are written in place.

        Raises:
            ConfigError: The config is none of this kernel's.
            MissingDependency: Triton is not installed.
        """
        if self._kernel is None:
            if importlib.util.find_spec("triton") is None:
                raise MissingDependency(
                    "a Helion kernel on a GPU needs Triton", hint="pip install 'tpu_kernels[gpu]'"
                )
            self._kernel = _compat_helion.retarget(self._source, interpret=False, backend="triton")
        kernel = self._kernel
        arguments = for_helion([values[name] for name in kernel.signature.parameters])
        bound = kernel.bind(arguments)
        result = bound.compile_config(self._config(bound, config))(*arguments)
        own = [values[name] for name in self._mutates]
        return tree_map_only(torch.Tensor, lambda t: _fresh(t, own), result)

    def _config(self, bound: Any, config: Any) -> Any:
        import helion

        if config is None:
            own = bound.kernel.configs
            chosen = own[0] if own else bound.config_spec.default_config()
        else:
            told = json.loads(helion_config.to_text(config))
            chosen = helion.Config(
                **{k: v for k, v in told.items() if not k.startswith(_OF_PALLAS)}
            )
        try:
            return _compat_helion.normalized(bound, chosen)
        except helion.exc.InvalidConfig as error:
            raise ConfigError(
                f"Helion's Triton backend does not take {chosen!r}: {error}", where=self._where
            ) from error


def _fresh(result: torch.Tensor, written: Sequence[Any]) -> torch.Tensor:
    """An operator's result shares memory with no argument, and is contiguous."""
    shared = any(
        isinstance(t, torch.Tensor)
        and t.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
        for t in written
    )
    return result.clone(memory_format=torch.contiguous_format) if shared else result.contiguous()
