"""What is checked: a kernel or JAX function with its arguments, in the forms that passes need."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpu_kernels import _compat_jax
from tpu_kernels.compiler import Target, locations
from tpu_kernels.compiler.pallas_grid import (
    GridCall,
    argument_of,
    copy_starts,
    grid_calls,
    trace,
)
from tpu_kernels.compiler.time_limit import time_limit
from tpu_kernels.dsl import dtypes
from tpu_kernels.errors import TraceTimeout
from tpu_kernels.registry.binding import Bound
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import flat_names, join
from tpu_kernels.verify.compiling import Traceable
from tpu_kernels.verify.portable import portable
from tpu_kernels.verify.report import CheckRow

_OPERAND = re.compile(r"input (\d+) of pallas_call")


@dataclass(frozen=True)
class Subject:
    """A kernel or function with arguments.

    Attributes:
        program: The call as the compiler takes it.
        bound: The call as the registry knows it, None for a plain JAX function.
        rebind: The program with other values for some static arguments.
        default: The target to trace for where none is given.
        timeout_s: Seconds that a pass in another process may take.
    """

    program: Traceable
    bound: Bound | None
    rebind: Callable[[Mapping[str, Any]], Traceable]
    default: Target
    timeout_s: float

    @property
    def kernel(self) -> Kernel | None:
        """The registered kernel, None for a plain JAX function."""
        return None if self.bound is None else self.bound.kernel

    @property
    def where(self) -> str | None:
        """``file:line`` of the definition."""
        return self.program.where

    @property
    def call_place(self) -> str | None:
        """``file:line`` of the first `pallas_call`, of the definition where there is none."""
        return next((call.where for call in self.calls if call.where), self.where)

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """The author's name of each flat array argument."""
        if self.bound is None:
            return {index: f"array {index}" for index in range(len(self.program.avals))}
        parameters = self.bound.kernel.spec.op_parameters
        return dict(enumerate(flat_names(parameters, self.bound.call.layout)))

    @functools.cached_property
    def arguments(self) -> list[Any]:
        """Every argument of the operator in schema order, tensors on the CPU and detached."""
        if self.bound is None:
            raise TypeError("a plain function has no operator arguments")
        tensors = [tensor.detach().cpu() for tensor in self.bound.tensors]
        parameters = self.bound.kernel.spec.op_parameters
        return join(parameters, self.bound.call.layout, tensors, self.bound.dynamics)

    def with_names(self, text: str) -> str:
        """Say which of the author's arguments "input 0 of pallas_call" is, where that is sure."""

        try:
            calls = self.calls
        except Exception:  # a program that cannot be traced: the text most likely says why
            return text

        def named(match: re.Match[str]) -> str:
            argument = argument_of(calls, int(match[1]))
            name = self.names.get(argument) if argument is not None else None
            return match[0] if name is None else f"argument {name!r} ({match[0]})"

        return _OPERAND.sub(named, text)

    @property
    def valueless(self) -> str | None:
        """Why no pass that needs values can run, None if all can."""
        for index, leaf in enumerate(self.program.leaves):
            meta = isinstance(leaf, torch.Tensor) and leaf.is_meta
            if meta or type(leaf).__name__ == "ShapeDtypeStruct":
                return f"{self.names[index]} has no values: pass a tensor that has"
        return None

    @functools.cached_property
    def arrays(self) -> list[np.ndarray]:
        """Values of the flat arrays, with the dtypes that the kernel sees."""
        pairs = zip(self.program.leaves, self.program.avals, strict=True)
        return [_as_numpy(leaf, np.dtype(aval.dtype)) for leaf, aval in pairs]

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The traced program on the default target."""
        return self.trace(self.default)

    @functools.cached_property
    def calls(self) -> list[GridCall]:
        """The Pallas calls of the program on the default target."""
        return grid_calls(self.jaxpr)

    @functools.cached_property
    def copy_starts(self) -> list[str | None]:
        """Where its kernels start copies of their own, as ``file:line``."""
        return copy_starts(self.jaxpr)

    def trace(self, target: Target) -> Any:
        """The traced program as a target sees it.

        Raises:
            TraceTimeout: The author's code did not end; it is not tried a second time.
        """
        if self._endless:
            raise self._endless[0]
        try:
            with time_limit(self.timeout_s, "it"):
                return trace(self.program.function_for(target), self.program.avals, target)
        except TraceTimeout as error:
            self._endless.append(error)
            raise

    @functools.cached_property
    def _endless(self) -> list[TraceTimeout]:
        return []

    def interpreted(self, mode: Any) -> Callable[..., Any]:
        """The program for the CPU, with a Pallas interpreter, in a form that can be pickled.

        Args:
            mode: True, or `pltpu.InterpretParams`.
        """
        if self.bound is not None:
            return portable(self.bound, mode, self.default.chip.name)
        return functools.partial(interpret_plain, self.program.function_for(self.default), mode)


def interpret_plain(fn: Callable[..., Any], mode: Any, *arrays: Any) -> Any:
    """Run a plain JAX function with every Pallas call interpreted."""
    with _compat_jax.pallas_interpret(mode):
        return fn(*arrays)


def _as_numpy(leaf: Any, dtype: np.dtype) -> np.ndarray:
    if not isinstance(leaf, torch.Tensor):
        return np.asarray(leaf).astype(dtype, copy=False)
    values = dtypes.to_numpy(leaf)  # a 64-bit argument that the kernel sees narrow is cast
    return values if values.dtype.itemsize == dtype.itemsize else values.astype(dtype)


def failed(
    name: str, what: str, place: str | None, hint: str | None = None, seconds: float = 0.0
) -> CheckRow:
    """A row for a finding, with the text of the author's line.

    Args:
        name: Name of the pass.
        what: The finding.
        place: ``file:line``, empty or None if unknown.
        hint: What to do.
        seconds: Time taken.
    """
    text = locations.parse(place).text if place and place.rpartition(":")[2].isdigit() else ""
    return CheckRow(name, "failed", what, place or None, text or None, hint, seconds)


def failed_with(name: str, doing: str, error: BaseException, where: str | None) -> CheckRow:
    """A row for an exception: its own words, and the author's line that it came from.

    Args:
        name: Name of the pass.
        doing: What was being done, such as ``"the kernel"``.
        error: The exception.
        where: Place to name where the exception has none.
    """
    place = locations.from_exception(error)
    told: BaseException = error
    while told.__cause__ is not None and type(told).__module__.startswith("tpu_kernels"):
        told = told.__cause__
    lines = str(told).strip().splitlines() or [""]
    if isinstance(error, TraceTimeout):
        return failed(name, f"{doing}: {error.problem}", error.where or where, error.hint)
    return failed(
        name, f"{doing} raised {type(told).__name__}: {lines[0]}", str(place) if place else where
    )


def guarded(name: str, run: Callable[[], CheckRow]) -> CheckRow:
    """Run a pass; a failure of the pass itself becomes a row that says so.

    A report with many rows must not be lost because one analysis meets something that it does not
    know.

    Args:
        name: Name of the pass.
        run: Returns its row.
    """
    try:
        return run()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return CheckRow(
            name,
            "unavailable",
            f"the pass itself failed: {type(error).__name__}: {first}",
            hint="this is a mistake in tpu_kernels, not in the kernel: please report it",
        )


def one_of(names: Sequence[str]) -> str:
    """Join names for a sentence.

    Example:
        >>> one_of(["x"]), one_of(["x", "y"])
        ('x', 'x or y')
    """
    return " or ".join(names)
