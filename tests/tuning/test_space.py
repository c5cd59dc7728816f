"""Config spaces, constraints and buckets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.errors import ConfigError
from tpu_kernels.tuning import search, space

sizes = st.integers(1, 64)
choices_of = st.lists(sizes, min_size=1, max_size=4, unique=True)


@given(st.dictionaries(st.sampled_from("abc"), choices_of))
def test_a_dict_of_lists_is_all_combinations_once(choices: dict[str, list[int]]) -> None:
    configs = space.expand(choices)
    assert len(configs) == math.prod(map(len, choices.values()))
    assert all(config[name] in values for config in configs for name, values in choices.items())
    assert len({tuple(sorted(config.items())) for config in configs}) == len(configs)


def test_lists_keep_their_order_and_values_and_lose_repetitions() -> None:
    configs = [{"block": (8, 128)}, {"block": (16, 128)}, {"block": [8, 128]}]
    assert space.expand(configs) == [{"block": (8, 128)}, {"block": (16, 128)}]
    assert isinstance(space.expand(configs)[0]["block"], tuple)
    assert len(space.expand([{"a": 1}, {"a": True}, {"a": 1.0}])) == 3


@pytest.mark.slow  # importing Helion takes long
def test_helion_configs_are_taken_by_their_mapping() -> None:
    helion = pytest.importorskip("helion")
    configs = space.expand([helion.Config(block_sizes=[64, 128], num_warps=4)])
    assert configs[0]["block_sizes"] == [64, 128]
    assert space.expand([SimpleNamespace(config={"a": 1})]) == [{"a": 1}]


def test_a_function_of_the_arguments_gives_the_space() -> None:
    def configs(x: Any, causal: bool = False) -> Any:
        return {"block": [b for b in (8, 16, 32) if x % b == 0], "causal": [causal]}

    assert [c["block"] for c in space.expand(configs, {"x": 48, "y": 1})] == [8, 16]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "configs is a int"),
        ({"block": 128}, r"configs\['block'\] is 128"),
        ({"block": "128"}, "not a list of values"),
        ([{"block": 1}, 7], "7 is not a config"),
        ([], "no config"),
        ({"block": []}, "no config"),
        ({"a": range(1000), "b": range(1000)}, "1000000 configs"),
        (lambda z: [], "'z'"),
    ],
)
def test_what_is_no_space_is_refused_with_a_hint(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space.expand(given, {"x": 1}, kernel="ns::k")


def test_unknown_names_are_the_callers_mistake() -> None:
    with pytest.raises(ConfigError, match="'blok'") as caught:
        space.check_names([{"block": 1}, {"blok": 1}], ["block"], kernel="ns::k", where="k.py:1")
    assert "k.py:1" in str(caught.value)
    assert "block" in str(caught.value.hint)


def test_constraints_are_called_by_name_and_give_their_reason() -> None:
    arguments = {"x": 48, "y": 2}
    divides = lambda x, block: x % block == 0  # noqa: E731
    whole = lambda config: len(config) == 1  # noqa: E731
    assert space.violation(None, {"block": 5}, arguments) is None
    assert space.violation(lambda cfg: cfg["block"] == 5, {"block": 5}, arguments) is None
    assert space.violation([divides, whole], {"block": 16}, arguments) is None
    assert "does not hold" in str(space.violation([divides, whole], {"block": 5}, arguments))
    assert space.violation(lambda y: "too odd", {"block": 5}, arguments) == "too odd"
    raised = space.violation(lambda x: 1 // 0, {"block": 5}, arguments)
    assert raised is not None
    assert "ZeroDivisionError" in raised
    with pytest.raises(ConfigError, match="'z'"):
        space.violation(lambda z: True, {"block": 5}, arguments)


def test_a_bucket_is_a_key_of_the_arguments() -> None:
    assert space.bucket_of(None, {"m": 3}) is None
    assert space.bucket_of(lambda m, **rest: [m // 2, rest["n"]], {"m": 9, "n": 4}) == (4, 4)


@given(st.lists(sizes, min_size=2, max_size=2), st.lists(sizes, min_size=2, max_size=2))
def test_dominance_is_larger_in_every_size(a: list[int], b: list[int]) -> None:
    bigger, smaller = {"block": tuple(a), "acc": "f32"}, {"block": b, "acc": "f32"}
    assert search.dominates(bigger, smaller) == all(x >= y for x, y in zip(a, b, strict=True))


def test_dominance_never_crosses_other_values_or_limits() -> None:
    assert not search.dominates({"n": 8, "acc": "bf16"}, {"n": 4, "acc": "f32"})
    assert not search.dominates({"n": 8, "vmem_limit_bytes": 2}, {"n": 4, "vmem_limit_bytes": 1})
    assert not search.dominates({"n": 8}, {"n": 4, "m": 1})
    assert not search.dominates({"flag": True}, {"flag": False})
    failed = [{"n": 8}]
    assert search.dominated({"n": 16}, failed) == {"n": 8}
    assert search.dominated({"n": 4}, failed) is None
