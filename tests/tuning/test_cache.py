"""The tuning cache with many writers, killed writers, damaged files, unwritable folders."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.errors import ArgumentError, CacheCorruption, CacheUnwritable
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.exchange import export_records, import_records

WRITER = """
import sys
from tpu_kernels.tuning.cache import TuningCache
cache = TuningCache(sys.argv[1])
for i in range(int(sys.argv[3])):
    cache.put(("k", sys.argv[2], i), {"block": [i, 128]}, time_us=float(i))
    print(i, flush=True)
"""


def key(i: int, **fields: object) -> dict[str, object]:
    return {"kernel": "ns::k", "target": "v6e", "tensors": [[[8 * i, 128], "float32"]], **fields}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def writer(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_record_comes_back_with_its_config_time_and_provenance(tmp_path: Path) -> None:
    TuningCache(tmp_path).put(key(1), {"block": (8, 128), "acc": "f32"}, 3.5, objective="wall")
    record = TuningCache(tmp_path).get(key(1))
    assert record is not None
    assert record.config == {"block": [8, 128], "acc": "f32"}
    assert (record.time_us, record.provenance["objective"]) == (3.5, "wall")
    assert TuningCache(tmp_path).get(key(2)) is None


def test_a_second_put_replaces_the_first_and_other_caches_see_it(tmp_path: Path) -> None:
    reader, cache = TuningCache(tmp_path), TuningCache(tmp_path)
    cache.put(key(1), {"b": 1})
    assert reader.get(key(1)).config == {"b": 1}
    cache.put(key(1), {"b": 2})
    assert reader.get(key(1)).config == {"b": 2}
    assert len(reader) == 1


def test_key_fields_can_be_read_in_the_file(tmp_path: Path) -> None:
    TuningCache(tmp_path).put(key(1), {"b": 1})
    (file,) = files(tmp_path)
    assert file.parent.name == "ns.k"
    assert json.loads(file.read_text())["record"]["key"]["tensors"] == [[[8, 128], "float32"]]


def test_eight_processes_writing_one_cache_lose_nothing(tmp_path: Path) -> None:
    writers = [writer(tmp_path, str(w), 25) for w in range(8)]
    for process in writers:
        process.communicate(timeout=120)
        assert process.returncode == 0
    cache = TuningCache(tmp_path)
    assert len(cache) == 200
    for w in range(8):
        for i in range(25):
            assert cache.get(("k", str(w), i)).config == {"block": [i, 128]}
    assert cache.verify() == {}


def test_eight_processes_writing_the_same_keys_leave_one_sound_record_each(tmp_path: Path) -> None:
    writers = [writer(tmp_path, "same", 15) for _ in range(8)]
    for process in writers:
        process.communicate(timeout=120)
    cache = TuningCache(tmp_path)
    assert len(cache) == len(files(tmp_path)) == 15
    assert cache.verify() == {}


def test_a_killed_writer_leaves_all_that_it_reported_as_saved(tmp_path: Path) -> None:
    rng = random.Random(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        process = writer(folder, "x", 10_000)
        assert process.stdout is not None
        saved = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 30))]
        time.sleep(rng.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        cache = TuningCache(folder)
        assert cache.verify() == {}
        for i in saved:
            assert cache.get(("k", "x", i)).config == {"block": [i, 128]}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_damaged_anywhere_is_a_miss_and_is_written_anew(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    TuningCache(folder).put(key(1), {"block": [8, 128]}, 1.0, note="x")
    (file,) = files(folder)
    content = file.read_bytes()
    at = data.draw(st.integers(0, len(content) - 2), label="offset")
    if data.draw(st.booleans(), label="truncate"):
        damaged = content[:at]
    else:
        flip = data.draw(st.integers(1, 255), label="flip")
        damaged = content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
    file.write_bytes(damaged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = TuningCache(folder).get(key(1))
    # White space between the values of a JSON file may change without changing the record.
    assert record is None or (record.config, record.time_us) == ({"block": [8, 128]}, 1.0)
    assert [w.category for w in caught] == ([] if record else [CacheCorruption])
    if record is None:
        assert str(file) in str(caught[0].message)
    TuningCache(folder).put(key(1), {"block": [1]})
    assert TuningCache(folder).get(key(1)).config == {"block": [1]}


def test_damage_is_reported_once_per_file(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    cache.put(key(1), {"b": 1})
    files(tmp_path)[0].write_text("")
    with pytest.warns(CacheCorruption):
        assert cache.get(key(1)) is None
    assert cache.get(key(1)) is None  # a second warning would be an error
    assert list(cache) == []


def test_a_record_under_the_name_of_another_key_is_not_believed(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    cache.put(key(1), {"b": 1})
    (one,) = files(tmp_path)
    cache.put(key(2), {"b": 2})
    (two,) = set(files(tmp_path)) - {one}
    two.write_bytes(one.read_bytes())
    assert cache.get(key(2)) is None
    assert [r.config for r in cache] == [{"b": 1}]
    assert cache.verify() == {two: "the file holds the record of another key"}


def test_a_record_of_another_format_version_is_a_miss(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    cache.put(key(1), {"b": 1})
    (file,) = files(tmp_path)
    file.write_text(file.read_text().replace("tuning/1", "tuning/99"))
    with pytest.warns(CacheCorruption, match=r"tuning/99"):
        assert cache.get(key(1)) is None


def test_a_folder_that_cannot_be_written_keeps_records_in_memory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = TuningCache(blocked)
    with pytest.warns(CacheUnwritable, match="memory only"):
        cache.put(key(1), {"b": 1})
    cache.put(key(2), {"b": 2})  # a second warning would be an error
    assert cache.get(key(1)).config == {"b": 1}
    assert [r.config for r in cache] == [{"b": 1}, {"b": 2}]
    assert cache.discard(key(1))
    assert cache.get(key(1)) is None


def test_a_full_disk_keeps_the_record_in_memory_and_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    cache = TuningCache(tmp_path)
    cache.put(key(1), {"b": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.warns(CacheUnwritable, match="No space left"):
            cache.put(key(1), {"b": 2})
    assert cache.get(key(1)).config == {"b": 2}
    assert [r.config for r in cache] == [{"b": 2}]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [files(tmp_path)[0].name]
    cache.put(key(1), {"b": 3})
    assert TuningCache(tmp_path).get(key(1)).config == {"b": 3}


@pytest.mark.parametrize("time_us", [float("nan"), float("inf"), -1.0])
def test_times_that_are_none_are_refused(tmp_path: Path, time_us: float) -> None:
    with pytest.raises(ArgumentError, match="time_us"):
        TuningCache(tmp_path).put(key(1), {}, time_us)


def test_a_miss_is_explained_by_the_nearest_record(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    cache.put(key(1, source_hash="a"), {})
    cache.put(key(2, source_hash="b"), {})
    cache.put({**key(2, source_hash="a"), "kernel": "ns::other"}, {})
    explanation = cache.explain(key(2, source_hash="a"))
    assert not explanation
    assert [(d.field, d.asked, d.stored) for d in explanation.differences] == [
        ("tensors[0][0][0]", 16, 8)
    ]
    assert explanation.searched == 2
    assert cache.explain(key(2, source_hash="b")).hit
    assert "never tuned" in str(cache.explain({"kernel": "ns::new"}))
    assert cache.explain(("x", 1)).nearest is None


def test_prune_removes_what_is_damaged_left_over_old_or_unwanted(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    for i in range(4):
        cache.put(key(i), {"b": i})
    damaged = files(tmp_path)[0]
    survivors = {r.config["b"] for r in cache if r.digest != damaged.stem}
    damaged.write_text("{")
    fresh, stale = damaged.with_name(".a.tmp"), damaged.with_name(".b.tmp")
    fresh.write_text("")
    stale.write_text("")
    os.utime(stale, (0, 0))
    assert cache.prune() == 2
    assert (fresh.exists(), stale.exists(), damaged.exists()) == (True, False, False)
    unwanted = min(survivors)
    assert cache.prune(keep=lambda record: record.config["b"] != unwanted) == 1
    survivors.discard(unwanted)
    assert {r.config["b"] for r in cache} == survivors
    old = files(tmp_path)[0]
    os.utime(old, (0, 0))
    assert cache.prune(older_than_days=30) == 1
    assert len(cache) == 1


def test_records_move_between_caches(tmp_path: Path) -> None:
    source, target = TuningCache(tmp_path / "a"), TuningCache(tmp_path / "b")
    for i in range(3):
        source.put(key(i), {"block": (i, float("inf"))}, float(i), note=i)
    target.put(key(0), {"block": "mine"})
    bundle = tmp_path / "bundle.json"
    assert export_records(source, bundle) == 3
    assert export_records(source, tmp_path / "one.json", select=lambda r: r.time_us == 1) == 1
    result = import_records(target, bundle)
    assert (result.written, result.kept, result.damaged) == (2, 1, 0)
    assert target.get(key(0)).config == {"block": "mine"}
    assert target.get(key(2)) == source.get(key(2))
    assert import_records(target, bundle, overwrite=True).written == 3
    assert target.get(key(0)) == source.get(key(0))


def test_an_import_leaves_out_damaged_records_and_refuses_other_files(tmp_path: Path) -> None:
    source, bundle = TuningCache(tmp_path / "a"), tmp_path / "bundle.json"
    source.put(key(0), {"b": 123})
    source.put(key(1), {"b": 456})
    export_records(source, bundle)
    bundle.write_text(bundle.read_text().replace("456", "457"))
    with pytest.warns(CacheCorruption, match="checksum"):
        result = import_records(TuningCache(tmp_path / "b"), bundle)
    assert (result.written, result.damaged) == (1, 1)
    for text in ("", "[]", '{"format": "x"}'):
        bundle.write_text(text)
        with pytest.raises(ArgumentError, match=r"bundle\.json"):
            import_records(source, bundle)
