"""A Helion kernel as a traceable JAX function."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_helion
from tpu_kernels.dsl import dtypes, helion_config
from tpu_kernels.dsl.helion_capture import Capture, capture, for_helion, in_fresh_thread

_log = logging.getLogger(__name__)
_VMEM = 128 * 2**20  # what Helion's heuristics count with where no chip is the target


class HelionFunction:
    """What a `KernelSpec` of a Helion kernel has for `jax_fn`.

    Args:
        kernel: The `helion.Kernel`.
        mutates: Names of the arguments that it writes to.
        where: Its ``file:line``.
        config_name: The parameter that takes the config.
        digest: Identity of the kernel's code and settings, for copies in other processes.

    Attributes:
        helion_kernel: The kernel as its author made it.
    """

    def __init__(
        self,
        kernel: Any,
        mutates: Sequence[str],
        where: str,
        config_name: str = helion_config.NAME,
        digest: str = "",
    ) -> None:
        self.helion_kernel = kernel
        self.mutates = tuple(mutates)
        self.where = where
        self.config_name = config_name
        self.digest = digest
        self.__wrapped__ = kernel.fn
        self.__name__ = kernel.fn.__name__
        self.__qualname__ = kernel.fn.__qualname__
        self.__module__ = kernel.fn.__module__
        self.__doc__ = kernel.fn.__doc__
        self._captures: dict[Any, Capture] = {}
        self._variants: dict[bool, Any] = {}
        self._slow: set[Any] = set()
        self._lock = threading.RLock()

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the Helion kernel's own parameters."""
        return tuple(inspect.signature(self.helion_kernel.fn).parameters)

    def __call__(self, *args: Any, interpret: Any = None, **kwargs: Any) -> Any:
        """Trace the kernel on JAX arrays; static values are plain Python values."""
        config = kwargs.pop(self.config_name, None)
        values = dict(zip(self.parameters, args, strict=False))
        values.update(kwargs)
        ordered = [values[name] for name in self.parameters]
        if interpret is True:
            result, written = self._interpreted(ordered, config)
        else:
            result, written = self._evaluated(ordered, config, interpret)
        return (result, written) if self.mutates else result

    def _evaluated(self, ordered: Sequence[Any], config: Any, interpret: Any) -> Any:
        found = self._capture_of(ordered, config, interpret=False)
        return _host_code().evaluate(found.graph, _arrays(ordered), interpret, self.where)

    def _interpreted(self, ordered: Sequence[Any], config: Any) -> Any:
        """In Pallas's plain interpreter; where that cannot run the kernel, in the TPU interpreter,
        which simulates what the compiler would be given and is some hundred times slower."""
        key = (*map(_key, map(_stand_in, ordered)), config)
        refusal = None
        if key not in self._slow:
            try:
                found = self._capture_of(ordered, config, interpret=True)
                return _host_code().plainly(found.graph, _arrays(ordered), self.where)
            except Exception as error:
                # Pallas's interpreter has no list of what it lacks. What is wrong with the kernel
                # itself is raised again below.
                refusal = f"{type(error).__name__}: {error}".splitlines()[0]
        with _host_code().tpu_interpreter() as parameters:
            result = self._evaluated(ordered, config, parameters)
        if refusal is not None:
            self._slow.add(key)
            _log.info("%s runs in the TPU interpreter: %s", self.__qualname__, refusal)
        return result

    def _capture_of(self, ordered: Sequence[Any], config: Any, *, interpret: bool) -> Capture:
        vmem = _host_code().vmem_of_target()
        arguments = [_stand_in(v) for v in ordered]
        return self.captured(arguments, config, interpret=interpret, vmem_bytes=vmem)

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
        found = self._captures.get(key)
        if found is not None:
            return found
        # The locks in the order in which Dynamo's thread takes them: it holds the first already.
        with _compat_helion.compile_lock(), self._lock:
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

    def search(
        self,
        values: Mapping[str, Any],
        price: Callable[[Sequence[str]], Sequence[float]],
        *,
        algorithm: str,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        """Let one of Helion's searches walk through its config space.

        Args:
            values: Arguments by name.
            price: Gives the cost of each of several configs, which it gets as texts; infinite for
                one that does not work. What it raises ends the search.
            algorithm: Name of the search in `helion.autotuner.search_algorithms`.
            seed: Makes it repeatable.
            options: Keywords of the search.
        """
        ordered = for_helion([_stand_in(values[name]) for name in self.parameters])
        # A variant of its own: a search changes settings of what it searches.
        kernel = _compat_helion.retarget(self.helion_kernel, interpret=False)

        def priced(configs: Sequence[Any]) -> Sequence[float]:
            return price([helion_config.to_text(c) for c in configs])

        def work() -> None:
            with _compat_helion.vmem_limit(_VMEM):
                bound = kernel.bind(ordered)
                _compat_helion.run_search(
                    bound, ordered, algorithm, priced, seed=seed, options=options
                )

        in_fresh_thread(work)

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
        options = (self.mutates, self.where, self.config_name, self.digest)
        return _rebuild, (fn, texts, static, *options)


_KEPT = 8
_rebuilt: dict[str, HelionFunction] = {}
"""What this process has unpickled: the candidates of a search share what Helion made of one."""


def _rebuild(
    fn: Any, configs: list[str], static: bool, mutates: Any, where: str, name: str, digest: str
) -> HelionFunction:
    """Unpickle in another process: the kernel's function travels, what Helion made of it not."""
    import helion

    key = "\n".join((digest, where, name, *mutates))
    if digest and key in _rebuilt:
        return _rebuilt[key]
    if _compat_helion.is_kernel(fn):
        kernel = fn
    else:
        made = [helion_config.from_text(text) for text in configs]
        kernel = helion.kernel(fn, configs=made or None, static_shapes=static)
    while len(_rebuilt) >= _KEPT:
        del _rebuilt[next(iter(_rebuilt))]
    _rebuilt[key] = HelionFunction(kernel, mutates, where, name, digest)
    return _rebuilt[key]


def _host_code() -> Any:
    # The table of lowerings lies above this layer: it is found when it is needed, by name.
    return importlib.import_module("tpu_kernels.lowering.host_code")


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
