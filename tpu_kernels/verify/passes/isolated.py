"""Running a program in a worker process, where a hang or crash costs a row and nothing else.

The functions below `run_isolated` are called in the worker. JAX would start every backend that it
finds as soon as an interpreter asks for a device; in the worker, the CPU is the only one, and what
the interpreters print stays there.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_kernels import _compat_jax
from tpu_kernels.compiler import locations, pickling
from tpu_kernels.compiler.pool import Job, shared_pool
from tpu_kernels.verify.report import CheckRow
from tpu_kernels.verify.subject import Subject, failed

ENDED = "the interpreter's process ended"
_ENDLESS = (
    "does a loop end, and does every wait() get its start() or signal? If it is only slow, raise "
    "timeout_s or pass a smaller problem"
)
_START_S = 60.0  # for the import of the author's modules, on a machine that may be busy
# XLA's simplifier turns `v * mask` into a selection, which a TPU kernel does not: NaN x 0 is NaN.
_OPTIONS: dict[str, str | bool] = {"xla_disable_hlo_passes": "algsimp"}


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        outputs: Values of the flat outputs.
        printed: What it printed.
        raced: Whether the race detector found something.
        error: Message of the exception that ended it, None if it finished.
        error_type: Name of the exception's class.
        place: The author's ``file:line`` that it came from.
    """

    outputs: tuple[np.ndarray, ...] = ()
    printed: str = ""
    raced: bool = False
    error: str | None = None
    error_type: str = ""
    place: str | None = None


@dataclass(frozen=True)
class Lost:
    """Why there is no outcome.

    Attributes:
        status: Status for the row: ``"failed"`` or ``"unavailable"``.
        reason: In words.
        place: The author's ``file:line`` that was running, if that is known.
        hint: What to do.
    """

    status: str
    reason: str
    place: str | None = None
    hint: str | None = None


def lost(name: str, found: Lost, subject: Subject) -> CheckRow:
    """The row of a pass whose run gave nothing.

    Args:
        name: Name of the pass.
        found: Why there is no outcome.
        subject: What was run.
    """
    if found.status != "failed":
        return CheckRow(name, found.status, found.reason)
    return failed(name, found.reason, found.place or subject.call_place, found.hint)


def run_isolated(
    function: Callable[..., list[Outcome]], arguments: tuple[Any, ...], timeout_s: float
) -> list[Outcome] | Lost:
    """Call a function of this module in a worker process.

    Args:
        function: `plain_runs` or `tpu_runs`.
        arguments: Its arguments.
        timeout_s: Seconds that it may take.

    Returns:
        What it returns, or why nothing came back.
    """
    payload = pickling.dumps((function, arguments))
    if payload is None:
        return Lost(
            "unavailable",
            "the kernel cannot be sent to another process: something that it uses has no pickle",
        )
    request = {"kind": "call", "sys_path": pickling.import_path()}
    done = shared_pool().run(Job(request, payload, timeout_s, load_s=_START_S))
    if done.status != "done":
        place = locations.from_fault(done.log)
        hint = _ENDLESS if done.status == "timeout" else None
        return Lost("failed", f"{ENDED}: {done.detail}", str(place) if place else None, hint)
    if not done.result.get("ok"):
        message = str(done.result.get("message")).splitlines()[0]
        return Lost("unavailable", f"{done.result.get('type')}: {message}")
    outcomes: list[Outcome] = done.value
    return outcomes


def plain_runs(
    fn: Callable[..., Any], arrays: Sequence[np.ndarray], patterns: Sequence[str]
) -> list[Outcome]:
    """Run a program with the plain interpreter, once per padding pattern.

    Args:
        fn: The program, interpreted.
        arrays: Its arguments.
        patterns: See `_compat_jax.pallas_padding`.
    """
    import jax

    outcomes = []
    for pattern in patterns:
        with _compat_jax.pallas_padding(pattern):
            jax.clear_caches()  # of what was traced with another padding
            outcomes.append(_run(fn, arrays))
    jax.clear_caches()
    return outcomes


def tpu_runs(runs: Sequence[Callable[..., Any]], arrays: Sequence[np.ndarray]) -> list[Outcome]:
    """Run a program with the TPU interpreter, once for each set of its parameters.

    Args:
        runs: The program with each set of parameters.
        arrays: Its arguments.
    """
    return [_run(fn, arrays) for fn in runs]


def _run(fn: Callable[..., Any], arrays: Sequence[np.ndarray]) -> Outcome:
    import jax
    from jax.experimental.pallas import tpu as pltpu

    printed = io.StringIO()
    with _only_cpu(), contextlib.redirect_stdout(printed), _callback_failures() as failures:
        pltpu.reset_tpu_interpret_mode_state()
        try:
            device = _compat_jax.cpu_device()
            with jax.default_device(device):
                values = [jax.device_put(array, device) for array in arrays]
                compiled = jax.jit(fn).lower(*values).compile(compiler_options=_OPTIONS)
                found = [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(*values))]
            raced = _compat_jax.interpreter_races()
            return Outcome(tuple(found), printed.getvalue(), raced)
        except Exception as error:
            found_at = [locations.from_exception(failure) for failure in (*failures, error)]
            place = next((place for place in found_at if place is not None), None)
            return Outcome(
                printed=printed.getvalue(),
                raced=_compat_jax.interpreter_races(),
                error=str(error) or type(error).__name__,
                error_type=type(error).__name__,
                place=str(place) if place else None,
            )


class _Failures(logging.Handler):
    """Collects the exceptions that JAX logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self.found.append(error)


@contextlib.contextmanager
def _callback_failures() -> Iterator[list[BaseException]]:
    """What the interpreter raises, as an object.

    On its way through XLA an exception turns into text; JAX logs it before, with the place at which
    the operation was traced.
    """
    logger = logging.getLogger("jax._src.callback")
    handler, propagate = _Failures(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.found
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


@contextlib.contextmanager
def _only_cpu() -> Iterator[None]:
    import jax

    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)
