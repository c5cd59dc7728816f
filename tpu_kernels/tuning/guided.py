"""Searching a space that is too large to try everything, by optuna's sampler.

The search asks for configs and tells what they cost; optuna models which values tend to be good.
Sizes are ordered, other values are not. Configs that fail are told as worse than the worst that
works, so that the sampler leaves their neighbourhood.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpu_kernels.errors import MissingDependency
from tpu_kernels.tuning.records import canonical, encode
from tpu_kernels.tuning.report import TuneRow

_ASKS = 50  # in vain for one new config, before a random one is taken


def available() -> bool:
    """Whether optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


class Guide:
    """Proposes configs of a space, each once.

    Args:
        configs: The space.
        seeds: Indices to propose first, in this order.
        seed: Makes proposals repeatable, as long as what is told is the same.

    Raises:
        MissingDependency: optuna is not installed.

    Example:
        >>> space = [{"block": 8 * n} for n in range(1, 100)]
        >>> guide = Guide(space, seeds=[50])
        >>> for _ in range(25):
        ...     for index in guide.ask(1):
        ...         cost = abs(space[index]["block"] - 160) + 1.0
        ...         guide.tell(index, TuneRow(space[index], "ok", cost=cost))
        >>> guide.best is not None and abs(space[guide.best]["block"] - 160) < 100
        True
    """

    def __init__(
        self, configs: Sequence[Mapping[str, Any]], *, seeds: Sequence[int] = (), seed: int = 0
    ) -> None:
        if not available():
            raise MissingDependency(
                "searching a space by optuna needs the package optuna",
                hint="pip install 'tpu_kernels[search]', or search='exhaustive'",
            )
        import optuna

        self._optuna = optuna
        self._configs = configs
        self._seeds = list(dict.fromkeys(seeds))
        self._random = random.Random(seed)
        self._waiting = set(range(len(configs)))
        self._asked: dict[int, Any] = {}
        self._worst = 0.0
        self.best: int | None = None
        self._best_rank = math.inf
        self._values = _values(configs)
        self._places = {
            tuple(self._point(config).items()): index for index, config in enumerate(configs)
        }
        with _quiet(optuna):
            # Among the configs asked for before anything is told, each repels the next.
            sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=8
            )
            self._study = optuna.create_study(sampler=sampler)
        self._distributions = {name: self._distribution(name) for name in self._values}

    def ask(self, count: int) -> list[int]:
        """Return up to so many indices, none of them twice, and none at the end."""
        found: list[int] = []
        while len(found) < count and self._waiting:
            index = self._seeds.pop(0) if self._seeds else self._sample()
            if index in self._waiting:
                self._waiting.discard(index)
                found.append(index)
        return found

    def tell(self, index: int, row: TuneRow) -> None:
        """Tell what became of a config; one that nobody asked for is welcome, too."""
        self._waiting.discard(index)
        works = row.ok and math.isfinite(row.rank) and row.rank > 0
        if works:
            self._worst = max(self._worst, math.log(row.rank))
            if row.rank < self._best_rank:
                self.best, self._best_rank = index, row.rank
        value = math.log(row.rank) if works else self._worst + 1.0
        trial = self._asked.pop(index, None)
        with _quiet(self._optuna):
            if trial is None:
                params = self._point(self._configs[index])
                self._study.add_trial(
                    self._optuna.trial.create_trial(
                        params=params, distributions=self._distributions, value=value
                    )
                )
            else:
                self._study.tell(trial, value)

    def _sample(self) -> int:
        failed = self._optuna.trial.TrialState.FAIL
        with _quiet(self._optuna):
            for _ in range(_ASKS):
                trial = self._study.ask(self._distributions)
                index = self._places.get(tuple(trial.params.items()))
                if index is not None and index in self._waiting:
                    self._asked[index] = trial
                    return index
                self._study.tell(trial, state=failed)  # not in the space, or known
        return self._random.choice(sorted(self._waiting))

    def _point(self, config: Mapping[str, Any]) -> dict[str, int]:
        return {name: known[_text(config.get(name))] for name, known in self._values.items()}

    def _distribution(self, name: str) -> Any:
        size = len(self._values[name])
        if all(isinstance(config.get(name), int) for config in self._configs):
            return self._optuna.distributions.IntDistribution(0, size - 1)
        return self._optuna.distributions.CategoricalDistribution(list(range(size)))


def _values(configs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The place of each value of each parameter that varies, in the order of the values."""
    places: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = {_text(config.get(name)): config.get(name) for config in configs}
        if len(values) > 1:
            texts = sorted(values, key=lambda text: _order(values[text]))
            places[name] = {text: place for place, text in enumerate(texts)}
    return places


def _order(value: Any) -> tuple[int, float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, repr(value))


def _text(value: Any) -> str:
    return canonical(encode(value))


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Keep optuna's log and its notes on experimental options away from the user."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(level)
