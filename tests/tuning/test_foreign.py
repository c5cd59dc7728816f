"""Files of tokamax and Helion: read, written, and adopted for a kernel of ours."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning import foreign
from tpu_kernels.tuning.adoption import adopt
from tpu_kernels.tuning.cache import TuningCache

TIMES = {"compile_time_ms": 1.0, "evaluation_times_ms": [2.0, 2.5, 9.0], "metadata": {}}


@tk.tpu_kernel("foreign_test::product")
def product(
    lhs: jax.Array, rhs: jax.Array, gain: float = 1.0, *, block_m: int = 8, block_k: int = 8
) -> jax.Array:
    return gain * (lhs @ rhs)


def tokamax_file(path: Path) -> Path:
    call = {"lhs": "bf16[16,32]", "rhs": "bf16[32,8]", "gain": 2.0, "activation": None}
    odd = {"lhs": "bf16[16]", "rhs": "f99[8]"}
    slow, fast = {"tile_m": 16, "block_k": 8}, {"tile_m": 8, "block_k": 16}
    worse = {**TIMES, "evaluation_times_ms": [3.0]}
    document = {
        json.dumps(call): {json.dumps(slow): worse, json.dumps(fast): TIMES},
        json.dumps({**call, "gain": 3.0}): {},
        json.dumps(odd): {json.dumps(fast): TIMES},
    }
    path.write_text(json.dumps(document))
    return path


def test_a_tokamax_file_gives_the_fastest_config_of_each_measured_call(tmp_path: Path) -> None:
    first, odd = foreign.read_tokamax(tokamax_file(tmp_path / "ragged_dot.json"))
    assert first.arrays == {"lhs": ((16, 32), "bfloat16"), "rhs": ((32, 8), "bfloat16")}
    assert first.config == {"tile_m": 8, "block_k": 16}
    assert first.time_us == 2500.0
    assert first.values == {"gain": 2.0, "activation": None}
    assert odd.arrays["rhs"] == ((8,), "f99")


def test_adopted_results_are_what_a_call_finds(tmp_path: Path) -> None:
    results = foreign.read_tokamax(tokamax_file(tmp_path / "ragged_dot.json"))
    cache = TuningCache(tmp_path / "tuned")
    done = adopt(product, results, "v6e", cache, rename={"tile_m": "block_m"}, origin="there")
    assert done.written == 1
    assert done.refused == ("'f99' is no dtype of torch",)
    x, y = torch.empty(16, 32, dtype=torch.bfloat16), torch.empty(32, 8, dtype=torch.bfloat16)
    choice = product.config_for(x, y, 2.0, target="v6e")
    assert (choice.config, choice.provenance) == ({"block_m": 8, "block_k": 16}, "tuned")
    (record,) = cache
    assert record.config == {"block_m": 8, "block_k": 16}
    assert record.key["static"]["gain"] == 2.0
    assert record.provenance["origin"] == "there"


def test_records_are_written_as_tokamax_reads_them(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "tuned")
    key = {"kernel": "ns::k", "target": "v6e", "arrays": [[[8, 128], "bfloat16"]], "static": {}}
    cache.put(key, {"block": [8]}, time_us=1500.0)
    cache.put({"kernel": "ns::k", "bucket": 1}, {"block": [9]})
    path = tmp_path / "k.json"
    assert foreign.write_tokamax(path, cache, {"ns::k": ["x"]}) == 1
    (result,) = foreign.read_tokamax(path)
    assert result.arrays == {"x": ((8, 128), "bfloat16")}
    assert (result.config, result.time_us) == ({"block": [8]}, 1500.0)


def test_a_helion_cache_entry_and_a_saved_config_are_read(tmp_path: Path) -> None:
    helion = pytest.importorskip("helion")
    config = helion.Config(block_sizes=[32, 64], num_warps=4)
    config.save(tmp_path / "saved.json")
    entry = {"config": config.to_json(), "key": {"type": "LooseAutotuneCacheKey", "fields": {}}}
    (tmp_path / "a.best_config").write_text(json.dumps(entry))
    for name in ("saved.json", "a.best_config"):
        assert foreign.read_helion(tmp_path / name)["block_sizes"] == [32, 64]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', '{"x": {"y": {}}}'])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"file\.json"):
        foreign.read_tokamax(path)
