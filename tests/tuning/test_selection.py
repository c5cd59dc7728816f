"""Selection among noisy, drifting measurements."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.errors import ArgumentError, TuningError
from tpu_kernels.tuning.selection import select


def noisy(seed: int, true: Mapping[str, float], sigma: float = 0.03) -> Callable[[Any], float]:
    """A device whose clock drifts by 10% over 1000 measurements and has spikes both ways."""
    rng, count = random.Random(seed), 0

    def measure(config: Mapping[str, Any]) -> float:
        nonlocal count
        count += 1
        spike = rng.uniform(0.85, 1.5) if rng.random() < 0.02 else 1.0
        return true[config["c"]] * (1 + count / 10_000) * rng.gauss(1, sigma) * spike

    return measure


def chosen(seed: int, true: Mapping[str, float], budget: int = 300) -> str:
    configs = [{"c": name} for name in true]
    return str(select(configs, measure=noisy(seed, true), budget=budget).config["c"])


def test_a_gain_of_three_percent_is_found_in_noise_of_three_percent() -> None:
    true = {"default": 1.0, "better": 0.97, "lucky": 1.02}
    assert sum(chosen(seed, true) == "better" for seed in range(100)) >= 95


@pytest.mark.parametrize("others", [1, 2, 6])
def test_the_default_stays_when_nothing_is_faster(others: int) -> None:
    true = {"default": 1.0} | {str(i): 1.0 for i in range(others)}
    budget = 100 * len(true)
    assert sum(chosen(seed, true, budget) == "default" for seed in range(40)) >= 38


def test_hopeless_candidates_do_not_eat_the_budget() -> None:
    counts: dict[str, int] = {}
    true = {"default": 1.0, "close": 0.99} | {str(i): 3.0 for i in range(20)}
    measure = noisy(1, true)

    def counting(config: Mapping[str, Any]) -> float:
        counts[config["c"]] = counts.get(config["c"], 0) + 1
        return measure(config)

    select([{"c": name} for name in true], measure=counting, budget=600)
    assert counts["close"] > 100
    assert max(counts[str(i)] for i in range(20)) < 20
    assert sum(counts.values()) <= 600


@settings(max_examples=50)
@given(
    times=st.dictionaries(st.integers(0, 9), st.floats(1e-3, 1e6), min_size=1),
    budget=st.integers(1, 200),
)
def test_without_noise_the_choice_is_never_slower_than_the_default(
    times: dict[int, float], budget: int
) -> None:
    configs = [{"c": c} for c in times]
    result = select(configs, measure=lambda config: times[config["c"]], budget=budget)
    default = next(iter(times))
    assert times[result.config["c"]] <= times[default]
    assert result.changed == (result.config["c"] != default)
    if budget >= 8 * len(times):
        assert times[result.config["c"]] <= min(times.values()) * (1 + 1e-9)
    assert sum(s.samples for s in result.samples) <= budget


def test_figures_of_every_config_are_given() -> None:
    result = select(
        [{"c": "a"}, {"c": "b"}], measure=noisy(0, {"a": 10.0, "b": 8.0}, 0.01), budget=100
    )
    a, b = result.samples
    assert (result.config, result.changed) == ({"c": "b"}, True)
    assert result.gain == b.gain == pytest.approx(0.25, abs=0.02)
    assert (a.samples, a.gain, a.noise) == (50, 0.0, 0.0)
    assert a.median_us == pytest.approx(10, rel=0.05)
    assert 0 < b.noise < 0.01
    assert 0 < a.spread_us < 0.5
    assert "faster than the default" in result.reason


def test_a_default_that_is_not_a_candidate_is_measured_too() -> None:
    true = {"d": 1.0, "a": 2.0}
    result = select([{"c": "a"}], default={"c": "d"}, measure=lambda c: true[c["c"]], budget=40)
    assert (result.config, result.changed) == ({"c": "d"}, False)


def test_a_candidate_that_fails_is_dropped_with_its_reason() -> None:
    def measure(config: Mapping[str, Any]) -> float:
        if config["c"] == "raises":
            raise RuntimeError("no such block")
        return {"nan": float("nan"), "zero": 0.0, "slow": 2.0, "fast": 1.0}[config["c"]]

    configs = [{"c": c} for c in ("raises", "nan", "zero", "slow", "fast")]
    result = select(configs, measure=measure, budget=100)
    assert result.config == {"c": "fast"}
    assert "default failed" in result.reason
    assert "no such block" in result.samples[0].reason
    assert "nan" in result.samples[1].reason
    with pytest.raises(TuningError, match="no such block"):
        select(configs[:3], measure=measure, budget=100)


def test_min_gain_keeps_the_default_for_small_gains() -> None:
    true = {"d": 1.0, "a": 0.95}
    configs = [{"c": "d"}, {"c": "a"}]
    measure = lambda config: true[config["c"]]  # noqa: E731
    assert select(configs, measure=measure, budget=60).changed
    assert not select(configs, measure=measure, budget=60, min_gain=0.1).changed


def test_a_time_limit_ends_the_measuring() -> None:
    result = select([{"c": 1}], measure=lambda c: 1.0, budget=10**9, budget_s=0.05)
    assert result.config == {"c": 1}


@pytest.mark.parametrize(("configs", "budget"), [([], 10), ([{"c": 1}], 0)])
def test_nothing_to_choose_from_is_the_callers_error(configs: list, budget: int) -> None:
    with pytest.raises(ArgumentError):
        select(configs, measure=lambda c: 1.0, budget=budget)
