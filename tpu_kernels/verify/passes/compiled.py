"""Pass "compile": the real TPU compiler's verdict for each target."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpu_kernels.compiler import CompileReport, Request, Target, compile_all
from tpu_kernels.compiler.pallas_grid import argument_of
from tpu_kernels.compiler.report import mib
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject

NAME = "compile"
_OPERAND = re.compile(r"input (\d+) of pallas_call")


def run(
    subject: Subject, limits: Sequence[tuple[Target, int | None]], *, cache: bool
) -> dict[str, CompileReport]:
    """Compile for several targets in parallel.

    Args:
        subject: The program.
        limits: The targets, each with the VMEM limit in bytes to compile with, None for the
            default.
        cache: Whether to use results on disk.

    Returns:
        The compiler's report for each, by name of the target.
    """
    program = subject.program
    requests = []
    for target, limit in limits:
        options = {} if limit is None else {"xla_tpu_scoped_vmem_limit_kib": str(limit >> 10)}
        requests.append(
            Request(
                fn=program.function_for(target),
                avals=program.avals,
                target=target,
                name=program.name,
                where=program.where,
                timeout_s=subject.timeout_s,
                cache=cache,
                options=options,
                concrete=program.concrete,
            )
        )
    done = dict(compile_all(requests))
    return {target.name: done[index] for index, (target, _) in enumerate(limits)}


def row(subject: Subject, report: CompileReport) -> CheckRow:
    """Turn a report of the compiler into a row."""
    if report.ok:
        what = "from the cache" if report.cached else f"compiled in {report.seconds:.1f} s"
        if report.vmem_bytes is not None:
            what += f", VMEM {mib(report.vmem_bytes)}"
        if report.estimate is not None:
            what += f"; {report.estimate.text.splitlines()[0]}"
        return CheckRow(NAME, "ok", what, seconds=report.seconds)
    status = "unavailable" if report.status == "unavailable" else "failed"
    return CheckRow(
        NAME,
        status,
        _with_names(subject, f"{report.status}: {report.error}"),
        report.where,
        report.source_line,
        report.hint,
        report.seconds,
    )


def _with_names(subject: Subject, text: str) -> str:
    """Say which of the author's arguments "input 0 of pallas_call" is, where that is certain."""

    def named(match: re.Match[str]) -> str:
        argument = argument_of(subject.calls, int(match[1]))
        name = subject.names.get(argument) if argument is not None else None
        return match[0] if name is None else f"argument {name!r} ({match[0]})"

    return _OPERAND.sub(named, text)
