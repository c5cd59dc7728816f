"""Debug mode: every operator is checked as it runs.

- **Indices** outside of what they index raise `BoundsError` before the operator runs.
- The first **NaN** that an operator makes out of finite values raises `NonFiniteError`; the first
  **infinity** warns (`NonFiniteWarning`). Values that were not finite before are somebody else's.
- **Kernels** are checked at the first call of each key (shapes, dtypes, static values) by what
  `kernel_checks` holds; `tpu_kernels.verify` enters races, bounds and uninitialised memory there.

Each report names the operator and the user's line; in a backward pass that is the line of the
forward, which autograd records since its anomaly mode is on as long as the mode is.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_kernels import _compat_torch as compat
from tpu_kernels.backends.device import bounds, modes
from tpu_kernels.backends.device.capsule import to_cpu
from tpu_kernels.backends.device.user_line import in_backward, user_line
from tpu_kernels.errors import BoundsError, NonFiniteError, NonFiniteWarning
from tpu_kernels.registry import backend_table
from tpu_kernels.registry.operator import Operator

kernel_checks: list[Callable[[Operator, Sequence[Any], str | None], None]] = []
"""Called as ``check(operator, arguments, user's line)`` before a kernel runs; raises what it
finds."""

_CHECKS = "tpu_kernels.verify.on_call"

_lock = threading.Lock()
_active = 0
_anomaly = (False, True)  # torch's own setting, to go back to


class _Busy(threading.local):
    on = False


_busy = _Busy()


def register() -> None:
    """Make the mode known."""
    importlib.import_module(_CHECKS).register()  # by name: it is a layer above
    modes.add_mode(modes.DEBUG, intercept, entered=_entered)


def _entered(now: bool) -> None:
    """Let autograd record the lines of the forward while the mode is on."""
    global _active, _anomaly
    with _lock:
        _active += 1 if now else -1
        if now and _active == 1:
            _anomaly = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
            torch.set_anomaly_enabled(True, False)
        elif not now and _active == 0:
            torch.set_anomaly_enabled(*_anomaly)


def intercept(
    operator: OpOverload, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator with its checks."""
    if _busy.on:
        return modes.GO
    _busy.on = True
    try:
        _check_indices(operator, args, kwargs)
        ours = backend_table.operator_of(operator) if operator.namespace != "aten" else None
        if ours is not None:
            arguments = ours.arguments(args, kwargs)
            for check in kernel_checks:
                check(ours, arguments, user_line())
        written_finite = all(_finite(t) for t in _written(operator, args, kwargs))
        result = kernel(*args, **kwargs)
        _check_results(operator, args, kwargs, result, written_finite)
    finally:
        _busy.on = False
    return result


# ---------------------------------------------------------------------- indices
def _check_indices(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if operator.namespace != "aten":
        return
    arguments = bounds.by_name(compat.schema_of(operator), args, kwargs)
    for found in bounds.indices(operator._opname, arguments):
        wrong = bounds.offender(found, to_cpu(found.indices))
        if wrong is not None:
            raise BoundsError(
                f"{_called(operator)}: index {wrong} is out of bounds for {found.what}",
                where=user_line(),
                hint="a TPU would clamp or drop it without a word",
            )


# ---------------------------------------------------------------------- NaN and infinity
def _check_results(
    operator: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    written_finite: bool,
) -> None:
    made = [*_tensors(result), *_written(operator, args, kwargs)]
    wrong = next((t for t in made if not _finite(t)), None)
    if wrong is None or not written_finite:
        return
    if torch.Tag.nondeterministic_seeded in operator.tags or operator._opname.startswith("empty"):
        return
    written = {id(t) for t in _written(operator, args, kwargs)}
    given = [t for t in _tensors((args, tuple(kwargs.values()))) if id(t) not in written]
    if not all(_finite(t) for t in given) or not _finite_numbers((args, tuple(kwargs.values()))):
        return
    values = to_cpu(wrong)
    where = user_line()
    shape = list(wrong.shape)
    if bool(values.isnan().any()):
        count = int(values.isnan().sum())
        raise NonFiniteError(
            f"{_called(operator)} made {count} NaN of finite values, in a result of shape {shape}",
            where=where,
            hint="the first operator that did; strict mode would go on",
        )
    count = int(values.isinf().sum())
    warnings.warn(
        f"{_called(operator)} made {count} infinite values of finite ones, in a result of shape "
        f"{shape}, at {where}",
        NonFiniteWarning,
        stacklevel=2,
    )


def _called(operator: OpOverload) -> str:
    node = in_backward()
    return operator.name() if node is None else f"{operator.name()} (in {node})"


def _finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2:
        return True
    return bool(torch.isfinite(to_cpu(tensor)).all())


def _finite_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_finite_numbers(each) for each in value)
    return not isinstance(value, float) or value - value == 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _written(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The arguments that the operator reads and writes; an ``out=`` is a result alone."""
    for argument, value in zip(compat.schema_of(operator).arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)
