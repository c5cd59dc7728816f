"""`tpu-kernels cache`: what it shows, moves and deletes, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpu_kernels.cli import main
from tpu_kernels.config import settings
from tpu_kernels.registry import config_table
from tpu_kernels.tuning import lookup
from tpu_kernels.tuning.cache import TuningCache

USER_FILE = str(Path(__file__).with_name("kernels_of_a_user.py"))
CALL = ["cli_test::scale", "f32[64,128]", "--import", USER_FILE]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of each test's own, and none that was added before."""
    monkeypatch.setattr(lookup.source(), "_caches", [])
    monkeypatch.setenv("TPU_KERNELS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    settings.cache_clear()
    config_table.bump()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Run an action with ``--json``; returns exit code and document."""
    code = main.main(["cache", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def tuned(rows: int = 16, shape: tuple[int, ...] = (64, 128)) -> TuningCache:
    """A cache with one record of the user's kernel."""
    import torch

    from tpu_kernels.cli.kernels import find_kernel

    kernel = find_kernel("cli_test::scale", [USER_FILE])
    cache = TuningCache()
    request = kernel.bind(torch.empty(shape, device="meta")).request("v6e")
    lookup.store(request, cache, {"rows": rows}, 2.5, objective="compiler")
    return cache


def test_list_show_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(capsys, "list")
    assert (code, document["entries"]) == (0, [])
    tuned()
    _, document = run(capsys, "list", "--store", "tuned", "--kernel", "cli_test::scale")
    (entry,) = document["entries"]
    assert entry["what"] == "v6e float32[64,128]: rows=16, 2.5 µs"
    _, shown = run(capsys, "show", entry["identity"][:12])
    assert shown["content"]["config"] == {"rows": 16}
    assert main.main(["cache", "list"]) == 0
    text = capsys.readouterr().out
    assert "rows=16" in text
    assert "1 entries" in text


def test_explain_names_the_fields_of_a_miss(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(capsys, "explain", *CALL)
    assert code == main.EXIT_NO
    assert document["targets"]["v6e"]["provenance"] == "default"
    assert "never tuned" in document["targets"]["v6e"]["explanation"]
    tuned()
    code, document = run(capsys, "explain", *CALL, "--target", "v6e,v5e")
    assert code == main.EXIT_NO  # nothing for v5e
    assert document["targets"]["v6e"]["config"] == {"rows": 16}
    assert "target: asked 'v5e', stored 'v6e'" in document["targets"]["v5e"]["explanation"]
    assert run(capsys, "explain", *CALL)[0] == main.EXIT_OK


def test_the_kernel_itself_explains_its_miss(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from tpu_kernels.cli.kernels import find_kernel

    tuned(shape=(4096, 128))
    kernel = find_kernel("cli_test::scale", [USER_FILE])
    text = kernel.explain(torch.empty(64, 128))
    assert "rows=8 (default)" in text
    assert "arrays[0][0][0]: asked 64, stored 4096" in text
    assert "asked 64" in kernel.config_for(torch.empty(64, 128)).reason


def test_export_and_import_carry_records_to_another_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned()
    file = str(tmp_path / "records.json")
    assert run(capsys, "export", file, "--target", "v6e")[1]["written"] == 1
    assert run(capsys, "export", file + "5", "--target", "v5e")[1]["written"] == 0
    monkeypatch.setenv("TPU_KERNELS_CACHE_DIR", str(tmp_path / "other"))
    settings.cache_clear()
    assert run(capsys, "import", file)[1]["written"] == 1
    assert run(capsys, "import", file)[1]["kept"] == 1
    assert [record.config for record in TuningCache()] == [{"rows": 16}]
    assert main.main(["cache", "import", str(tmp_path / "absent.json")]) == main.EXIT_USAGE
    assert "cannot read" in capsys.readouterr().err


def test_results_of_other_tuners_become_records(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    theirs = tmp_path / "scale.json"
    timed = {json.dumps({"tile": 16}): {"evaluation_times_ms": [1.0]}}
    theirs.write_text(json.dumps({json.dumps({"x": "f32[64,128]"}): timed}))
    kernel = ["cli_test::scale", "--import", USER_FILE, "--target", "v6e"]
    words = [str(theirs), *kernel, "--format", "tokamax", "--rename", "tile=rows"]
    assert run(capsys, "import", *words)[1]["written"] == 1
    _, document = run(capsys, "explain", *CALL)
    assert document["targets"]["v6e"]["config"] == {"rows": 16}
    helion = tmp_path / "a.best_config"
    helion.write_text(json.dumps({"config": '{"rows": 8}', "key": {"fields": {}}}))
    words = [str(helion), *CALL, "--target", "v5e", "--format", "helion"]
    assert run(capsys, "import", *words)[1]["written"] == 1
    out = str(tmp_path / "out.json")
    words = ["--kernel", "cli_test::scale", "--target", "v5e", "--format", "helion"]
    assert run(capsys, "export", out, *words)[0] == main.EXIT_OK
    assert json.loads(Path(out).read_text()) == {"rows": 8}


def test_verify_finds_damage_and_prune_deletes_it(capsys: pytest.CaptureFixture[str]) -> None:
    cache = tuned()
    assert run(capsys, "verify")[0] == main.EXIT_OK
    (record,) = cache
    cache.file_of(record).write_text("{")
    code, document = run(capsys, "verify")
    assert code == main.EXIT_NO
    assert list(document["problems"]) == [str(cache.file_of(record))]
    assert run(capsys, "prune")[1] == {"deleted": {"tuned": 1, "programs": 0, "compiled": 0}}
    assert run(capsys, "verify")[0] == main.EXIT_OK


def test_an_action_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["cache"]) == main.EXIT_USAGE
    assert "ACTION" in capsys.readouterr().err
