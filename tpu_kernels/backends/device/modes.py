"""TorchTPU's eager modes: how operators on the simulated device are run.

Strict mode costs nothing: a kernel looks at one number, `FLAGS.special`, which counts what could
lead out of it. Only where that is not zero does a call ask for its thread's mode. A mode's
interceptor is loaded when the mode is entered for the first time.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._ops import OpOverload

from tpu_kernels import _compat_torch as compat
from tpu_kernels.backends.device.capsule import ACTIVE, settle_all
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError

__all__ = [
    "ACTIVE",
    "FLAGS",
    "GO",
    "EagerMode",
    "add_mode",
    "current",
    "finish",
    "from_environment",
    "intercept",
    "set_eager_mode",
    "set_process",
    "settle_all",
]

_KEY = "tpu_kernels.eager_mode"


class EagerMode(enum.Enum):
    """How operators on tensors of the device are run, with TorchTPU's names.

    Attributes:
        DEFER_NEVER: One by one, when they are called: the default.
        DEFER_NEVER_AND_LAUNCH_BLOCKING: One by one and checked: the first NaN, indices out of
            bounds and kernels are reported with the line that called them.
        DEFER_AND_FUSE: Recorded, and run as one program when a value is needed.
    """

    DEFER_AND_FUSE = "defer_and_fuse"
    DEFER_NEVER = "defer_never"
    DEFER_NEVER_AND_LAUNCH_BLOCKING = "defer_never_and_launch_blocking"
    _INTERNAL_COMPILE_FX_GRAPH = "internal_compile_fx_graph"


STRICT = EagerMode.DEFER_NEVER
DEBUG = EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
DEFERRED = EagerMode.DEFER_AND_FUSE

GO: Any = object()
"""What an interceptor returns where the kernel is to run as in strict mode."""

Interceptor = Callable[[OpOverload, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_MODULES = {
    DEBUG: "tpu_kernels.backends.device.debug",
    DEFERRED: "tpu_kernels.backends.deferred",
}


class Flags:
    """What a kernel looks at before it takes the shortest way.

    Attributes:
        special: How many scopes are open, plus one if the process's mode is not strict.
    """

    __slots__ = ("special",)

    def __init__(self) -> None:
        self.special = 0


FLAGS = Flags()

_lock = threading.Lock()
_process = STRICT
_scopes = 0
_interceptors: dict[EagerMode, Interceptor] = {}
_finishing: dict[EagerMode, Callable[[], None]] = {}
_entering: dict[EagerMode, Callable[[bool], None]] = {}


def current() -> EagerMode:
    """Return the mode of the calling thread, which backward passes that it starts share."""
    if _scopes:
        try:
            mode = compat.thread_object(_KEY)
        except RuntimeError:
            return _process
        if mode is not None:
            return mode  # type: ignore[no-any-return]
    return _process


def set_process(mode: EagerMode) -> None:
    """Set the mode of every thread that is in no scope: ``torch.tpu.eager_mode = mode``.

    Args:
        mode: The mode.

    Raises:
        ArgumentError: If it is no `EagerMode`, or one of TorchTPU's internal ones.
    """
    global _process
    _prepare(mode)
    finish()
    with _lock:
        before, _process = _process, mode
        _count()
    _entered(mode, True)
    _entered(before, False)


@contextlib.contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Run a block's operators on the device in another mode; blocks nest.

    It holds for the calling thread and the backward passes that it starts.

    Args:
        mode: The mode.

    Raises:
        ArgumentError: If it is no `EagerMode`, or one of TorchTPU's internal ones.

    Example:
        >>> import torch, tpu_kernels.device
        >>> with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        ...     y = torch.ones(2, device="tpu") * 3
        >>> y.tolist()
        [3.0, 3.0]
    """
    global _scopes
    _prepare(mode)
    before = compat.thread_object(_KEY) if compat.has_thread_object(_KEY) else None
    finish()
    with _lock:
        _scopes += 1
        _count()
    _entered(mode, True)
    try:
        compat.set_thread_object(_KEY, mode)
        yield
    finally:
        try:
            finish()
        finally:
            compat.set_thread_object(_KEY, before)
            _entered(mode, False)
            with _lock:
                _scopes -= 1
                _count()


def _count() -> None:
    FLAGS.special = _scopes + (_process is not STRICT)


def _entered(mode: EagerMode, now: bool) -> None:
    told = _entering.get(mode)
    if told is not None:
        told(now)


def _prepare(mode: EagerMode) -> None:
    """Check a mode and load what it needs, before anything changes."""
    if not isinstance(mode, EagerMode):
        raise ArgumentError(
            f"an eager mode is a torch.tpu.EagerMode, not {mode!r}",
            hint="torch.tpu.EagerMode.DEFER_NEVER is the default",
        )
    if mode is EagerMode._INTERNAL_COMPILE_FX_GRAPH:
        raise ArgumentError(
            f"{mode} is a mode that TorchTPU uses inside of torch.compile",
            hint="use torch.compile(..., backend='tpu')",
        )
    name = _MODULES.get(mode)
    if name is not None and mode not in _interceptors:
        # By name: they are above this module, which kernels import.
        importlib.import_module(name).register()


def finish() -> None:
    """Run what the calling thread has deferred."""
    if FLAGS.special:
        run = _finishing.get(current())
        if run is not None:
            run()


def add_mode(
    mode: EagerMode,
    interceptor: Interceptor,
    *,
    finish: Callable[[], None] | None = None,
    entered: Callable[[bool], None] | None = None,
) -> None:
    """Say what a mode does.

    Args:
        mode: The mode.
        interceptor: Called as ``interceptor(operator, kernel, args, kwargs)`` instead of the
            strict kernel; returns the operator's result, or `GO`.
        finish: Called where all work of the calling thread is to be done.
        entered: Called with True when a scope or the process enters the mode, with False when it
            leaves it.
    """
    if finish is not None:
        _finishing[mode] = finish
    if entered is not None:
        _entering[mode] = entered
    _interceptors[mode] = interceptor


def intercept(
    operator: OpOverload, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator as the calling thread's mode says; `GO` to run it as in strict mode.

    Args:
        operator: The operator.
        kernel: Its strict kernel, which asks again when it is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    interceptor = _interceptors.get(current())
    return GO if interceptor is None else interceptor(operator, kernel, args, kwargs)


def from_environment() -> None:
    """Start in the mode that ``TORCH_TPU_LAUNCH_BLOCKING`` or ``TORCH_TPU_DEFER_AND_FUSE`` names;
    the first of the two wins."""
    if settings().launch_blocking:
        set_process(DEBUG)
    elif settings().defer_and_fuse:
        set_process(DEFERRED)
