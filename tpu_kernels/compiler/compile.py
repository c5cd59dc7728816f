"""Compile a function for a TPU that is not there, and report."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_kernels import versions
from tpu_kernels.compiler import artifacts, jobs, locations, pickling
from tpu_kernels.compiler.chips import Target, resolve
from tpu_kernels.compiler.cost.figures import ModuleEstimate
from tpu_kernels.compiler.diagnose import diagnose
from tpu_kernels.compiler.pool import Job, Outcome, Workers, shared_pool
from tpu_kernels.compiler.report import CompileReport
from tpu_kernels.compiler.result_cache import ResultCache
from tpu_kernels.compiler.time_limit import time_limit
from tpu_kernels.compiler.versions import jax_version, libtpu_version, why_unavailable
from tpu_kernels.config import settings
from tpu_kernels.errors import TraceTimeout

if TYPE_CHECKING:
    from tpu_kernels.compiler.lowering import Program

_HLO_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FIGURES = (
    *("seconds", "lowering_seconds", "code_bytes", "vmem_bytes", "bundles", "spills"),
    *("hbm_argument_bytes", "hbm_output_bytes", "hbm_temp_bytes", "flops", "hbm_traffic_bytes"),
    "buffers",
)


@dataclass(frozen=True)
class Request:
    """One program to compile for one target.

    Attributes:
        fn: Function of flat JAX arrays.
        avals: Shape and dtype of each argument.
        target: What to compile for.
        name: Name for the report.
        where: ``file:line`` to report where nothing more exact is known.
        timeout_s: Seconds that tracing, and then the compiler, may take.
        memory_bytes: Memory that its process may occupy.
        isolate: Trace and lower in the worker process too, for code that may hang or abort.
        cache: Use and keep results on disk.
        dump: Folder for StableHLO, Mosaic and LLO texts.
        options: XLA compiler options.
        concrete: Values of integer arguments by position, for the estimate of kernels that they
            steer.
        estimate: Whether to estimate the time on the chip.
        program: The lowered program, if somebody else lowered it; then `fn` is not called.
    """

    fn: Callable[..., Any]
    avals: Sequence[Any]
    target: Target
    name: str
    where: str | None = None
    timeout_s: float = 600.0
    memory_bytes: int = Job.memory_bytes
    isolate: bool = False
    cache: bool = True
    dump: str | Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    concrete: Mapping[int, np.ndarray] = field(default_factory=dict)
    estimate: bool = True
    program: Program | None = None


def compile_function(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    target: str | Target,
    *,
    name: str,
    where: str | None = None,
    timeout_s: float = 600.0,
    memory_limit: int = Job.memory_bytes,
    isolate: bool = False,
    cache: bool = True,
    dump: str | Path | None = None,
    options: Mapping[str, str] | None = None,
    concrete: Mapping[int, np.ndarray] | None = None,
) -> CompileReport:
    """Compile a JAX function with the real TPU compiler, in another process.

    Args:
        fn: Function of flat JAX arrays.
        avals: Shape and dtype of each argument: `jax.ShapeDtypeStruct` or arrays.
        target: Chip, or chip and topology.
        name: Name for the report.
        where: ``file:line`` to report where nothing more exact is known.
        timeout_s: Seconds that tracing, and then the compiler, may take.
        memory_limit: Bytes of memory that its process may occupy.
        isolate: Trace and lower in the worker process too, for code that may hang or abort.
        cache: Look the result up on disk first, and keep it there.
        dump: Folder to write StableHLO, Mosaic and LLO texts to; implies that the program is
            compiled anew.
        options: XLA compiler options, such as ``{"xla_tpu_scoped_vmem_limit_kib": "65536"}``.
        concrete: Values of integer arguments by position, for the estimate of kernels that they
            steer.

    Returns:
        The report. Failures of every kind are reports too; nothing that `fn` or the compiler does
        raises.

    Raises:
        ConfigError: If the target is unknown.
    """
    request = Request(
        fn=fn,
        avals=avals,
        target=resolve(target),
        name=name,
        where=where,
        timeout_s=timeout_s,
        memory_bytes=memory_limit,
        isolate=isolate,
        cache=cache,
        dump=dump,
        options=options or {},
        concrete=concrete or {},
    )
    return next(report for _, report in compile_all([request]))


def compile_all(
    requests: Sequence[Request],
    workers: Workers | None = None,
    started: Callable[[int], None] | None = None,
) -> Generator[tuple[int, CompileReport], None, None]:
    """Compile programs in parallel, as many at once as cores and memory allow.

    Args:
        requests: The programs.
        workers: Who compiles; by default this process's pool.
        started: Called with the index of each request that a worker takes up.

    Yields:
        Index and report of each, in the order in which they are done. Leaving the loop early ends
        what still runs.
    """
    missing = why_unavailable()
    if missing is None:
        versions.check("libtpu", "jax")
    waiting: list[tuple[int, Request, _Lowered]] = []
    submitted: list[Job] = []
    for index, request in enumerate(requests):
        if missing is not None:
            yield index, _blank(request, "unavailable", error=missing[0], hint=missing[1])
            continue
        done, lowered, job = _prepare(request)
        if done is not None:
            yield index, done
        elif job is not None:
            waiting.append((index, request, lowered))
            submitted.append(job)
    if not submitted:
        return

    def begun(position: int) -> None:
        if started is not None:
            started(waiting[position][0])

    for position, outcome in (workers or shared_pool()).run_all(submitted, begun):
        index, request, lowered = waiting[position]
        yield index, _finish(request, lowered, outcome)


@dataclass(frozen=True)
class _Lowered:
    """What is known of a program before or after the worker has seen it."""

    digest: str = ""
    place_digest: str = ""
    seconds: float = 0.0
    kernels: Sequence[Mapping[str, Any]] = ()


_lowering_lock = threading.RLock()  # JAX's tracing caches are safe, the author's globals may not be


def _prepare(request: Request) -> tuple[CompileReport | None, _Lowered, Job | None]:
    """Lower in this process or pack the function up; a report if that decides it already."""
    from tpu_kernels.compiler import lowering

    if request.isolate:
        avals = [_abstract(aval) for aval in request.avals]
        payload = pickling.dumps((request.fn, (avals, dict(request.concrete))))
        if payload is not None:
            return None, _Lowered(), _function_job(request, payload)
    try:
        with _lowering_lock, time_limit(request.timeout_s, "tracing"):
            program = request.program or lowering.lower(
                request.fn, request.avals, request.target, request.concrete
            )
    except TraceTimeout as error:
        return _untraced(request, error), _Lowered(), None
    except Exception as error:
        result = jobs.failure("lower", error)
        return _report(request, _Lowered(), result), _Lowered(), None
    lowered = _Lowered(
        program.digest, program.place_digest, program.seconds, jobs.kernel_facts(program)
    )
    if request.dump is not None:
        artifacts.write_program(program, Path(request.dump))
    elif request.cache:
        found = _cache().find(program, request.options)
        if found is not None:
            found = replace(found, kernel=request.name, lowering_seconds=program.seconds)
            return found, lowered, None
    request_fields = {
        "kind": "module",
        "topology": request.target.topology_name,
        "options": dict(request.options),
        "dump": _absolute(request.dump),
        "estimate": request.estimate,
    }
    payload = pickle.dumps((program.text, program.scalars))
    job = Job(request_fields, payload, request.timeout_s, request.memory_bytes)
    return None, lowered, job


def _untraced(request: Request, error: TraceTimeout) -> CompileReport:
    """The report where the author's code does not end; as where it runs in a worker."""
    place = locations.from_exception(error)
    return _blank(
        request,
        "timeout",
        error=f"timeout after {request.timeout_s:g} s",
        hint="the author's own code was running there, not yet the compiler",
        where=str(place) if place else request.where,
        source_line=(place.text or None) if place else None,
    )


def _function_job(request: Request, payload: bytes) -> Job:
    import jax

    fields = {
        "kind": "function",
        "target": request.target.topology_name,
        "topology": request.target.topology_name,
        "options": dict(request.options),
        "dump": _absolute(request.dump),
        "estimate": request.estimate,
        "cache": str(_cache().folder) if request.cache and request.dump is None else None,
        "x64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        "sys_path": pickling.import_path(),
    }
    return Job(fields, payload, request.timeout_s, request.memory_bytes)


def _finish(request: Request, lowered: _Lowered, outcome: Outcome) -> CompileReport:
    if outcome.status != "done":
        error = outcome.detail
        place = locations.from_fault(outcome.log)
        hint = None
        if place is not None:
            hint = "the author's own code was running there, not yet the compiler"
        elif outcome.status == "timeout":
            hint = "the time grows with the unrolled work of one grid step: use smaller blocks"
        return _blank(
            request,
            outcome.status,
            error=error,
            hint=hint,
            seconds=outcome.seconds,
            lowering_seconds=lowered.seconds,
            compiler_text=outcome.log or None,
            where=str(place) if place else _only_place(lowered) or request.where,
            source_line=(place.text or None) if place else None,
        )
    result = outcome.result
    if "digest" in result:
        lowered = _Lowered(
            result["digest"],
            result["place_digest"],
            result["lowering_seconds"],
            result["kernels"],
        )
    if "report" in result:
        found = CompileReport.from_dict(result["report"])
        return replace(found, kernel=request.name, lowering_seconds=lowered.seconds)
    report = _report(request, lowered, result)
    if request.cache and lowered.digest:
        topology = request.target.topology_name
        _cache().store(report, lowered.digest, lowered.place_digest, topology, request.options)
    return report


def _report(request: Request, lowered: _Lowered, result: Mapping[str, Any]) -> CompileReport:
    figures = {name: result[name] for name in _FIGURES if name in result}
    figures.setdefault("lowering_seconds", lowered.seconds)
    scalar = [kernel["smem_bytes"] for kernel in lowered.kernels if kernel.get("smem_bytes")]
    figures["smem_bytes"] = max(scalar, default=None)
    if result["ok"]:
        if result["estimate"] is not None:
            figures["estimate"] = ModuleEstimate.from_dict(result["estimate"])
        return _blank(request, "ok", **figures)
    message = result["message"]
    found = diagnose(message, request.target, error_type=result["type"])
    where, source_line = result.get("where"), result.get("source_line")
    if where is not None and not source_line:
        # A notebook cell's text is known in this process only.
        source_line = locations.parse(where).text
    if where is None:
        kernel = _kernel_of(message, lowered.kernels)
        where, source_line = kernel.get("where"), kernel.get("source_line")
    error = found.error
    if found.status == "vmem":
        buffers = _kernel_of(message, lowered.kernels).get("buffers") or ()
        if "\n" not in error:  # the compiler's own list of them knows more
            error = "\n  ".join([error, *buffers])
        figures.update(vmem_bytes=found.used_bytes, vmem_limit_bytes=found.limit_bytes)
    return _blank(
        request,
        found.status,
        error=error,
        hint=found.hint,
        where=where or request.where,
        source_line=source_line or None,
        compiler_text=message,
        **figures,
    )


def _kernel_of(message: str, kernels: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The kernel that a message without a source location is about, if there is no doubt."""
    named = set(_HLO_OP_NAME.findall(message))
    matching = [kernel for kernel in kernels if kernel["op_name"] in named]
    candidates = matching or kernels
    return candidates[0] if len({kernel["where"] for kernel in candidates}) == 1 else {}


def _only_place(lowered: _Lowered) -> str | None:
    return _kernel_of("", lowered.kernels).get("where")


def _blank(request: Request, status: str, **fields: Any) -> CompileReport:
    return CompileReport(
        status=status,
        target=request.target.name,
        kernel=request.name,
        libtpu_version=libtpu_version(),
        jax_version=jax_version(),
        **fields,
    )


def _abstract(aval: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(aval.shape), aval.dtype)


def _absolute(folder: str | Path | None) -> str | None:
    return None if folder is None else os.path.abspath(folder)


def _cache() -> ResultCache:
    return ResultCache(settings().cache_dir / "compile")
