"""What a compile worker does with a job; runs inside the worker process only.

A job and its result are JSON objects. Kinds of jobs:

* ``"module"``: compile a StableHLO text for a topology.
* ``"function"``: unpickle a function with its avals, lower it for a target, and compile that.
* ``"call"``: unpickle a function with its arguments, call it, and pickle what it returns.

A result has ``"ok"``; where that is false also ``"stage"`` (``"lower"``, ``"compile"``,
``"call"``), ``"type"`` and ``"message"`` of the exception, and ``"where"`` if a line of the
author's is known.
"""

from __future__ import annotations

import functools
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_kernels.compiler import artifacts, buffers, locations
from tpu_kernels.errors import KernelError

DUMP_FOLDER = "llo"


def run(
    job: Mapping[str, Any], folder: Path, loaded: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Carry out one job.

    Args:
        job: The job; ``"kind"`` selects what to do.
        folder: The worker's folder; libtpu writes its dumps to a folder in it.
        loaded: Called when a ``"call"`` job has loaded its payload.

    Returns:
        The result.

    Raises:
        KeyError: If the kind is unknown or an entry is missing.
    """
    kinds: Mapping[str, Callable[[Mapping[str, Any], Path], dict[str, Any]]] = {
        "module": _module,
        "function": _function,
        "call": functools.partial(_call, loaded=loaded),
    }
    return kinds[job["kind"]](job, folder)


def _module(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    text, scalars = pickle.loads(Path(job["payload"]).read_bytes())
    return _compile(text, job, folder, scalars)


def _function(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    import jax

    from tpu_kernels.compiler import lowering
    from tpu_kernels.compiler.chips import resolve
    from tpu_kernels.compiler.result_cache import ResultCache

    try:
        fn, (avals, concrete) = _unpickle(job)
        with jax.enable_x64(bool(job["x64"])):
            program = lowering.lower(fn, avals, resolve(job["target"]), concrete)
    except Exception as error:
        return failure("lower", error)
    lowered = {
        "lowering_seconds": program.seconds,
        "digest": program.digest,
        "place_digest": program.place_digest,
        "kernels": kernel_facts(program),
    }
    if job["cache"]:
        found = ResultCache(Path(job["cache"])).find(program, job["options"])
        if found is not None:
            return {"ok": True, "report": found.to_dict(), **lowered}
    if job.get("dump"):
        artifacts.write_program(program, Path(job["dump"]))
    return {**_compile(program.text, job, folder, program.scalars), **lowered}


def _call(job: Mapping[str, Any], folder: Path, loaded: Callable[[], None]) -> dict[str, Any]:
    try:
        fn, arguments = _unpickle(job)
        loaded()
        value = fn(*arguments)
        out = folder / "value.pickle"
        out.write_bytes(pickle.dumps(value))
    except Exception as error:
        return failure("call", error)
    return {"ok": True, "value": str(out)}


def _unpickle(job: Mapping[str, Any]) -> tuple[Any, Any]:
    for entry in job["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    first, second = pickle.loads(Path(job["payload"]).read_bytes())
    return first, second


def _compile(
    text: str, job: Mapping[str, Any], folder: Path, scalars: Sequence[Any]
) -> dict[str, Any]:
    from tpu_kernels import _compat_jax

    dump = folder / DUMP_FOLDER
    before = artifacts.listing(dump)
    started = time.perf_counter()
    try:
        executable = _compat_jax.compile_for_topology(text, job["topology"], job["options"])
        seconds = time.perf_counter() - started
        memory = executable.get_compiled_memory_stats()
        return {
            "ok": True,
            "seconds": seconds,
            "hbm_argument_bytes": memory.argument_size_in_bytes,
            "hbm_output_bytes": memory.output_size_in_bytes,
            "hbm_temp_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
            **_counts(executable),
            "buffers": buffers.largest(executable.hlo_modules()[0].to_string()),
            **artifacts.figures(artifacts.listing(dump) - before),
            "estimate": _estimate(artifacts.listing(dump) - before, job, scalars, memory),
        }
    except Exception as error:
        return failure("compile", error) | {"seconds": time.perf_counter() - started}
    finally:
        files = artifacts.listing(dump) - before
        if job.get("dump"):
            artifacts.copy(files, Path(job["dump"]))
        artifacts.remove(files)


def _counts(executable: Any) -> dict[str, float]:
    """XLA's own count of the work; negative where it does not know a Pallas call's."""
    analysis = executable.cost_analysis() or {}
    counts = {"flops": "flops", "hbm_traffic_bytes": "bytes accessed"}
    return {name: analysis[key] for name, key in counts.items() if analysis.get(key, -1) >= 0}


def _estimate(
    files: set[Path], job: Mapping[str, Any], scalars: Sequence[Any], memory: Any
) -> dict[str, Any] | None:
    from tpu_kernels.compiler.chips import resolve
    from tpu_kernels.compiler.cost.estimate import estimate
    from tpu_kernels.compiler.versions import libtpu_version

    if not job["estimate"]:
        return None
    chip = resolve(job["topology"]).chip
    found = estimate(
        sorted(files),
        chip,
        scalars=scalars,
        libtpu_version=libtpu_version(),
        hbm_bytes=memory.argument_size_in_bytes + memory.output_size_in_bytes,
    )
    return found.to_dict()


def failure(stage: str, error: BaseException) -> dict[str, Any]:
    """Describe an exception as a result.

    Args:
        stage: What was being done.
        error: The exception.

    Returns:
        A result that is not ok.
    """
    place = locations.from_exception(error)
    while isinstance(error, KernelError) and error.__cause__ is not None:
        error = error.__cause__  # the catalogue knows the words of JAX, not ours for them
    return {
        "ok": False,
        "stage": stage,
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "where": str(place) if place else None,
        "source_line": place.text if place else None,
    }


def kernel_facts(program: Any) -> list[dict[str, Any]]:
    """Return what a diagnosis needs to know of a program's kernels.

    Args:
        program: The lowered program.

    Returns:
        Name, operation name and place of each Pallas kernel, and what it needs of VMEM and SMEM.
    """
    # A function that is called twice has two calls and may be lowered once: no pairs then.
    paired = len(program.models) == len(program.kernels)
    models = program.models if paired else [None] * len(program.kernels)
    return [
        {
            "name": kernel.name,
            "op_name": kernel.op_name,
            "where": str(kernel.where) if kernel.where else None,
            "source_line": kernel.where.text if kernel.where else None,
            "buffers": model.buffers() if model else [],
            "smem_bytes": model.smem_bytes if model else None,
        }
        for kernel, model in zip(program.kernels, models, strict=True)
    ]
