"""Pass "compile": the real TPU compiler's verdict for each target."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_kernels.compiler import CompileReport, Request, Target, compile_all
from tpu_kernels.compiler.report import mib
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject

NAME = "compile"


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
        subject.with_names(f"{report.status}: {report.error}"),
        report.where,
        report.source_line,
        report.hint,
        report.seconds,
    )
