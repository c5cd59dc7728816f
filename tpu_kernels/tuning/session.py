"""One run of `autotune`: candidates, their fates, the choice, and what is kept of it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.pool import Workers
from tpu_kernels.compiler.versions import jax_version, libtpu_version
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError, ConfigError, TuningError
from tpu_kernels.registry.binding import Bound
from tpu_kernels.registry.config_table import ConfigRequest
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import fill
from tpu_kernels.registry.programs import named_values
from tpu_kernels.tuning import lookup, space
from tpu_kernels.tuning.activity import Activity
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.candidates import Candidate, current_index, named_arguments, prepare
from tpu_kernels.tuning.device import Device
from tpu_kernels.tuning.journal import Journal
from tpu_kernels.tuning.report import TuneReport, TuneRow

WALL = ("wall", "device")
"""Measures that run candidates on this machine."""


@dataclass(frozen=True)
class Progress:
    """What is known while a search runs.

    Attributes:
        done: How many candidates are decided.
        total: How many there are, or may be tried.
        row: The one decided last.
        best: The best so far, None if none works yet.
    """

    done: int
    total: int
    row: TuneRow
    best: TuneRow | None


@dataclass
class Session:
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
    trials: int | None = None
    seed: int = 0
    against_xla: bool = False
    workers: Workers | None = None
    device: Device | None = None
    watch: Callable[[Activity], None] | None = None

    def prepare(self, configs: Any, constraints: Any) -> None:
        """List the candidates."""
        spec = self.kernel.spec
        given = configs if configs is not None else spec.configs
        if given is None and spec.config_space is not None:
            given = self._own_space()
        if given is None:
            raise ConfigError(
                f"kernel {spec.name!r}: there are no configs to try",
                where=str(spec.source),
                hint='pass configs={"block_m": [128, 256]}, or declare configs on the kernel',
            )
        self.arguments = named_arguments(self.kernel, self.args, self.kwargs)
        self.configs = space.expand(given, self.arguments, kernel=spec.name)
        if spec.read_config is not None:
            self.configs = [spec.read_config(config) for config in self.configs]
        allowed = [p.name for p in spec.op_parameters if not p.kind.is_tensor]
        space.check_names(self.configs, allowed, kernel=spec.name, where=str(spec.source))
        self.rules = [*_as_list(spec.constraints), *_as_list(constraints)]
        self.rows: dict[int, TuneRow] = {}
        self.order: list[int] = []
        self.chosen: int | None = None
        self.decision = ""
        self.bound: Bound | None = None
        self.journal: Journal | None = None
        self.baseline: TuneRow | None = None
        chip = self.target.chip.name if self.target is not None else settings().sim_chip
        self.current = current_index(self.kernel, self.args, self.kwargs, self.configs, chip)
        if self.current is None:
            self._add_heuristic()

    def _own_space(self) -> Sequence[Any] | None:
        """What the kernel's language says is worth trying for these arguments."""
        spec = self.kernel.spec
        bound = self.kernel.bind(*self.args, **self.kwargs)
        values = named_values(
            spec.op_parameters,
            fill(bound.call.layout, bound.avals),
            bound.dynamics,
            bound.static,
        )
        return spec.config_space(values) if spec.config_space is not None else None

    def _add_heuristic(self) -> None:
        """What the kernel chooses by itself for a None is a candidate as well."""
        names = dict.fromkeys(name for config in self.configs for name in config)
        parameters = [self.kernel.spec.parameter(name) for name in names]
        if not parameters or not all(p.tunable and p.default is None for p in parameters):
            return
        self.configs.append(dict.fromkeys(names))
        self.current = len(self.configs) - 1

    def resume(self, folder: str) -> None:
        """Go on where an earlier search of the same was killed."""
        if not self.bind(range(len(self.configs)), stop_at_first=True):
            return
        tolerance = {"tolerance": self.tolerance} if self.tolerance is not None else {}
        identity = {
            **lookup.exact_key(self.request()),
            "measure": self.measure,
            "timeout_s": self.timeout_s,
            "versions": {"jax": jax_version(), "libtpu": libtpu_version()},
            **tolerance,
        }
        with contextlib.suppress(ArgumentError):  # a static value without a stable spelling
            self.journal = Journal(folder, identity)
            for index, row in self.journal.recall(self.configs).items():
                self._take(index, row)

    def found(self, index: int, row: TuneRow) -> None:
        """Take in the fate of a candidate."""
        self._take(index, row)
        if self.journal is not None:
            with contextlib.suppress(ArgumentError):  # a config that cannot be written down
                self.journal.add(row)

    def _take(self, index: int, row: TuneRow) -> None:
        if index not in self.rows:
            self.order.append(index)
        self.rows[index] = row
        if self.progress is not None:
            best = min(self.working().values(), key=lambda r: r.rank, default=None)
            total = min(len(self.configs), self.trials or len(self.configs))
            self.progress(Progress(len(self.rows), max(total, len(self.rows)), row, best))

    def bind(self, indices: Iterable[int], *, stop_at_first: bool = False) -> list[Candidate]:
        """Bind configs to the arguments; what violates a constraint or does not bind is a row."""
        candidates = []
        for index in indices:
            if index in self.rows:
                continue
            (item,) = prepare(
                self.kernel, self.args, self.kwargs, [self.configs[index]], self.rules
            )
            if isinstance(item, Candidate):
                candidates.append(dataclasses.replace(item, index=index))
                self.bound = self.bound or item.bound
                if stop_at_first:
                    break
            else:
                self.found(index, item)
        return candidates

    def working(self) -> dict[int, TuneRow]:
        """The rows of candidates that work, by index."""
        return {index: row for index, row in self.rows.items() if row.ok}

    def close(self, reason: str) -> None:
        """Give every candidate a row (of a space that is sampled, those asked for have one), and
        choose if the search has not."""
        for index, config in enumerate(self.configs if self.trials is None else ()):
            if index not in self.rows:
                self._take(index, TuneRow(config, "skipped", reason))
        working = self.working()
        if self.chosen is None and working:
            # Equal figures keep the config in force, then the order given.
            self.chosen = min(working, key=lambda i: (working[i].rank, i != self.current, i))
            first = min(working) if self.current not in working else self.current
            if self.chosen != first and working[first].rank < math.inf:
                ratio = working[first].rank / max(working[self.chosen].rank, 1e-30)
                name = "the config in force" if first == self.current else "the first config"
                unit = working[self.chosen].cost_unit or "time"
                self.decision = f"{ratio:.2f} times better than {name} by {unit}"
        if self.chosen is not None and self.baseline is not None and self.baseline.ok:
            ratio = self.baseline.rank / max(working[self.chosen].rank, 1e-30)
            against = "faster" if ratio >= 1 else "slower"
            told = f"{max(ratio, 1 / ratio):.2f} times {against} than XLA without the kernel"
            self.decision = "; ".join(filter(None, (self.decision, told)))

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
            objective=self.measure if self.device is None or row.time_us is None else "device",
            device=None if self.device is None else self.device.name,
            cost=row.cost,
            cost_unit=row.cost_unit,
            figures=dict(row.figures),
            candidates=len(self.configs),
            working=len(self.working()),
            decision=self.decision,
            xla_us=None if self.baseline is None else self.baseline.cost,
            versions={"jax": jax_version(), "libtpu": libtpu_version()},
        )
        return True

    def request(self) -> ConfigRequest:
        """What identifies the tuned call; the values that a config sets are not part of it."""
        if self.bound is None:
            raise TuningError(f"kernel {self.kernel.name!r}: no config fits the arguments")
        if self.measure in WALL:
            chip = self.device.chip if self.device is not None else None
            target = chip or lookup.CPU
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
                row = dataclasses.replace(row, same_as=position.get(row.same_as))
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
            space=len(self.configs),
            baseline=self.baseline,
        )


def _as_list(rules: Any) -> list[Any]:
    if rules is None:
        return []
    return [rules] if callable(rules) else list(rules)
