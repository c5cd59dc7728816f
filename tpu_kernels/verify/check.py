"""`check`: everything that can be found out about a kernel without a TPU, in one report."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from tpu_kernels.compiler import Target, resolve
from tpu_kernels.compiler.pallas_grid import grid_calls
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError, TraceTimeout
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.overrides import Override
from tpu_kernels.verify.calls import GivenCall
from tpu_kernels.verify.compiling import traceable
from tpu_kernels.verify.override_check import check_override
from tpu_kernels.verify.passes import compiled, grid, running, vmem
from tpu_kernels.verify.report import CheckReport, CheckReports, CheckRow
from tpu_kernels.verify.shrink import with_smallest
from tpu_kernels.verify.subject import Subject, failed_with, guarded

DEFAULT_PASSES = ("op", "numerics", "grad", "races", "bounds", "nan", "grid")
STATIC_PASSES = ("grid",)
PASSES = (*DEFAULT_PASSES, "edges", "determinism", "compile")


@overload
def check(
    kernel: Override,
    args: Sequence[Any] | None = ...,
    *,
    passes: Sequence[str] | None = ...,
    samples: Sequence[Any] | None = ...,
) -> CheckReport: ...


@overload
def check(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    *,
    config: Mapping[str, Any] | None = ...,
    target: str | Target | None = ...,
    passes: Sequence[str] | None = ...,
    timeout_s: float = ...,
    cache: bool = ...,
    shrink_s: float = ...,
    **kwargs: Any,
) -> CheckReport: ...


@overload
def check(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    *,
    config: Mapping[str, Any] | None = ...,
    target: Sequence[str | Target],
    passes: Sequence[str] | None = ...,
    timeout_s: float = ...,
    cache: bool = ...,
    shrink_s: float = ...,
    **kwargs: Any,
) -> CheckReports: ...


def check(
    kernel: Callable[..., Any] | Override,
    args: Sequence[Any] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    target: str | Target | Sequence[str | Target] | None = None,
    passes: Sequence[str] | None = None,
    timeout_s: float = 300.0,
    cache: bool = True,
    shrink_s: float = 0.0,
    samples: Sequence[Any] | None = None,
    **kwargs: Any,
) -> CheckReport | CheckReports:
    """Check a kernel, a JAX function or an override; no TPU is needed.

    A kernel or function is checked with one set of arguments. An override is compared with the
    operator that it replaces, on torch's own samples of that operator or on the caller's.

    The passes:

    - ``"op"``: `torch.library.opcheck` of the operator.
    - ``"numerics"``: the result against the kernel's reference in float64.
    - ``"grad"``: the gradients against those of the reference in float64.
    - ``"races"``, ``"bounds"``, ``"nan"``: the TPU interpreter with its race detector, reads and
      writes out of bounds, uninitialised memory that reaches a result.
    - ``"grid"``: output blocks that are visited twice, and axes wrongly declared parallel.
    - ``"edges"``: results that depend on what lies outside an array, in a partly filled last block.
    - ``"determinism"``: two runs, with parallel axes in different orders, agree to the bit.
    - ``"compile"``: the TPU compiler, and before it a quick comparison of VMEM; always on where a
      target is given.

    The passes of an override:

    - ``"contract"``: shape, stride, dtype and device of the results; arguments stay as they were.
    - ``"numerics"``: results against the original's in float64.
    - ``"grad"``: gradients against the original's in float64.

    Args:
        kernel: A registered kernel, any JAX function, or an `Override`.
        args: Its arguments, torch tensors or arrays; some passes run the kernel on them. For an
            override, those of one call of the operator; None for torch's samples.
        config: Tunable or static parameters; by default the kernel's own choice.
        target: A chip (``"v6e"``), or a sequence of them; None asks no compiler.
        passes: What to run. By default the first seven passes above where no target is given;
            with a target the passes that need no run (``"grid"``) and the compiler.
        timeout_s: Seconds that tracing, a run in another process, or one compilation may take.
        cache: Whether to use the compiler's earlier results.
        shrink_s: Seconds to spend, where a pass that runs the kernel fails, on looking for the
            smallest call that fails in the same way; 0 for none.
        samples: Only for an override: several calls of the operator, each a tuple of arguments or
            a pair of those and a dictionary of keyword arguments.
        **kwargs: Keyword arguments of the kernel.

    Returns:
        The report, or a mapping from target to report where `target` is a sequence. Whatever goes
        wrong in the kernel is a row of the report, not an exception.

    Raises:
        ArgumentError: If a pass is unknown, or the arguments do not fit the kernel.
        ConfigError: If a target or a parameter is unknown.

    Example:
        >>> import jax, torch
        >>> def double(x: jax.Array) -> jax.Array:
        ...     return 2 * x
        >>> check(double, (torch.ones(8, 128),), passes=("grid",)).row("grid").status
        'skipped'
    """
    if isinstance(kernel, Override):
        if target is not None or config is not None:
            raise ArgumentError(
                "target= and config= are of kernels, not of overrides",
                hint="check the kernel itself for a target: check(kernel, args, target=...)",
            )
        calls = samples if args is None else [*(samples or ()), (tuple(args), kwargs)]
        return check_override(kernel, calls, passes)
    if args is None or samples is not None:
        raise ArgumentError("a kernel or function is checked with args=(...), not with samples=")
    targets = _targets(target)
    wanted = _wanted(passes, bool(targets))
    default = targets[0] if targets else resolve(settings().sim_chip)
    given = GivenCall(tuple(args), kwargs, config)

    def subject_of(call: GivenCall) -> Subject:
        return _subject(kernel, call.args, call.config, call.kwargs, default, timeout_s)

    subject = subject_of(given)
    shared = list(running.run([name for name in wanted if name in running.PASSES], subject))
    if shrink_s > 0 and subject.valueless is None:
        shared = with_smallest(shared, kernel, given, subject_of, shrink_s)
    if passes is None and targets:
        left = ", ".join(name for name in DEFAULT_PASSES if name not in STATIC_PASSES)
        shared.append(CheckRow("others", "skipped", f"name them in passes= to run them: {left}"))
    if not targets:
        rows = [row for name in wanted for row in _in_order(name, shared, subject)]
        return CheckReport(subject.program.name, None, tuple(rows))
    reports = _for_targets(subject, targets, wanted, shared, cache)
    return reports[targets[0].name] if isinstance(target, (str, Target)) else reports


def _targets(target: str | Target | Sequence[str | Target] | None) -> list[Target]:
    if target is None:
        return []
    if isinstance(target, (str, Target)):
        return [resolve(target)]
    if not target:
        raise ArgumentError("no target to check for", hint="name one, such as 'v6e', or none")
    return [resolve(each) for each in target]


def _wanted(passes: Sequence[str] | None, targeted: bool) -> tuple[str, ...]:
    if passes is None:
        return (*STATIC_PASSES, "compile") if targeted else DEFAULT_PASSES
    names = (passes,) if isinstance(passes, str) else tuple(dict.fromkeys(passes))
    for name in names:
        if name not in PASSES:
            raise ArgumentError(f"unknown pass {name!r}", hint=f"the passes: {', '.join(PASSES)}")
    if "compile" in names and not targeted:
        raise ArgumentError("pass 'compile' needs a target", hint="add target='v6e'")
    return (*names, "compile") if targeted and "compile" not in names else names


def _subject(
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    config: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],
    default: Target,
    timeout_s: float,
) -> Subject:
    def rebind(change: Mapping[str, Any]) -> Any:
        return traceable(kernel, args, {**dict(config or {}), **change}, kwargs)

    bound = kernel.bind(*args, config=config, **kwargs) if isinstance(kernel, Kernel) else None
    return Subject(traceable(kernel, args, config, kwargs), bound, rebind, default, timeout_s)


def _in_order(name: str, shared: Sequence[CheckRow], subject: Subject) -> list[CheckRow]:
    if name == "grid":
        return [_grid(subject, subject.default)]
    return [row for row in shared if row.name == name]


def _grid(subject: Subject, target: Target, jaxpr: Any = None) -> CheckRow:
    started = time.perf_counter()
    try:
        calls = grid_calls(subject.trace(target) if jaxpr is None else jaxpr)
    except Exception as error:  # whatever the author's code raises is a finding
        return failed_with(grid.NAME, "tracing the kernel", error, subject.where)
    row = guarded(grid.NAME, lambda: grid.run(calls, subject.where, subject.names))
    return dataclasses.replace(row, seconds=time.perf_counter() - started)


def _for_targets(
    subject: Subject,
    targets: Sequence[Target],
    wanted: Sequence[str],
    shared: Sequence[CheckRow],
    cache: bool,
) -> CheckReports:
    rows: dict[str, list[CheckRow]] = {}
    limits: list[tuple[Target, int | None]] = []
    for target in targets:
        found = rows[target.name] = list(shared)
        try:
            jaxpr = subject.trace(target)
        except TraceTimeout as error:  # which the compiler's process would only wait for again
            found.append(failed_with(compiled.NAME, "tracing the kernel", error, subject.where))
            continue
        except Exception:
            limits.append((target, None))  # the compile row tells what tracing raises, and where
            continue
        if "grid" in wanted:
            found.append(_grid(subject, target, jaxpr))
        started = time.perf_counter()
        row, limit = vmem.run(subject, target, jaxpr)
        row = dataclasses.replace(row, seconds=time.perf_counter() - started)
        found.append(row)
        if row.status == "failed":
            why = "the kernel cannot fit into VMEM"
            found.append(CheckRow(compiled.NAME, "skipped", why))
        else:
            limits.append((target, limit))
    done = compiled.run(subject, limits, cache=cache) if limits else {}
    reports = {}
    for target in targets:
        report = done.get(target.name)
        if report is not None:
            row = guarded(compiled.NAME, functools.partial(compiled.row, subject, report))
            rows[target.name].append(row)
        reports[target.name] = CheckReport(
            subject.program.name, target.name, tuple(rows[target.name]), report
        )
    return CheckReports(reports)
