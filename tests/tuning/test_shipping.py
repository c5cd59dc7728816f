"""From tuned records to the tables that ship, and back to a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.cli.kernels import load_kernels
from tpu_kernels.config import CHIPS
from tpu_kernels.tuning import lookup, tables
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.shipping import write_tables


@tk.tpu_kernel("shipping_test::scale", configs={"block": [8, 16]})
def scale(x: jax.Array, gain: float = 2.0, *, block: int | None = None) -> jax.Array:
    return gain * x


def request(rows: int, target: str = "v6e", **changes: Any) -> dict[str, Any]:
    bound = scale.bind(torch.empty(rows, 128, device="meta"))
    return {**lookup.exact_key(bound.request(target)), **changes}


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "tuned")


def test_records_become_entries_and_old_entries_stay(cache: TuningCache, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    cache.put(request(64), {"block": 8}, objective="compiler", cost=3.0, working=2)
    cache.put(request(64, "v5e"), {"block": 16})
    done = write_tables(cache, folder, {scale.name: scale})
    assert {file.relative_to(folder).as_posix() for file in done.files} == {
        "v6e/shipping_test.scale.json",
        "v5e/shipping_test.scale.json",
    }
    for record in list(cache):
        cache.discard(record.key)
    cache.put(request(64), {"block": 16})
    cache.put(request(4096), {"block": 8})
    assert write_tables(cache, folder, {scale.name: scale}).written == 2
    text = (folder / "v6e" / "shipping_test.scale.json").read_text()
    found = {entry.arrays[0][0][0]: entry.config for entry in tables.parse(text)}
    assert found == {64: {"block": 16}, 4096: {"block": 8}}


def test_what_must_not_ship_is_left_out_with_the_reason(cache: TuningCache, tmp_path: Path) -> None:
    cache.put(request(8, source_hash="old"), {"block": 8})
    cache.put(request(8, target="cpu"), {"block": 8})
    cache.put(request(8), {"block": None})
    cache.put({**request(16), "kernel": "no::kernel"}, {"block": 8})
    bucket = request(32)
    del bucket["arrays"]
    cache.put({**bucket, "bucket": 1}, {"block": 8})
    done = write_tables(cache, tmp_path / "tables", {scale.name: scale})
    assert (done.written, done.files) == (0, ())
    told = " ".join(done.left_out)
    for reason in ("other code", "not for a chip", "own choice", "no such kernel", "for a bucket"):
        assert reason in told


def test_a_call_finds_the_shipped_entry_after_tuned_ones(
    cache: TuningCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(request(64), {"block": 16}, objective="compiler")
    (file,) = write_tables(cache, tmp_path / "tables", {scale.name: scale}).files
    entries = tables.parse(file.read_text())
    monkeypatch.setattr(lookup, "table", lambda chip, name: entries if chip == "v6e" else ())
    source = lookup.TunedConfigs()
    asked = scale.bind(torch.empty(64, 128, device="meta"))
    choice = source.find(asked.request("v6e"))
    assert choice is not None
    assert (choice.config, choice.provenance) == ({"block": 16}, "shipped")
    assert source.find(asked.request("v5e")) is None
    assert "the table shipped for v6e has 1 entries" in source.explain(asked.request("v6e"))
    cache.put(request(64), {"block": 8})
    choice = lookup.TunedConfigs(cache).find(asked.request("v6e"))
    assert choice is not None
    assert (choice.config, choice.provenance) == ({"block": 8}, "tuned")


def test_what_is_tuned_for_one_computation_is_not_served_to_another() -> None:
    matmul = load_kernels([])["tpu::matmul"]
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    plain, turned = matmul.bind(x, x), matmul.bind(x, x, transpose_x=True)
    assert dict(plain.request("v6e").static) == {}
    assert dict(turned.request("v6e").static) == {"transpose_x": True}
    assert matmul.config_for(x, x, target="v6e").provenance == "shipped"
    assert matmul.config_for(x, x, target="v6e", transpose_x=True).provenance == "default"
    assert matmul.config_for(x, x, target="v6e", precision="highest").provenance == "default"


def test_every_packaged_table_is_sound_and_its_configs_are_legal() -> None:
    kernels = load_kernels([])
    folder = Path(tables.__file__).parent / "tables"
    for file in folder.glob("*/*.json"):
        document = json.loads(file.read_text())
        kernel = kernels[document["kernel"]]
        assert document["chip"] == file.parent.name in CHIPS
        assert file.name == tables.table_name(kernel.name)
        for entry in tables.parse(file.read_text()):
            assert set(entry.config) <= set(kernel.spec.tunables)
        assert all(entry["provenance"] for entry in document["entries"])
