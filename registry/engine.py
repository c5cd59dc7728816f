"""How a kernel's JAX function is to be traced: which interpreter, which integer width, which
numerics, for which chip."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from tpu_kernels import _compat_torch as compat

_KEY = "tpu_kernels.mode"


@dataclasses.dataclass(frozen=True)
class Mode:
    """What the caller's scope asks of every kernel call (part of every program's key).

    Attributes:
        numerics: ``"exact"``, or ``"tpu"`` for the rounding of the MXU.
        interpret: The Pallas interpreter that CPU programs use: True, or `pltpu.InterpretParams`
            for checks.
        precision: Matmul precision where the kernel states none, as JAX names it; None for JAX's
            own default.
        products: What `torch.get_float32_matmul_precision` is overridden by
            (``torch.tpu.precision``), None for nothing.
    """

    numerics: str = "exact"
    interpret: Any = True
    precision: str | None = None
    products: str | None = None


class _State:
    """Where no scope is open anywhere, a call looks no further than `process`."""

    __slots__ = ("lock", "open", "process")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.process = Mode()


_state = _State()


def current_mode() -> Mode:
    """The `Mode` of the calling thread.

    Scopes live in torch's thread state, which the autograd engine carries over to the threads in
    which it runs the backward: a kernel's gradient is computed in the mode of ``backward()``.
    """
    if _state.open:
        try:
            mode = compat.thread_object(_KEY)
        except RuntimeError:
            return _state.process
        if mode is not None:
            return mode  # type: ignore[no-any-return]
    return _state.process


@contextlib.contextmanager
def mode_scope(**changes: Any) -> Iterator[Mode]:
    """Change fields of the current `Mode` inside a scope.

    Example:
        >>> with mode_scope(numerics="tpu"):
        ...     current_mode().numerics
        'tpu'
    """
    mode = dataclasses.replace(current_mode(), **changes)
    before = compat.thread_object(_KEY) if compat.has_thread_object(_KEY) else None
    with _state.lock:
        _state.open += 1
    compat.set_thread_object(_KEY, mode)
    try:
        yield mode
    finally:
        compat.set_thread_object(_KEY, before)
        with _state.lock:
            _state.open -= 1


def change_process_mode(**changes: Any) -> Mode:
    """Change fields of the `Mode` of every thread that is in no scope; returns the one before."""
    with _state.lock:
        before = _state.process
        _state.process = dataclasses.replace(before, **changes)
    return before


@dataclasses.dataclass(frozen=True)
class Engine:
    """How to trace a kernel's JAX function.

    Attributes:
        interpret: True or `pltpu.InterpretParams` to interpret Pallas calls; False to lower them
            for a TPU.
        x64: Whether 64-bit types stay 64 bits wide (the kernel's policy ``int64="exact"``).
        target: The chip whose tuned configs apply.
        numerics: ``"tpu"`` to round float32 products as the MXU does, in programs for the CPU.
        precision: As in `Mode`.
    """

    interpret: Any = True
    x64: bool = False
    target: str = "v6e"
    numerics: str = "exact"
    precision: str | None = None

    @property
    def emulates(self) -> bool:
        """Whether the program is to compute on a CPU what the MXU would."""
        return bool(self.interpret) and self.numerics == "tpu"

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Set everything that tracing depends on; the process's own jax config is never changed."""
        import jax

        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            if self.precision is not None:
                stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(interpreting(self.interpret))
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
