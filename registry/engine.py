"""How a kernel's JAX function is to be traced: which interpreter, which integer width, which
numerics, for which chip."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mode:
    """What the caller's scope asks of every kernel call (part of every program's key).

    Attributes:
        numerics: ``"exact"``, or ``"tpu"`` for the rounding of the MXU.
        interpret: The Pallas interpreter that CPU programs use: True, or `pltpu.InterpretParams`
            for checks.
    """

    numerics: str = "exact"
    interpret: Any = True


_DEFAULT = Mode()  # immutable, so that every context may share it
_mode: contextvars.ContextVar[Mode] = contextvars.ContextVar("tpu_kernels_mode", default=_DEFAULT)

current_mode = _mode.get
"""The `Mode` of the calling scope; bound once, since the call path asks on every call."""


@contextlib.contextmanager
def mode_scope(**changes: Any) -> Iterator[Mode]:
    """Change fields of the current `Mode` inside a scope.

    Example:
        >>> with mode_scope(numerics="tpu"):
        ...     current_mode().numerics
        'tpu'
    """
    mode = dataclasses.replace(current_mode(), **changes)
    token = _mode.set(mode)
    try:
        yield mode
    finally:
        _mode.reset(token)


@dataclasses.dataclass(frozen=True)
class Engine:
    """How to trace a kernel's JAX function.

    Attributes:
        interpret: True or `pltpu.InterpretParams` to interpret Pallas calls; False to lower them
            for a TPU.
        x64: Whether 64-bit types stay 64 bits wide (the kernel's policy ``int64="exact"``).
        target: The chip whose tuned configs apply.
    """

    interpret: Any = True
    x64: bool = False
    target: str = "v6e"

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Set everything that tracing depends on; the process's own jax config is never changed."""
        import jax

        with jax.enable_x64(self.x64), interpreting(self.interpret):
            yield


_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "tpu_kernels_interpret", default=None
)

current_interpret = _interpret.get
"""What the program that is being traced wants of Pallas calls; None outside of our own traces."""


@contextlib.contextmanager
def interpreting(interpret: Any) -> Iterator[None]:
    """Trace a program whose Pallas calls are interpreted, or lowered for a TPU.

    Args:
        interpret: True or `pltpu.InterpretParams` to interpret them; False leaves each its own.
    """
    from tpu_kernels import _compat_jax

    token = _interpret.set(interpret)
    try:
        with contextlib.ExitStack() as stack:
            if interpret:
                stack.enter_context(_compat_jax.pallas_interpret(interpret))
            yield
    finally:
        _interpret.reset(token)
