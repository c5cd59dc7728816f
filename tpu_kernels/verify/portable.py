"""Bound kernels as functions that another process can unpickle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tpu_kernels.compiler import pickling
from tpu_kernels.errors import KernelError
from tpu_kernels.registry.binding import Bound
from tpu_kernels.registry.kernel import Kernel


class KernelFunction:
    """A bound kernel as a function that travels by the kernel's name.

    A worker imports the kernel's module instead of unpickling its code, so the module may hold what
    has no pickle: `jax.custom_vjp` functions, jitted functions, locks.

    Args:
        bound: The kernel with arguments and config.
        interpret: False, True or `pltpu.InterpretParams`: how Pallas calls are interpreted.
        target: Chip, or None for the simulated one.
    """

    def __init__(self, bound: Bound, interpret: Any, target: str | None) -> None:
        self._bound = bound
        self._interpret = interpret
        self._target = target
        self._function = bound.function(interpret=interpret, target=target)
        self.__name__ = self.__qualname__ = bound.kernel.spec.opname

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run or trace the kernel."""
        return tuple(self._function(*arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        bound = self._bound
        digest = bound.kernel.spec.source.digest
        call = (bound.kernel, bound.call, bound.dynamics)
        return _rebuild, (*call, self._interpret, self._target, digest)


def _rebuild(
    kernel: Kernel,
    call: Any,
    dynamics: tuple[Any, ...],
    interpret: Any,
    target: str | None,
    digest: str,
) -> KernelFunction:
    if kernel.spec.source.digest != digest:
        raise KernelError(
            f"kernel {kernel.name!r} was changed on disk while it is being worked on",
            where=str(kernel.spec.source),
            hint="start again",
        )
    return KernelFunction(Bound(kernel, call, (), dynamics), interpret, target)


def portable(bound: Bound, interpret: Any, target: str | None = None) -> Callable[..., Any]:
    """Return a bound kernel as a JAX function of flat arrays that can be sent to a worker.

    Args:
        bound: The kernel with arguments and config.
        interpret: False, True or `pltpu.InterpretParams`.
        target: Chip whose configuration applies; the simulated chip by default.

    Returns:
        The function; a kernel at a module's top level travels by name, others by value.
    """
    if _is_at_module_level(bound.kernel):
        return KernelFunction(bound, interpret, target)
    return bound.function(interpret=interpret, target=target)


def _is_at_module_level(kernel: Kernel) -> bool:
    module = kernel.spec.source.module
    if not pickling.is_importable(module):
        return False
    return any(value is kernel for value in vars(sys.modules[module]).values())
