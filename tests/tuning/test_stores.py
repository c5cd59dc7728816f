"""Tuned records, programs and compile results seen as one cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.compiler.report import CompileReport
from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning.stores import Stores

KEY = {"kernel": "ns::k", "target": "v6e", "arrays": [[[8, 128], "float32"]], "static": {}}


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    filled = Stores(tmp_path)
    filled.tuned.put(KEY, {"block": (8, 128)}, time_us=1.5, objective="compiler")
    filled.programs.store("0a" * 16, b"code", name="ns::k", versions={"jax": "1"})
    report = CompileReport(status="ok", target="v5e", kernel="ns::other")
    filled.compiled.store(report, "d" * 32, "p" * 32, "v5e:2x2", {})
    return filled


def test_all_stores_are_listed_by_kernel(stores: Stores) -> None:
    found = {(e.store, e.kernel, e.what) for e in stores.entries()}
    assert found == {
        ("tuned", "ns::k", "v6e float32[8,128]: block=[8, 128], 1.5 µs"),
        ("programs", "ns::k", "CPU program, jax 1"),
        ("compiled", "ns::other", "v5e: ok"),
    }
    assert [e.store for e in stores.entries(kernel="ns::k")] == ["tuned", "programs"]
    assert [e.store for e in stores.entries(["compiled"])] == ["compiled"]


def test_an_entry_is_found_by_its_first_digits_and_tells_everything(stores: Stores) -> None:
    for entry in stores.entries():
        assert stores.find(entry.identity[:10]) == entry
    details = {e.store: stores.detail(e) for e in stores.entries()}
    assert details["tuned"]["key"] == KEY
    assert details["tuned"]["provenance"] == {"objective": "compiler"}
    assert details["programs"]["versions"] == {"jax": "1"}
    assert details["compiled"]["target"] == "v5e"
    with pytest.raises(ArgumentError, match="no entry"):
        stores.find("zz")
    with pytest.raises(ArgumentError, match="3 entries begin with ''"):
        stores.find("")


def test_damage_is_found_in_every_store_and_pruned(stores: Stores) -> None:
    assert stores.verify() == {}
    paths = [entry.path for entry in stores.entries()]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-30])
    assert set(stores.verify()) == set(paths)
    assert stores.prune() == {"tuned": 1, "programs": 1, "compiled": 1}
    assert stores.entries() == []


def test_pruning_by_age_and_size_spares_tuned_records_from_the_size(stores: Stores) -> None:
    assert stores.prune(unused_days=1) == {"tuned": 0, "programs": 0, "compiled": 0}
    assert stores.prune(max_bytes=0) == {"tuned": 0, "programs": 1, "compiled": 1}
    assert stores.prune(["tuned"], unused_days=-1) == {"tuned": 1}
