"""`autotune`: from a kernel, its arguments and a config space to a stored choice and a report."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels.compiler.chips import Target, resolve
from tpu_kernels.compiler.versions import jax_version, libtpu_version, why_unavailable
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError, ConfigError, MissingDependency, TuningError
from tpu_kernels.registry import reference as references
from tpu_kernels.registry.config_table import ConfigRequest
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import compare, compiled, lookup, space
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.candidates import Candidate, current_index, named_arguments, prepare
from tpu_kernels.tuning.objective import objective as objective_named
from tpu_kernels.tuning.report import TuneReport, TuneRow, config_text
from tpu_kernels.tuning.wall import WallSearch

MEASURES = ("auto", "compiler", "cost-model", "roofline", "wall", "device")
_TIMEOUT_S = {"compiled": 300.0, "wall": 60.0}
_REASONS_SHOWN = 50


class TuningFallback(UserWarning):
    """No config of a kernel works; its reference is what is left."""


@dataclass(frozen=True)
class Progress:
    """What is known while a search runs.

    Attributes:
        done: How many candidates are decided.
        total: How many there are.
        row: The one decided last.
        best: The best so far, None if none works yet.
    """

    done: int
    total: int
    row: TuneRow
    best: TuneRow | None


def autotune(
    kernel: Kernel,
    args: Sequence[Any] | torch.Tensor,
    *,
    configs: Any = None,
    constraints: Any = None,
    target: str | Target | None = None,
    measure: str = "auto",
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    timeout_s: float | None = None,
    budget_s: float | None = None,
    strict: bool = False,
    cache: TuningCache | str | os.PathLike[str] | None = None,
    store: bool = True,
    progress: Callable[[Progress], None] | None = None,
    **kwargs: Any,
) -> TuneReport:
    """Find the best config of a kernel for given arguments, and let the next call use it.

    With a target, every candidate is compiled by the real TPU compiler, without a TPU, and ranked
    by its figures. Without one, every candidate runs on this machine's CPU, its result is compared
    with the reference, and its time is measured. Either way candidates run in processes of their
    own: one that fails, hangs or aborts is a row of the report.

    Args:
        kernel: What `tpu_kernel` returned.
        args: Its positional arguments (or the only one): tensors of the shapes and dtypes to
            tune for.
        configs: A dict of lists (all combinations), a list of dicts or `helion.Config`, or a
            function of the kernel's arguments that returns one; by default the kernel's own
            `configs`.
        constraints: A function, or several, of config values and arguments by name; false or a text
            leaves a config out. They add to the kernel's own.
        target: The chip to tune for, such as ``"v6e"``; None for this machine's CPU.
        measure: ``"compiler"`` or ``"cost-model"`` (the TPU compiler's figures), ``"roofline"``
            (grid and blocks alone, nothing is compiled), ``"wall"`` (time on this CPU), or
            ``"auto"``: ``"compiler"`` with a target, ``"wall"`` without.
        reference: A torch function of the kernel's arguments that results are compared with (on the
            CPU only); by default the kernel's own.
        tolerance: Largest accepted error, relative to the reference's largest value; by dtype.
        timeout_s: Seconds for one candidate; 300 for compiling, 60 on the CPU.
        budget_s: Seconds for the whole search; what is not tried by then is ``"skipped"``.
        strict: Raise if no candidate works, instead of reporting it.
        cache: Where the choice is kept; a `TuningCache`, its folder, or None for the user's cache.
        store: Whether to keep the choice at all.
        progress: Called whenever a candidate is decided.
        **kwargs: The kernel's arguments by name.

    Returns:
        The report: one row per candidate, the best, and why.

    Raises:
        ArgumentError: The arguments or options do not fit.
        ConfigError: The space is empty, or names what the kernel does not have.
        MissingDependency: The TPU compiler is asked for and not installed.
        TuningError: `strict`, and no candidate works; the text lists every reason.

    Example:
        >>> import jax, torch
        >>> from tpu_kernels.registry.decorator import tpu_kernel
        >>> @tpu_kernel("doc::scale")
        ... def scale(x: jax.Array, *, unroll: int = 1) -> jax.Array:
        ...     return 2 * x
        >>> report = autotune(scale, [torch.ones(8, 128)], configs={"unroll": [1, 2]},
        ...                   target="v6e", measure="roofline", store=False)
        >>> [(row.config, row.status) for row in report.results]
        [({'unroll': 1}, 'ok'), ({'unroll': 2}, 'ok')]
    """
    started = time.monotonic()
    search = _Search(
        kernel=_checked_kernel(kernel),
        args=(args,) if isinstance(args, torch.Tensor) else tuple(args),
        kwargs=kwargs,
        measure=_measure_for(measure, target),
        target=resolve(target) if target is not None else None,
        reference=reference if reference is not None else kernel.spec.reference,
        tolerance=tolerance,
        timeout_s=timeout_s,
        deadline=math.inf if budget_s is None else started + budget_s,
        progress=progress,
    )
    search.prepare(configs, constraints)
    cache = cache if isinstance(cache, TuningCache) else TuningCache(cache)
    try:
        search.run()
    except KeyboardInterrupt:
        # The best so far is worth keeping; the user still wants the program to stop.
        search.progress = None
        search.close("interrupted")
        if store:
            search.store(cache)
        raise
    search.close("the time budget had ended")
    stored = store and search.store(cache)
    report = dataclasses.replace(search.report(), seconds=time.monotonic() - started, stored=stored)
    if report.best is None:
        _no_config_works(report, strict)
    return report


@dataclass
class _Search:
    """One run of `autotune`."""

    kernel: Kernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    measure: str
    target: Target | None
    reference: Callable[..., Any] | None
    tolerance: float | None
    timeout_s: float | None
    deadline: float
    progress: Callable[[Progress], None] | None

    def prepare(self, configs: Any, constraints: Any) -> None:
        """List and bind the candidates."""
        spec = self.kernel.spec
        given = configs if configs is not None else spec.configs
        if given is None:
            raise ConfigError(
                f"kernel {spec.name!r}: there are no configs to try",
                where=str(spec.source),
                hint='pass configs={"block_m": [128, 256]}, or declare configs on the kernel',
            )
        arguments = named_arguments(self.kernel, self.args, self.kwargs)
        self.configs = space.expand(given, arguments, kernel=spec.name)
        allowed = [p.name for p in spec.op_parameters if not p.kind.is_tensor]
        space.check_names(self.configs, allowed, kernel=spec.name, where=str(spec.source))
        rules = [*_as_list(spec.constraints), *_as_list(constraints)]
        self.rows: dict[int, TuneRow] = {}
        self.order: list[int] = []
        self.chosen: int | None = None
        self.decision = ""
        self.candidates: list[Candidate] = []
        chip = self.target.chip.name if self.target is not None else settings().sim_chip
        self.current = current_index(self.kernel, self.args, self.kwargs, self.configs, chip)
        prepared = prepare(self.kernel, self.args, self.kwargs, self.configs, rules)
        self.bound = next((c.bound for c in prepared if isinstance(c, Candidate)), None)
        for index, item in enumerate(prepared):
            if isinstance(item, Candidate):
                self.candidates.append(item)
            else:
                self.found(index, item)

    def found(self, index: int, row: TuneRow) -> None:
        """Take in the fate of a candidate."""
        if index not in self.rows:
            self.order.append(index)
        self.rows[index] = row
        if self.progress is not None:
            best = min(self._working().values(), key=lambda r: r.rank, default=None)
            self.progress(Progress(len(self.rows), len(self.configs), row, best))

    def run(self) -> None:
        """Try the candidates and choose."""
        if not self.candidates:
            return
        if self.measure == "wall":
            self._run_on_cpu()
        else:
            self._run_compiled()

    def _run_compiled(self) -> None:
        if self.target is None:
            raise ArgumentError(f"measure={self.measure!r} needs a target", hint='target="v6e"')
        goal = objective_named(self.measure)
        compiled.try_candidates(
            self.candidates,
            self.target,
            goal,
            self.found,
            first=self.current,
            timeout_s=self.timeout_s or _TIMEOUT_S["compiled"],
            deadline=self.deadline,
            compiler=self.measure != "roofline",
        )

    def _run_on_cpu(self) -> None:
        wanted = self._reference_outputs()
        limit = self.timeout_s or _TIMEOUT_S["wall"]
        with WallSearch(
            self.candidates,
            wanted,
            tolerance=self.tolerance,
            timeout_s=limit,
            deadline=self.deadline,
        ) as search:
            search.try_all(self.found)
            working = self._working()
            if len(working) > 1 and time.monotonic() < self.deadline:
                self.chosen, selection, again = search.choose(working, self.current)
                self.decision = selection.reason
                for index, row in again.items():
                    self.rows[index] = row

    def _reference_outputs(self) -> list[torch.Tensor] | None:
        """What the reference makes of the arguments on the CPU, as the kernel orders results."""
        if self.reference is None:
            return None
        spec = dataclasses.replace(self.kernel.spec, reference=self.reference)
        values = {
            name: _on_cpu(value)
            for name, value in named_arguments(self.kernel, self.args, self.kwargs).items()
        }
        with torch.no_grad():
            results = compare.leaves(references.call(spec, values))
        if spec.mutates_args:
            results += compare.leaves([values[name] for name in spec.mutates_args])
        return results

    def _working(self) -> dict[int, TuneRow]:
        return {index: row for index, row in self.rows.items() if row.ok}

    def close(self, reason: str) -> None:
        """Give every candidate a row, and choose if the search has not."""
        for index, config in enumerate(self.configs):
            if index not in self.rows:
                self.found(index, TuneRow(config, "skipped", reason))
        working = self._working()
        if self.chosen is None and working:
            # Equal figures keep the config in force, then the order given.
            self.chosen = min(working, key=lambda i: (working[i].rank, i != self.current, i))
            first = min(working) if self.current not in working else self.current
            if self.chosen != first and working[first].rank < math.inf:
                ratio = working[first].rank / max(working[self.chosen].rank, 1e-30)
                name = "the config in force" if first == self.current else "the first config"
                unit = working[self.chosen].cost_unit or "time"
                self.decision = f"{ratio:.2f} times better than {name} by {unit}"

    def store(self, cache: TuningCache) -> bool:
        """Keep the choice; return whether there was one to keep."""
        if self.chosen is None or self.bound is None:
            return False
        row = self.rows[self.chosen]
        lookup.store(
            self.request(),
            cache,
            row.config,
            row.time_us,
            objective=self.measure,
            cost=row.cost,
            cost_unit=row.cost_unit,
            figures=dict(row.figures),
            candidates=len(self.configs),
            working=len(self._working()),
            decision=self.decision,
            versions={"jax": jax_version(), "libtpu": libtpu_version()},
        )
        return True

    def request(self) -> ConfigRequest:
        """What identifies the tuned call; the values that a config sets are not part of it."""
        if self.bound is None:
            raise TuningError(f"kernel {self.kernel.name!r}: no config fits the arguments")
        if self.measure == "wall":
            target = lookup.CPU
        else:
            target = self.target.chip.name if self.target is not None else settings().sim_chip
        request = self.bound.request(target)
        tuned = {name for config in self.configs for name in config}
        static = {name: value for name, value in request.static.items() if name not in tuned}
        return dataclasses.replace(request, static=static)

    def report(self) -> TuneReport:
        """The report as far as the search has come."""
        position = {index: place for place, index in enumerate(self.order)}
        rows = []
        for index in self.order:
            row = self.rows[index]
            if row.same_as is not None:
                row = dataclasses.replace(row, same_as=position[row.same_as])
            rows.append(row)
        best = rows[position[self.chosen]] if self.chosen is not None else None
        return TuneReport(
            kernel=self.kernel.name,
            target=self.target.name if self.target is not None else None,
            objective=self.measure,
            results=tuple(rows),
            best=best,
            fallback="reference" if best is None and self.reference is not None else None,
            decision=self.decision,
        )


def _checked_kernel(kernel: Any) -> Kernel:
    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            f"autotune takes a kernel, got {type(kernel).__name__}",
            hint="decorate the function with tpu_kernel and pass what that returns",
        )
    return kernel


def _measure_for(measure: str, target: str | Target | None) -> str:
    if measure not in MEASURES:
        raise ArgumentError(
            f"measure={measure!r} is not known", hint=f"use one of {', '.join(MEASURES)}"
        )
    if measure == "device":
        raise ArgumentError(
            "measure='device' needs a TPU, and measuring on one is not available yet",
            hint="use measure='compiler' with a target",
        )
    if measure == "wall" and target is not None:
        raise ArgumentError(
            f"measure='wall' runs on this machine's CPU and cannot tell the time on {target}",
            hint="leave target out, or use measure='compiler'",
        )
    if measure == "auto":
        measure = "wall" if target is None else "compiler"
    if measure == "cost-model":
        measure = "compiler"
    if measure == "compiler" and (missing := why_unavailable()) is not None:
        raise MissingDependency(missing[0], hint=f"{missing[1]}; or use measure='roofline'")
    return measure


def _no_config_works(report: TuneReport, strict: bool) -> None:
    rows = [f"  {config_text(r.config)}: {r.status}: {r.reason}" for r in report.results]
    if len(rows) > _REASONS_SHOWN:
        rows[_REASONS_SHOWN:] = [f"  and {len(rows) - _REASONS_SHOWN} more"]
    where = f" for {report.target}" if report.target else ""
    text = f"kernel {report.kernel!r}: none of {len(report.results)} configs works{where}"
    if strict:
        raise TuningError("\n".join([text, *rows]), hint="try smaller blocks")
    left = "; its reference is what is left" if report.fallback else ""
    warnings.warn("\n".join([text + left, *rows]), TuningFallback, stacklevel=3)


def _as_list(rules: Any) -> list[Any]:
    if rules is None:
        return []
    return [rules] if callable(rules) else list(rules)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
