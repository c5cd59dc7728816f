"""What a worker process does with one candidate: look at its program, run it, time it.

These functions are called by name in worker processes of `tpu_kernels.compiler.pool`; whatever a
candidate does there, hang, abort, print or eat memory, the tuning process only sees its outcome.
"""

from __future__ import annotations

import functools
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHORTEST_S = 1e-3  # a sample takes at least this long, so that the clock's own cost does not count
_MOST_CALLS = 1000


ALARM = signal.SIGALRM
"""The signal that ends a worker whose candidate is over its limit."""


def limited(payload: bytes, limit_s: float, runs: bool = False) -> Any:
    """Call a pickled function with a time limit that nothing in this process can hold up.

    Imports, unpickling and JAX's own start come first, outside the limit. The limit is a timer of
    the operating system with the signal's default action: it ends the process even if native code
    never returns.

    Args:
        payload: Pickle of the function and its arguments.
        limit_s: Seconds that the call may take.
        runs: Whether it runs a program on this machine's CPU.

    Returns:
        What the function returns.
    """
    import jax  # noqa: F401
    import torch  # noqa: F401

    function, arguments = pickle.loads(payload)
    if runs:
        _start()
    signal.signal(ALARM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@functools.cache
def _start() -> None:
    """Let JAX start its CPU client and compiler: seconds on a busy machine, not the candidate's."""
    import jax
    import numpy as np

    from tpu_kernels import _compat_jax

    one = jax.device_put(np.ones(1, np.float32), _compat_jax.cpu_device())
    jax.block_until_ready(jax.jit(lambda x: x + 1)(one))


@dataclass(frozen=True)
class Inspection:
    """What tracing and lowering a candidate found.

    Attributes:
        digest: Identity of the lowered program, source locations left out.
        models: The demands of its Pallas calls.
        results: Shape and dtype of each result, as text.
    """

    digest: str
    models: tuple[Any, ...]
    results: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """What a candidate raised, in a form that needs none of its classes to be read.

    Attributes:
        type: Name of the exception class.
        bases: Names of its base classes.
        message: Its text.
        where: The author's ``file:line``, empty if unknown.
    """

    type: str
    bases: tuple[str, ...]
    message: str
    where: str


def inspect(fn: Callable[..., Any], avals: Sequence[Any], target: str) -> Inspection | Failure:
    """Trace and lower a candidate for a TPU; nothing is compiled.

    Args:
        fn: Function of flat JAX arrays.
        avals: Shape and dtype of each array.
        target: The chip's name.

    Returns:
        The program's digest and demands, or what was raised.
    """
    from tpu_kernels.compiler import lowering
    from tpu_kernels.compiler.chips import resolve
    from tpu_kernels.compiler.pallas_model import pallas_models

    try:
        program = lowering.lower(fn, avals, resolve(target))
        jaxpr = _jaxpr(fn, avals, target)
    except Exception as error:
        return failure_of(error)
    results = tuple(f"{aval.dtype}{list(aval.shape)}" for aval in jaxpr.out_avals)
    return Inspection(program.digest, tuple(pallas_models(jaxpr)), results)


def _jaxpr(fn: Callable[..., Any], avals: Sequence[Any], target: str) -> Any:
    import jax

    from tpu_kernels import _compat_jax
    from tpu_kernels.compiler.chips import resolve

    chip = resolve(target).chip
    device = jax.sharding.AbstractDevice(
        device_kind=chip.device_kind, num_cores=chip.cores_per_device, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.default_device(_compat_jax.cpu_device()), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(fn).trace(*avals).jaxpr


def failure_of(error: BaseException) -> Failure:
    """Describe an exception; a chained cause that says more than its wrapper speaks for it."""
    from tpu_kernels.compiler import locations
    from tpu_kernels.errors import TraceError

    place = locations.from_exception(error)
    told = error
    if isinstance(error, TraceError) and error.__cause__ is not None:
        told = error.__cause__
    return Failure(
        type=type(told).__name__,
        bases=tuple(base.__name__ for base in type(told).__mro__),
        message=str(told) or type(told).__name__,
        where=str(place) if place else "",
    )


@dataclass(frozen=True)
class Loaded:
    """A candidate that is compiled for this machine's CPU, with its arguments on the device."""

    run: Callable[..., Any]
    arrays: tuple[Any, ...]


_loaded: dict[str, Loaded] = {}


@dataclass(frozen=True)
class Trial:
    """One run of a candidate on the CPU.

    Attributes:
        outputs: The leaves of its result as raw bytes, shape and dtype name.
        times_us: A few times per call in µs, taken while other workers may be busy.
    """

    outputs: tuple[tuple[bytes, tuple[int, ...], str], ...]
    times_us: tuple[float, ...]


def trial(fn: Callable[..., Any], inputs: str, name: str, samples: int) -> Trial | Failure:
    """Compile a candidate for the CPU, run it once, and time it roughly.

    Args:
        fn: Function of flat JAX arrays.
        inputs: Path of a pickle with the list of NumPy arrays.
        name: Under what the compiled function is kept for `sample`.
        samples: How many times to take.

    Returns:
        Outputs and times, or what was raised.
    """
    import jax
    import numpy as np

    try:
        loaded = _load(fn, inputs, name)
        leaves = jax.tree_util.tree_leaves(loaded.run(*loaded.arrays))
        arrays = [np.asarray(leaf) for leaf in leaves]
    except Exception as error:
        return failure_of(error)
    times = sample(fn, inputs, name, samples)
    if isinstance(times, Failure):
        return times
    packed = tuple((a.tobytes(), tuple(a.shape), a.dtype.name) for a in arrays)
    return Trial(packed, tuple(times))


def sample(
    fn: Callable[..., Any], inputs: str, name: str, samples: int = 1
) -> list[float] | Failure:
    """Time a candidate on the CPU.

    Args:
        fn: Function of flat JAX arrays; compiled only if this worker has not done so yet.
        inputs: Path of a pickle with the list of NumPy arrays.
        name: Under what `trial` kept it.
        samples: How many times to take.

    Returns:
        Times per call in µs, or what was raised.
    """
    import jax

    try:
        loaded = _load(fn, inputs, name)
        run, arrays = loaded.run, loaded.arrays
        once = min(_time(run, arrays, 1, jax.block_until_ready) for _ in range(2))
        calls = min(_MOST_CALLS, max(1, round(_SHORTEST_S / max(once, 1e-9))))
        times = [_time(run, arrays, calls, jax.block_until_ready) for _ in range(samples)]
    except Exception as error:
        return failure_of(error)
    return [1e6 * seconds for seconds in times]


def _time(run: Callable[..., Any], arrays: Sequence[Any], calls: int, wait: Any) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        result = run(*arrays)
    wait(result)
    return (time.perf_counter() - started) / calls


def _load(fn: Callable[..., Any], inputs: str, name: str) -> Loaded:
    if name not in _loaded:
        import jax

        from tpu_kernels import _compat_jax

        device = _compat_jax.cpu_device()
        values = pickle.loads(Path(inputs).read_bytes())
        arrays = tuple(jax.device_put(value, device) for value in values)
        loaded = Loaded(jax.jit(fn), arrays)
        jax.block_until_ready(loaded.run(*arrays))
        _loaded[name] = loaded
    return _loaded[name]
