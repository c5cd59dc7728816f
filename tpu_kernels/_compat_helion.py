"""Every use of a private part of Helion, one small function each, with the reason.

Helion is imported on first use only: a program without Helion kernels never pays for it. A new
release can break only what stands here, and `check` says at once what has moved.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tpu_kernels.errors import VersionError

_NO_LIMIT = 1 << 62
_META_CACHE = "_helion_output_meta_cache"

# Defaults of the launch keywords of kernels that build a list of work items first.
_COMPACT: Mapping[str, Any] = {
    "build_worklist": None,
    "offset_arg_indices": [],
    "metadata_fields": [],
    "owner_ref_pos": 0,
    "num_scalar_prefetch": 0,
    "aligned_arg_indices": [],
    "tile_start_ref_pos": 1,
    "compact_block": 1,
    "ordered_aligned_arg_indices": [],
    "range_start_ref_pos": -1,
    "ordered_window": 0,
}
_COMPACT_KEYWORDS = {"compact_block": "_compact_block"}

# The modules of Helion's that take torch's lock around compilations.
_LOCKING = ("device_ir", "inductor_lowering", "type_propagation")


def is_kernel(value: Any) -> bool:
    """Whether a value is a `helion.Kernel`; False where nobody has imported Helion."""
    helion = sys.modules.get("helion")
    kind = getattr(helion, "Kernel", None)
    return kind is not None and isinstance(value, kind)


def is_config(value: Any) -> bool:
    """Whether a value is a `helion.Config`; False where nobody has imported Helion."""
    kind = getattr(sys.modules.get("helion"), "Config", None)
    return kind is not None and isinstance(value, kind)


def retarget(kernel: Any, *, interpret: bool, backend: str = "pallas") -> Any:
    """The same kernel for one of Helion's backends, whatever backend it was decorated for.

    Helion reads its environment variables when a kernel is decorated, and searches for a config on
    the first call of a kernel without one; both are settled here. The key function that a kernel
    was made with is kept in a private attribute.
    """
    import helion

    settings = kernel.settings.copy(
        backend=backend,
        pallas_interpret=interpret,
        dot_precision="default",
        autotune_effort="none",
        ignore_warnings=[*kernel.settings.ignore_warnings, helion.exc.TensorOperationInWrapper],
    )
    return helion.Kernel(
        kernel.fn, configs=list(kernel.configs), settings=settings, key=kernel._key_fn
    )


def normalized(bound: Any, config: Any) -> Any:
    """A config as a bound kernel uses it: Helion rounds block sizes without a word.

    Only the setter of the public API normalises, and that one keeps the config.
    """
    return bound._normalized_config_copy(config)


def is_viable(bound: Any, config: Any) -> bool:
    """Whether Helion's own search would try a config; the check hangs on its backend object."""
    return bool(bound.config_spec.backend.autotune_config_is_viable(bound.config_spec, config))


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Keep what Helion logs in this thread away from the user.

    It logs every failure to generate code, with a traceback of its own internals and the hint of a
    Triton error, before it raises it; the error is reported at the author's line.
    """
    thread = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = logging.getLogger("helion.runtime.kernel")
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def run_search(
    bound: Any,
    arguments: Sequence[Any],
    algorithm: str,
    price: Callable[[Sequence[Any]], Sequence[float]],
    *,
    seed: int,
    options: Mapping[str, Any],
) -> None:
    """Let one of Helion's searches ask for prices of configs, until it has enough.

    Its searches take what measures from a class attribute, and run the winners once more on the
    machine unless a function that benchmarks is set: both stand for the price here.

    Args:
        bound: A bound kernel; nothing of it is run.
        arguments: What it was bound to.
        algorithm: Name of the search, such as ``"PatternSearch"``.
        price: Called with configs that it wants to know; infinite for one that does not work. What
            it raises ends the search, and is raised.
        seed: Makes the search repeatable as long as the prices are.
        options: Keywords of the search.
    """
    import random
    import time

    from helion.autotuner import search_algorithms
    from helion.autotuner.benchmark_provider import BenchmarkProvider, BenchmarkResult

    class Priced:
        def __init__(self, cost: float) -> None:
            self.cost = cost

        def __call__(self, *_: Any) -> float:
            return self.cost

    class Prices(BenchmarkProvider):  # type: ignore[misc]
        mutated_arg_indices: Sequence[int] = ()

        def __init__(self, **_: Any) -> None:
            pass

        def setup(self) -> None:
            pass

        def cleanup(self) -> None:
            pass

        def benchmark(self, configs: Sequence[Any], **_: Any) -> list[Any]:
            costs = price(configs) if configs else ()
            return [
                BenchmarkResult(
                    config=config,
                    fn=Priced(cost),
                    perf=cost,
                    status="ok" if cost < float("inf") else "error",
                    compile_time=0.0,
                    completed_at=time.perf_counter(),
                )
                for config, cost in zip(configs, costs, strict=True)
            ]

    bound.settings.autotune_benchmark_fn = lambda fns, **_: [fn() for fn in fns]
    bound.settings.autotune_random_seed = seed
    bound.settings.autotune_log_level = 0
    state = random.getstate()
    try:
        search = search_algorithms[algorithm](bound, arguments, **options)
        search._benchmark_provider_cls = Prices
        # Else the finalists are timed once more under JAX's profiler, which starts a TPU runtime.
        search._resolve_device_micros_paired_bench = lambda: None
        search.autotune()
    finally:
        random.setstate(state)


def forget_outputs(wrapper: Callable[..., Any]) -> None:
    """Drop the output tensors that a generated host function keeps from its last run.

    They would be fake tensors of a mode that is no more.
    """
    for value in list(wrapper.__globals__.values()):
        for name in [n for n in getattr(value, "__dict__", {}) if n.startswith(_META_CACHE)]:
            delattr(value, name)


@contextlib.contextmanager
def vmem_limit(limit: int | None) -> Iterator[None]:
    """Let Helion take a number for the VMEM of the chip, in bytes.

    It asks JAX once per process and keeps the answer, whichever chip was the target then. None
    lets it ask again.
    """
    from helion.runtime.pallas import launcher

    before = launcher._CACHED_VMEM_LIMIT_BYTES
    launcher._CACHED_VMEM_LIMIT_BYTES = limit
    try:
        yield
    finally:
        launcher._CACHED_VMEM_LIMIT_BYTES = before


class CompileLock:
    """torch's lock around compilations, which its holder can lend to a thread.

    Dynamo holds it while it asks a fake kernel, whose answer Helion has to be asked for in another
    thread; and Helion takes it for itself.

    Args:
        real: The lock.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self._threads = threading.local()

    def __enter__(self) -> None:
        if not getattr(self._threads, "borrowed", False):
            self._real.acquire()

    def __exit__(self, *_: object) -> None:
        if not getattr(self._threads, "borrowed", False):
            self._real.release()

    def lent(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """A function for another thread, for which the caller holds the lock until it ends."""

        def run() -> Any:
            self._threads.borrowed = True
            try:
                return work()
            finally:
                self._threads.borrowed = False

        return run


@functools.cache
def compile_lock() -> CompileLock:
    """The lock that Helion takes to compile, from now on one that can be lent."""
    from torch._dynamo.convert_frame import compile_lock as real

    lock = CompileLock(real)
    for name in _LOCKING:
        importlib.import_module(f"helion._compiler.{name}").compile_lock = lock  # type: ignore[attr-defined]
    return lock


def describe_cpu_as(device_kind: str) -> None:
    """Let `pltpu.get_tpu_info` answer on a CPU, for the threads of the TPU interpreter.

    They do not see the abstract mesh that the tracing thread is in.
    """
    from helion.runtime.pallas import launcher

    launcher._ensure_cpu_tpu_info(device_kind)


def pallas_call(
    kernel: Callable[..., Any],
    grid: tuple[int, ...],
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    pads: Sequence[tuple[int, int, int, int]],
    shapes: Mapping[int, tuple[int, ...]],
    interpret: bool,
) -> list[Any]:
    """Rebuild the Pallas call of a launch on JAX values; traceable.

    Helion's own launcher takes torch tensors and lowers on every call; its export to JAX replays
    host code wrongly. Both share this private function.

    Args:
        kernel: The generated device function.
        grid: Its grid.
        args: Its arguments; abstract values for tensors that are only written.
        options: The keywords that the generated code passed to the launcher.
        pads: ``(argument, dimension, block, extra)`` for each padded dimension.
        shapes: Shapes of padded arguments before padding.
        interpret: Whether to build the call for Pallas's plain interpreter.

    Returns:
        The value of each output, those that are written in place included.
    """
    from helion.runtime.pallas import launcher

    get = options.get
    compact = None
    if get("_compact_build_worklist") is not None:
        compact = {}
        for name, default in _COMPACT.items():
            found = get(_COMPACT_KEYWORDS.get(name, f"_compact_{name}"))
            compact[name] = default if found is None else found
    if (product := get("_matmul_dot_general")) is not None:
        used = [i for i, a in enumerate(args) if hasattr(a, "shape")]
        written = set(get("_output_indices") or ()) - set(get("_inplace_indices") or ())
        call = launcher._build_matmul_dot_general_jit_fn(product)
        return [call(*(args[i] for i in used if i not in written))]
    # What is interpreted has no VMEM to fit into; for a chip, JAX knows its size.
    with vmem_limit(_NO_LIMIT if interpret else None):
        return launcher._pallas_jax_call(  # type: ignore[no-any-return]
            kernel,
            grid,
            tuple(args),
            output_indices=get("_output_indices") or [],
            inplace_indices=get("_inplace_indices"),
            block_spec_info=get("_block_spec_info"),
            scratch_shapes=get("_scratch_shapes"),
            hbm_arg_indices=get("_hbm_arg_indices"),
            smem_arg_indices=get("_smem_arg_indices"),
            collective_id=get("_collective_id"),
            use_low_level_scheduler=get("_use_low_level_scheduler", False),
            grid_scalar_prefetch_arg_indices=get("_grid_scalar_prefetch_arg_indices"),
            interpret=interpret,
            compact=compact,
            orig_shapes=dict(shapes),
            ds_pad_dims=list(pads),
            return_all_outputs=True,
        )


# What is used above, and the parameters that it must have.
_USED: Mapping[str, tuple[str, ...]] = {
    "_pallas_jax_call": (
        *("pallas_kernel", "grid", "jax_args", "output_indices", "inplace_indices"),
        *("block_spec_info", "scratch_shapes", "hbm_arg_indices", "smem_arg_indices"),
        *("collective_id", "interpret", "use_low_level_scheduler", "compact", "orig_shapes"),
        *("grid_scalar_prefetch_arg_indices", "ds_pad_dims", "return_all_outputs"),
    ),
    "_ensure_cpu_tpu_info": ("device_kind",),
    "_build_matmul_dot_general_jit_fn": ("spec",),
}


def moved_of_searches() -> list[str]:
    """What `run_search` uses of Helion's searches and the installed release does not have."""
    from helion.autotuner import base_search

    source = inspect.getsource(base_search)
    used = ("_benchmark_provider_cls", "_resolve_device_micros_paired_bench")
    return [f"helion.autotuner.base_search: {name}" for name in used if name not in source]


def moved() -> list[str]:
    """What this module uses of Helion and the installed release does not have."""
    import helion
    from helion.runtime.kernel import BoundKernel
    from helion.runtime.pallas import launcher

    missing = []
    for name, parameters in _USED.items():
        function = getattr(launcher, name, None)
        if function is None:
            missing.append(f"helion.runtime.pallas.launcher.{name}")
            continue
        known = inspect.signature(function).parameters
        missing += [f"parameter {p!r} of {name}" for p in parameters if p not in known]
    if not hasattr(launcher, "_CACHED_VMEM_LIMIT_BYTES"):
        missing.append("helion.runtime.pallas.launcher._CACHED_VMEM_LIMIT_BYTES")
    if not hasattr(BoundKernel, "_normalized_config_copy"):
        missing.append("BoundKernel._normalized_config_copy")
    for name in _LOCKING:
        if not hasattr(importlib.import_module(f"helion._compiler.{name}"), "compile_lock"):
            missing.append(f"helion._compiler.{name}.compile_lock")
    if "_key_fn" not in inspect.getsource(helion.Kernel.__init__):
        missing.append("Kernel._key_fn")
    return missing


def check() -> None:
    """Refuse a release of Helion in which something moved.

    Raises:
        VersionError: Names what has moved.
    """
    if missing := moved():
        import helion

        raise VersionError(
            f"helion {getattr(helion, '__version__', 'of unknown version')} lacks "
            f"{', '.join(missing)}",
            hint="install helion>=1.5.1,<1.6",
        )
