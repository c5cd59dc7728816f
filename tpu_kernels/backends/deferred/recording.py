"""What deferred mode does with a call: record it, or let it run after what it needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook

from tpu_kernels import _compat_torch as compat
from tpu_kernels._compat_torch import storage_id
from tpu_kernels.backends.deferred.operators import Call, Info, Unrecordable, info_of, learn
from tpu_kernels.backends.deferred.queue import LOCK, LOST, Queue, check_lost, forget_dead
from tpu_kernels.backends.deferred.running import stats
from tpu_kernels.backends.device import capsule, modes
from tpu_kernels.registry.engine import Mode, current_mode
from tpu_kernels.registry.overrides import chain

_KEY = "tpu_kernels.deferred_queue"
_UNKNOWN = object()
_PLAIN_MODE = Mode()

_DROPOUT = torch.ops.aten.native_dropout.default

_infos: dict[OpOverload, Info | str | None] = {}


class _Busy(threading.local):
    on = False


_busy = _Busy()


def register() -> None:
    """Make the mode known."""
    modes.add_mode(modes.DEFERRED, intercept, finish=finish)
    # A step of training ends here, so that each step is the same program.
    register_optimizer_step_post_hook(_after_step)
    compat.before_data_ptr(_settle)


def _settle(storage: int) -> None:
    if capsule.ACTIVE:
        capsule.settle(storage)


def _after_step(*_: Any) -> None:
    if capsule.ACTIVE:
        finish()


def thread_queue() -> Queue:
    """The queue of the calling thread, which its backward passes share."""
    try:
        found = compat.thread_object(_KEY)
    except RuntimeError:
        found = None
    if found is None:
        found = Queue()
        compat.set_thread_object(_KEY, found)
    return found  # type: ignore[no-any-return]


def finish() -> None:
    """Run what the calling thread has recorded."""
    thread_queue().flush()
    if capsule.ACTIVE:
        forget_dead()


def intercept(
    operator: OpOverload, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call; `GO` where it is to run now, after what it needs."""
    if _busy.on:
        return modes.GO
    if operator is _DROPOUT:
        return _dropout(*args, **kwargs)
    info = _infos.get(operator, _UNKNOWN)
    if info is _UNKNOWN:
        info = _infos[operator] = info_of(operator)
    if info is None or _rounded_elsewhere():
        return modes.GO
    if info == "shape":
        return _without_values(kernel, args, kwargs)
    assert isinstance(info, Info)
    try:
        call = Call(args, kwargs)
    except Unrecordable:
        return modes.GO
    entry = info.entries.get(call.key)
    if entry is None:
        return _first(info, call, kernel, args, kwargs)
    if entry.refused is not None:
        return modes.GO
    if info.kernel is not None and current_mode() != _PLAIN_MODE:
        return modes.GO
    if LOST:
        for tensor in call.tensors:
            check_lost(storage_id(tensor))
    with LOCK:
        result = thread_queue().record(entry, call)
    if result is NotImplemented:
        return modes.GO
    stats.recorded += 1
    return result


def _first(
    info: Info,
    call: Call,
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    def run() -> Any:
        _busy.on = True
        try:
            return kernel(*args, **kwargs)
        finally:
            _busy.on = False

    _, result = learn(info, call, run)
    return result


def _without_values(
    kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run what looks at sizes only, on whatever the placeholders point to."""
    _busy.on = True
    capsule.UNSETTLED.on = True
    try:
        return kernel(*args, **kwargs)
    finally:
        capsule.UNSETTLED.on = False
        _busy.on = False


def _dropout(input: torch.Tensor, p: float, train: bool | None) -> Any:
    """Draw the mask now, by its shape alone, and record the products, as the CPU's kernel does."""
    if train is False or not 0 < p < 1 or input.numel() == 0:
        return modes.GO
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    return torch.mul(torch.mul(input, mask), 1 / (1 - p)), mask


def _rounded_elsewhere() -> bool:
    """Whether an override stands in for the CPU's kernels, which programs would not call."""
    return bool(chain.SLOTS) and any(key == "CPU" for _, key in chain.SLOTS)
