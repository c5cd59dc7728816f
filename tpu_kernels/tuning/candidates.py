"""From configs to candidates: bound to the arguments, ready to be sent to a worker, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kernels.compiler import pickling
from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.diagnose import diagnose
from tpu_kernels.compiler.pool import Job, Outcome
from tpu_kernels.errors import KernelError
from tpu_kernels.registry.binding import Bound
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import child, space
from tpu_kernels.tuning.child import Failure, failure_of
from tpu_kernels.tuning.records import canonical, encode
from tpu_kernels.tuning.report import TuneRow
from tpu_kernels.verify.portable import portable

_REASON_LIMIT = 400
_START_S = 120.0  # for imports in a worker, on a machine that may be busy
# What a kernel, Pallas or JAX raises for a block or value that it does not take.
_REFUSALS = ("ValueError", "TypeError", "AssertionError", "ZeroDivisionError", "IndexError")


@dataclass(frozen=True)
class Candidate:
    """A config bound to the arguments of a call.

    Attributes:
        index: Its place among the configs.
        config: The config with the values as they were given.
        bound: The kernel with arguments and config.
    """

    index: int
    config: Mapping[str, Any]
    bound: Bound

    def function(self, *, interpret: bool, target: str | None = None) -> Callable[..., Any]:
        """Return the candidate as a JAX function of flat arrays that can be sent to a worker."""
        return portable(self.bound, interpret, target)


def named_arguments(
    kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name; what a config has to supply is left out."""
    bound = inspect.signature(kernel).bind_partial(*args, **kwargs)
    given = set(bound.arguments)
    bound.apply_defaults()
    tunables = kernel.spec.tunables
    return {n: v for n, v in bound.arguments.items() if n in given or n not in tunables}


def prepare(
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    configs: Sequence[Mapping[str, Any]],
    constraints: Any,
) -> list[Candidate | TuneRow]:
    """Bind every config; those that violate a constraint or do not bind become rows at once.

    Args:
        kernel: The kernel.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        configs: The configs.
        constraints: See `space.violation`.

    Returns:
        For each config a candidate, or its row.
    """
    arguments = {**kernel.choices.declared, **named_arguments(kernel, args, kwargs)}
    found: list[Candidate | TuneRow] = []
    for index, config in enumerate(configs):
        reason = space.violation(constraints, config, arguments, kernel=kernel.name)
        if reason is not None:
            found.append(TuneRow(config, "invalid", reason))
            continue
        try:
            bound = kernel.bind(*args, config=config, **kwargs)
        except KernelError as error:
            found.append(TuneRow(config, "invalid", one_line(str(error))))
            continue
        found.append(Candidate(index, config, bound))
    return found


def current_index(
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    configs: Sequence[Mapping[str, Any]],
    target: str,
) -> int | None:
    """Find the config that a call uses now among the candidates."""
    try:
        bound = kernel.bind(*args, **kwargs)
        values = {**bound.static, **bound.choice(target).config}
    except KernelError:
        return None  # the call needs a config to be complete
    for index, config in enumerate(configs):
        now = {name: values.get(name) for name in config}
        if canonical(encode(config)) == canonical(encode(now)):
            return index
    return None


def call_job(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: float,
    *,
    files: tuple[str, ...] = (),
) -> Job | None:
    """Pack a call for a worker, None if something in it cannot be pickled.

    Args:
        function: A function of `child`.
        arguments: Its arguments.
        timeout_s: Seconds that it may take; the start of the worker and imports do not count.
        files: Files that it reads.

    Returns:
        The job for a pool; `lost_row` tells what became of it.
    """
    payload = pickling.dumps((function, arguments))
    if payload is None:
        return None
    runs = function is not child.inspect
    limited = pickling.dumps((child.limited, (payload, timeout_s, runs)))
    if limited is None:
        return None
    request = {"kind": "call", "sys_path": pickling.import_path()}
    return Job(request, limited, timeout_s + _START_S, files=files)


def lost_row(config: Mapping[str, Any], outcome: Outcome, timeout_s: float) -> TuneRow | None:
    """Return the row of a candidate whose worker gave no answer, None if it did.

    Args:
        config: The candidate's config.
        outcome: What became of its job.
        timeout_s: The limit that it had.
    """
    if outcome.status == "crashed" and outcome.detail.endswith(child.ALARM.name):
        return TuneRow(config, "timeout", f"timeout after {timeout_s:g} s", seconds=timeout_s)
    if outcome.status != "done":
        return TuneRow(config, outcome.status, outcome.detail, seconds=outcome.seconds)
    if not outcome.result.get("ok"):
        text = f"{outcome.result.get('type')}: {outcome.result.get('message')}"
        return TuneRow(config, "error", one_line(text), seconds=outcome.seconds)
    return None


def failure_row(config: Mapping[str, Any], failure: Failure, target: Target | None) -> TuneRow:
    """Turn what a candidate raised into its row.

    Args:
        config: The candidate's config.
        failure: What it raised.
        target: What it was traced for, for the compiler's own messages.

    Returns:
        A row with status ``"invalid"``, ``"vmem"``, ``"unsupported"`` or ``"error"``.
    """
    status, text = "error", f"{failure.type}: {failure.message}"
    if target is not None:
        found = diagnose(failure.message, target, error_type=failure.type)
        if found.name != "unknown":
            status, text = found.status, found.error
    if status == "error":
        if "NotImplementedError" in failure.bases:
            status = "unsupported"
        elif any(name in failure.bases for name in _REFUSALS):
            status = "invalid"
    place = f" at {failure.where}" if failure.where and failure.where not in text else ""
    return TuneRow(config, status, one_line(text) + place)


def error_row(config: Mapping[str, Any], error: BaseException, target: Target | None) -> TuneRow:
    """Turn an exception into its row."""
    return failure_row(config, failure_of(error), target)


def one_line(text: str) -> str:
    """Return a text in one line of limited length.

    Example:
        >>> one_line("block is odd\\n  hint: make it even")
        'block is odd; hint: make it even'
    """
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= _REASON_LIMIT else line[: _REASON_LIMIT - 1] + "…"
