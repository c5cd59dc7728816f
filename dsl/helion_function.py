"""A Helion kernel as a traceable JAX function."""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_helion
from tpu_kernels.dsl import dtypes, helion_config
from tpu_kernels.dsl.helion_capture import Capture, capture, for_helion, in_fresh_thread

_VMEM = 128 * 2**20  # what Helion's heuristics count with where no chip is the target


class HelionFunction:
    """What a `KernelSpec` of a Helion kernel has for `jax_fn`.

    Args:
        kernel: The `helion.Kernel`.
        mutates: Names of the arguments that it writes to.
        where: Its ``file:line``.
        config_name: The parameter that takes the config.

    Attributes:
        helion_kernel: The kernel as its author made it.
    """

    def __init__(
        self, kernel: Any, mutates: Sequence[str], where: str, config_name: str = helion_config.NAME
    ) -> None:
        self.helion_kernel = kernel
        self.mutates = tuple(mutates)
        self.where = where
        self.config_name = config_name
        self.__wrapped__ = kernel.fn
        self.__name__ = kernel.fn.__name__
        self.__qualname__ = kernel.fn.__qualname__
        self.__module__ = kernel.fn.__module__
        self.__doc__ = kernel.fn.__doc__
        self._captures: dict[Any, Capture] = {}
        self._variants: dict[bool, Any] = {}
        self._lock = threading.RLock()

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the Helion kernel's own parameters."""
        return tuple(inspect.signature(self.helion_kernel.fn).parameters)

    def __call__(self, *args: Any, interpret: Any = None, **kwargs: Any) -> Any:
        """Trace the kernel on JAX arrays; static values are plain Python values."""
        # The table of lowerings lies above this layer: it is found when it is needed, by name.
        host_code = importlib.import_module("tpu_kernels.lowering.host_code")

        config = kwargs.pop(self.config_name, None)
        values = dict(zip(self.parameters, args, strict=False))
        values.update(kwargs)
        ordered = [values[name] for name in self.parameters]
        plain = interpret is True
        found = self.captured(
            [_stand_in(v) for v in ordered],
            config,
            interpret=plain,
            vmem_bytes=host_code.vmem_of_target(),
        )
        result, written = host_code.evaluate(found.graph, _arrays(ordered), interpret, self.where)
        return (result, written) if self.mutates else result

    def captured(
        self,
        arguments: Sequence[Any],
        config: Any = None,
        *,
        interpret: bool = False,
        vmem_bytes: int | None = None,
    ) -> Capture:
        """The capture of a call, made once for its shapes, dtypes, static values and config.

        Args:
            arguments: One for each parameter; tensors by shape and dtype only.
            config: A `helion.Config` or its text, or None.
            interpret: Whether the code is for Pallas's plain interpreter.
            vmem_bytes: The VMEM of the target.

        Returns:
            The `Capture`.
        """
        vmem = vmem_bytes or _VMEM
        text = None if config is None else helion_config.to_text(config)
        key = (tuple(map(_key, arguments)), text, interpret, vmem)
        with self._lock:
            if key not in self._captures:
                self._captures[key] = capture(
                    self._variant(interpret),
                    arguments,
                    config=None if text is None else helion_config.from_text(text),
                    interpret=interpret,
                    vmem_bytes=vmem,
                    mutates=self.mutates,
                    where=self.where,
                )
            return self._captures[key]

    def code(self, values: Mapping[str, Any]) -> str:
        """The Pallas code that Helion generates for arguments by name."""
        ordered = [_stand_in(values[name]) for name in self.parameters]
        return self.captured(ordered, values.get(self.config_name)).code

    def space(self, values: Mapping[str, Any]) -> list[dict[str, str]]:
        """Configs worth trying for arguments by name, as `helion_space.configs_of` lists them."""
        from tpu_kernels.dsl.helion_space import configs_of

        ordered = [_stand_in(values[name]) for name in self.parameters]
        kernel = self._variant(False)

        def work() -> list[str]:
            with _compat_helion.vmem_limit(_VMEM):
                return configs_of(kernel.bind(for_helion(ordered)))

        found: list[str] = in_fresh_thread(work)
        return [{self.config_name: text} for text in found]

    def _variant(self, interpret: bool) -> Any:
        if interpret not in self._variants:
            _compat_helion.check()
            self._variants[interpret] = _compat_helion.retarget(
                self.helion_kernel, interpret=interpret
            )
        return self._variants[interpret]

    def __reduce__(self) -> tuple[Any, ...]:
        fn, settings = self.helion_kernel.fn, self.helion_kernel.configs
        texts = [helion_config.to_text(c) for c in settings]
        static = self.helion_kernel.settings.static_shapes
        return _rebuild, (fn, texts, static, self.mutates, self.where, self.config_name)


def _rebuild(
    fn: Any, configs: list[str], static: bool, mutates: Any, where: str, name: str
) -> HelionFunction:
    """Unpickle in another process: the kernel's function travels, what Helion made of it not."""
    import helion

    if _compat_helion.is_kernel(fn):
        kernel = fn
    else:
        made = [helion_config.from_text(text) for text in configs]
        kernel = helion.kernel(fn, configs=made or None, static_shapes=static)
    return HelionFunction(kernel, mutates, where, name)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _stand_in(value: Any) -> Any:
    """A meta tensor for an array, in lists too; other values unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_in(v) for v in value)
    if not _is_array(value):
        return value
    dtype = dtypes.to_torch(value.dtype)
    return torch.empty(tuple(int(n) for n in value.shape), dtype=dtype, device="meta")


def _arrays(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += [v for v in value if _is_array(v)]
        elif _is_array(value):
            found.append(value)
    return found


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value).__name__, repr(value)
