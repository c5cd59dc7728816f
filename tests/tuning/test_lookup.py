"""How calls find tuned configs: exact, bucket, near, shipped; and why not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels import tpu_kernel
from tpu_kernels.errors import CacheCorruption
from tpu_kernels.registry.config_table import ConfigChoice, ConfigRequest
from tpu_kernels.tuning import lookup, tables
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.lookup import TunedConfigs, bucket_key, exact_key
from tpu_kernels.tuning.nearest import Neighbour, distance, nearest


def request(*shapes: tuple[int, ...], **changes: Any) -> ConfigRequest:
    arrays = tuple((shape, "float32") for shape in shapes)
    made = ConfigRequest("ns::k", "hash", arrays, {"causal": True}, "v6e")
    return dataclasses.replace(made, **changes)


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path)


def test_an_exact_record_is_found_with_tuples_and_provenance(cache: TuningCache) -> None:
    cache.put(exact_key(request((8, 128))), {"block": (8, 128)}, objective="compiler")
    choice = TunedConfigs(cache).find(request((8, 128)))
    assert choice is not None
    assert choice.config == {"block": (8, 128)}
    assert choice.provenance == "tuned"
    assert "exactly this call by compiler" in choice.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"source_hash": "edited"},
        {"target": "v5e"},
        {"static": {"causal": False}},
        {"static": {"causal": 1}},
        {"kernel": "ns::other"},
        {"arrays": (((8, 128), "bfloat16"),)},
    ],
)
def test_a_record_of_anything_else_is_not_applied(
    cache: TuningCache, changes: dict[str, Any]
) -> None:
    cache.put(exact_key(request((8, 128))), {"block": 8})
    assert TunedConfigs(cache).find(request((8, 128), **changes)) is None


def test_a_bucket_serves_other_shapes_of_the_same_dtypes(cache: TuningCache) -> None:
    tuned = request((8, 128), bucket=(1024,))
    key = bucket_key(tuned)
    cache.put(key, {"block": 8})
    choice = TunedConfigs(cache).find(request((900, 77), bucket=(1024,)))
    assert choice is not None
    assert (choice.config, choice.provenance) == ({"block": 8}, "bucket")
    assert TunedConfigs(cache).find(request((900, 77), bucket=(2048,))) is None
    other = request((900, 77), bucket=(1024,), arrays=(((900, 77), "int8"),))
    assert TunedConfigs(cache).find(other) is None


def test_the_order_is_exact_then_cpu_then_bucket_then_near(cache: TuningCache) -> None:
    asked = request((512, 128), bucket="b")
    source = TunedConfigs(cache)

    def found() -> Any:
        choice = source.find(asked)
        return None if choice is None else choice.config["block"]

    assert found() is None
    cache.put(exact_key(request((1024, 128))), {"block": 64})
    assert found() == 64
    cache.put(bucket_key(asked), {"block": 2})
    assert found() == 2
    cache.put(exact_key(asked, lookup.CPU), {"block": 3})
    assert found() == 3
    cache.put(exact_key(asked), {"block": 4})
    assert found() == 4


def test_a_near_shape_lends_its_config_only_where_blocks_divide_alike(cache: TuningCache) -> None:
    cache.put(exact_key(request((1024, 128))), {"block": 256})
    source = TunedConfigs(cache)
    choice = source.find(request((1536, 128)))
    assert choice is not None
    assert "nearby shapes [1024, 128]" in choice.reason
    assert source.find(request((1000, 128))) is None
    assert source.find(request((4096, 128))) is None
    assert source.find(request((1024, 128, 1))) is None


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 2, 8, 100, 128, 256]), max_size=3),
)
def test_what_divided_the_tuned_shape_divides_the_new_one(
    dims: list[int], tuned: list[int], blocks: list[int]
) -> None:
    arrays = [(tuple(dims), "f")]
    neighbour = Neighbour([(tuple(tuned), "f")], {"block": tuple(blocks), "flag": True})
    if nearest(arrays, [neighbour]) is None:
        return
    assert distance(arrays, neighbour.arrays) <= 1
    for dim, old in zip(dims, tuned, strict=True):
        assert old / 2 <= dim <= old * 2
        assert all(dim % b == 0 for b in blocks if old % b == 0)


def test_a_static_value_without_spelling_makes_calls_untunable(cache: TuningCache) -> None:
    asked = request((8, 128), static={"fn": object()})
    assert TunedConfigs(cache).find(asked) is None
    assert "cannot be part of a tuning key" in TunedConfigs(cache).explain(asked)


def test_a_miss_is_explained_field_by_field(cache: TuningCache) -> None:
    source = TunedConfigs(cache)
    assert "never tuned" in source.explain(request((8, 128)))
    cache.put(exact_key(request((8, 128))), {"block": 8})
    text = source.explain(request((64, 128), source_hash="new"))
    assert "arrays[0][0][0]: asked 64, stored 8" in text
    assert "source_hash: asked 'new', stored 'hash'" in text
    assert "there is a record" in source.explain(request((8, 128)))


def test_stored_choices_are_used_from_then_on(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TunedConfigs()
    monkeypatch.setattr(lookup, "_source", source)
    monkeypatch.setattr(lookup.config_table, "_sources", [])
    asked = request((8, 128), bucket=(1,), kernel="ns::stored")
    lookup.store(asked, cache, {"block": 5}, 2.5, objective="wall")
    choice = lookup.config_table.find(asked)
    assert choice is not None
    assert choice.config == {"block": 5}
    assert len(list(lookup.known(asked))) == 2
    near = dataclasses.replace(asked, arrays=(((9, 99), "float32"),))
    assert lookup.config_table.find(near).provenance == "bucket"
    source.add(TuningCache(cache.path))
    assert [c.path for c in source.caches].count(cache.path) == 1


def test_shipped_tables_serve_chip_static_values_and_near_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: TuningCache
) -> None:
    entry = Neighbour((((1024, 128), "float32"),), {"block": (256, 128)}, {"causal": True})
    file = tables.write_table(tmp_path / "t", "v6e", "ns::k", [(entry, {"by": "test"})])
    (read,) = tables.parse(file.read_text())
    assert (read.config, read.static) == ({"block": [256, 128]}, {"causal": True})
    monkeypatch.setattr(lookup, "table", lambda chip, kernel: (read,) if chip == "v6e" else ())
    source = TunedConfigs(cache)
    exact = source.find(request((1024, 128), source_hash="any"))
    assert exact is not None
    assert (exact.config, exact.provenance) == ({"block": (256, 128)}, "shipped")
    assert "exactly these shapes" in exact.reason
    assert "nearby" in source.find(request((2048, 128))).reason
    assert source.find(request((1024, 128), target="v5e")) is None
    assert source.find(request((1024, 128), static={"causal": False})) is None


def test_damaged_tables_are_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("{", "[]", '{"format": "x"}', '{"format": "tpu_kernels.table/1"}'):
        folder = tmp_path / "tables" / "v6e"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ns.bad.json").write_text(text)
        monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
        tables.table.cache_clear()
        with pytest.warns(CacheCorruption, match=r"v6e/ns\.bad\.json"):
            assert tables.table("v6e", "ns::bad") == ()
    tables.table.cache_clear()


def test_a_kernel_asks_once_for_a_call_until_something_new_is_known(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ConfigRequest] = []

    class Counting(TunedConfigs):
        def find(self, request: ConfigRequest) -> ConfigChoice | None:
            asked.append(request)
            return super().find(request)

    monkeypatch.setattr(lookup, "_source", source := Counting(cache))
    monkeypatch.setattr(lookup.config_table, "_sources", [source])

    @tpu_kernel("lookup_test::once")
    def once(x: jax.Array, *, block: int = 8) -> jax.Array:
        return x + block

    x = torch.zeros(8)
    for _ in range(5):
        assert once(x)[0] == 8
    before = len(asked)
    for _ in range(100):
        once(x)
    assert len(asked) == before  # the choice is in the program that the call finds
    lookup.store(once.bind(x).request("v6e"), cache, {"block": 16}, 1.0)
    assert once(x)[0] == 16
