"""Choosing among measured configs when noise and drift are larger than the gaps between them.

The rule: measure in rounds, every config once per round in random order, and compare only within a
round, so that drift cancels. A config replaces the default only if the median of its paired ratios
is better by more than the noise of that median; ties keep the default.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kernels.errors import ArgumentError, TuningError

_MIN_ROUNDS = 8  # fewer paired ratios say nothing about their own noise
_DOUBT = 0.0125  # chance that the default is replaced though nothing is faster, over all candidates
_HOPELESS = 3.5  # standard errors behind the leader at which a config is dropped early
_MAD_TO_SIGMA = 1.4826
_MEDIAN_SE = 1.2533  # standard error of a median over that of a mean, for Gaussian noise


@dataclass(frozen=True)
class Samples:
    """What was measured of one config.

    Attributes:
        config: The config as it was given.
        median_us: Median of its times, in the unit of `measure` (µs by convention).
        spread_us: Robust standard deviation of its times, same unit.
        samples: How many times it was measured.
        gain: How much faster than the default it is, as a fraction (0.03: 3%), from paired ratios.
        noise: Standard error of `gain`.
        reason: Why it was dropped, empty if it was measured to the end.
    """

    config: Mapping[str, Any]
    median_us: float
    spread_us: float
    samples: int
    gain: float
    noise: float
    reason: str = ""


@dataclass(frozen=True)
class Selection:
    """The chosen config and why.

    Attributes:
        config: The chosen config as it was given.
        changed: Whether it is another than the default.
        gain: How much faster than the default it is, as a fraction.
        noise: Standard error of `gain`.
        reason: The decision in one line.
        samples: The figures of every config, in the order given.
    """

    config: Mapping[str, Any]
    changed: bool
    gain: float
    noise: float
    reason: str
    samples: tuple[Samples, ...]


class _Arm:
    """One config while it is being measured."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.times: list[float] = []
        self.reason = ""

    @property
    def alive(self) -> bool:
        return not self.reason

    def measure(self, measure: Callable[[Mapping[str, Any]], float]) -> None:
        try:
            value = float(measure(self.config))
        except Exception as error:  # a failing candidate costs that candidate only
            self.reason = f"measuring raised {type(error).__name__}: {error}"
            return
        if not (math.isfinite(value) and value > 0):
            self.reason = f"measured {value}, which is not a time"
            return
        self.times.append(value)

    def gain_over(self, base: _Arm) -> tuple[float, float]:
        """Median of log(base/own) over the common rounds, and its standard error."""
        if base is self:
            return 0.0, 0.0
        ratios = [math.log(b / a) for a, b in zip(self.times, base.times, strict=False)]
        if not ratios:
            return 0.0, math.inf
        middle = statistics.median(ratios)
        sigma = _MAD_TO_SIGMA * statistics.median(abs(r - middle) for r in ratios)
        return middle, _MEDIAN_SE * sigma / math.sqrt(len(ratios))


def select(
    configs: Sequence[Mapping[str, Any]],
    *,
    default: Mapping[str, Any] | None = None,
    measure: Callable[[Mapping[str, Any]], float],
    budget: int = 300,
    budget_s: float | None = None,
    min_gain: float = 0.0,
    seed: int = 0,
) -> Selection:
    """Choose the fastest config, or the default where nothing is faster beyond the noise.

    Args:
        configs: The candidates. The default is added if it is not among them.
        default: The config to keep in doubt; by default the first candidate.
        measure: Returns one time of a config (µs by convention; only ratios matter). A config for
            which it raises, or returns something that is not a positive number, is dropped.
        budget: Total number of calls of `measure`.
        budget_s: Stop measuring after this many seconds, too.
        min_gain: The fraction by which a config has to beat the default, beyond the noise.
        seed: Seeds the order within the rounds.

    Returns:
        The choice, with median, spread and number of samples of every config.

    Raises:
        ArgumentError: There is no config, or the budget is not positive.
        TuningError: Every config failed when measured.

    Example:
        >>> times = {8: 1.0, 16: 0.5}
        >>> select([{"block": b} for b in times], measure=lambda c: times[c["block"]]).config
        {'block': 16}
    """
    if not configs:
        raise ArgumentError("select: there is no config to choose from")
    if budget < 1:
        raise ArgumentError(f"select: budget={budget} measurements cannot decide anything")
    arms = [_Arm(config) for config in configs]
    wanted = configs[0] if default is None else default
    base = next((arm for arm in arms if arm.config == wanted), None)
    if base is None:
        base = _Arm(wanted)
        arms.insert(0, base)
    _measure_in_rounds(arms, base, measure, budget, budget_s, random.Random(seed))
    return _decide(arms, base, min_gain)


def _measure_in_rounds(
    arms: list[_Arm],
    base: _Arm,
    measure: Callable[[Mapping[str, Any]], float],
    budget: int,
    budget_s: float | None,
    rng: random.Random,
) -> None:
    racing = list(arms)
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    rounds = 0
    while racing and (budget >= len(racing) or not rounds) and time.monotonic() < deadline:
        rng.shuffle(racing)
        if not rounds:  # however small the budget is, the default is measured
            racing.sort(key=lambda arm: arm is not base)
        for arm in racing:
            if budget <= 0:
                break
            arm.measure(measure)
            budget -= 1
        rounds += 1
        racing = [arm for arm in racing if arm.alive]
        if rounds >= _MIN_ROUNDS:
            racing = _without_hopeless(racing, base)
        if len(racing) <= 1 and rounds >= _MIN_ROUNDS:
            return


def _without_hopeless(racing: list[_Arm], base: _Arm) -> list[_Arm]:
    """Drop what is clearly behind the leader; the default stays, for the others pair with it."""
    leader = max(racing, key=lambda arm: _pair(arm, base)[0], default=base)
    kept = []
    for arm in racing:
        lead, noise = leader.gain_over(arm)
        if arm is base or arm is leader or lead <= _HOPELESS * noise:
            kept.append(arm)
    return kept


def _pair(arm: _Arm, base: _Arm) -> tuple[float, float]:
    return arm.gain_over(base) if base.times else (0.0, math.inf)


def _decide(arms: list[_Arm], base: _Arm, min_gain: float) -> Selection:
    alive = [arm for arm in arms if arm.alive and arm.times]
    if not alive:
        lines = [f"{dict(arm.config)}: {arm.reason or 'was not measured'}" for arm in arms]
        raise TuningError("select: no config could be measured\n" + "\n".join(lines))
    if base not in alive:
        chosen = min(alive, key=lambda arm: statistics.median(arm.times))
        reason = f"the default failed ({base.reason or 'not measured'}); this is the fastest"
        gain, noise = 0.0, math.inf
    else:
        chosen = max(alive, key=lambda arm: arm.gain_over(base)[0])
        gain, noise = chosen.gain_over(base)
        enough = len(chosen.times) >= _MIN_ROUNDS
        # The best of many equal candidates looks better by luck: the bar rises with their number.
        confident = statistics.NormalDist().inv_cdf(1 - _DOUBT / max(1, len(alive) - 1))
        if chosen is base:
            reason = "no config is faster than the default"
        elif enough and gain > math.log1p(min_gain) + confident * noise:
            reason = f"{_percent(gain)} faster than the default (noise {_percent(noise)})"
        else:
            why = f"noise {_percent(noise)}" if enough else f"{len(chosen.times)} samples"
            reason = f"the best gain, {_percent(gain)}, is not beyond doubt ({why})"
            chosen, gain, noise = base, 0.0, 0.0
    figures = tuple(_figures(arm, base) for arm in arms)
    return Selection(chosen.config, chosen is not base, math.expm1(gain), noise, reason, figures)


def _figures(arm: _Arm, base: _Arm) -> Samples:
    if not arm.times:
        return Samples(arm.config, math.nan, math.nan, 0, math.nan, math.nan, arm.reason)
    middle = statistics.median(arm.times)
    spread = _MAD_TO_SIGMA * statistics.median(abs(t - middle) for t in arm.times)
    gain, noise = _pair(arm, base)
    return Samples(arm.config, middle, spread, len(arm.times), math.expm1(gain), noise, arm.reason)


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):.1f}%"
