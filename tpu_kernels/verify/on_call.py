"""Debug mode's check of kernels: the interpreter's passes, once for each key of a call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tpu_kernels.backends.device import debug
from tpu_kernels.errors import CheckError
from tpu_kernels.registry import lookup
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.operator import Operator
from tpu_kernels.verify.check import check

log = logging.getLogger("tpu_kernels.debug")

PASSES = ("races", "bounds", "nan")

_lock = threading.Lock()
_found: dict[Any, str | None] = {}


def register() -> None:
    """Let debug mode ask."""
    if check_call not in debug.kernel_checks:
        debug.kernel_checks.append(check_call)


def check_call(operator: Operator, arguments: Sequence[Any], where: str | None) -> None:
    """Check a call of a kernel, unless one like it has been checked.

    Args:
        operator: The kernel's operator, or the one that its forward uses under autograd.
        arguments: Arguments in schema order.
        where: The user's line.

    Raises:
        CheckError: A pass failed, for this call or an earlier one like it.
    """
    kernel = lookup(operator.definition.kernel)
    if kernel is None:
        return
    parameters = kernel.operator.definition.parameters
    if operator.definition.parameters[: len(parameters)] != parameters:
        return  # a backward or a batched variant, which JAX derives from the kernel
    given = arguments[: len(parameters)]
    key = (kernel.name, kernel.spec.source, _key(given))
    with _lock:
        known = key in _found
    if not known:
        problem = _problem(kernel, given)
        with _lock:
            _found[key] = problem
    if _found[key] is not None:
        raise CheckError(
            f"kernel {kernel.name!r} fails a check of debug mode\n{_found[key]}",
            where=where,
            hint="tpu_kernels.check(kernel, args) has the whole report",
        )


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(each) for each in value)
    return type(value), repr(value)


def _problem(kernel: Kernel, arguments: Sequence[Any]) -> str | None:
    args, kwargs = [], {}
    for parameter, value in zip(kernel.operator.definition.parameters, arguments, strict=True):
        if parameter.tunable and value is None:
            continue
        passed = value if parameter.kind.is_tensor else parameter.for_kernel(value)
        if parameter.keyword_only:
            kwargs[parameter.name] = passed
        else:
            args.append(passed)
    tunables = {p.name for p in kernel.operator.definition.parameters if p.tunable}
    config = {name: value for name, value in kwargs.items() if name in tunables}
    kwargs = {name: value for name, value in kwargs.items() if name not in tunables}
    report = check(kernel, args, config=config or None, passes=PASSES, **kwargs)
    for row in report.rows:
        if row.status == "unavailable":
            log.warning("debug mode cannot check kernel %r: %s", kernel.name, row.what)
            break
    wrong = [row for row in report.rows if row.status == "failed"]
    return "\n".join(row.text for row in wrong) or None
