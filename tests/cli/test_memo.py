"""A repeated `check` answers at once, and asks again when anything that it read has changed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpu_kernels.cli import check, main
from tpu_kernels.cli import memo as memo_module
from tpu_kernels.cli.memo import Memo, Recorder
from tpu_kernels.cli.output import Output
from tpu_kernels.compiler import worker_pool
from tpu_kernels.config import settings

KERNELS = """
from pathlib import Path
import jax
import tpu_kernels as tk
from memo_helper import FACTOR

TABLE = Path(__file__).with_name("table.txt").read_text()

@tk.tpu_kernel("memo_test::scale", reference=lambda x: x * FACTOR, replace=True)
def scale(x: jax.Array) -> jax.Array:
    return x * FACTOR
"""


@pytest.fixture(autouse=True)
def _warm_workers() -> Iterator[None]:
    with worker_pool():
        yield


def _use_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    changed = dataclasses.replace(settings(), cache_dir=folder)
    monkeypatch.setattr(memo_module, "settings", lambda: changed)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that passes, about a kernel that uses a helper module and a data file."""
    _use_cache(monkeypatch, tmp_path / "cache")
    for module in ("memo_helper", "memo_kernels"):  # of another test's folder
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "memo_helper.py").write_text("FACTOR = 2.0\n", encoding="utf-8")
    (tmp_path / "table.txt").write_text("1 2 3", encoding="utf-8")
    file = tmp_path / "memo_kernels.py"
    file.write_text(KERNELS, encoding="utf-8")
    passes = ["--passes", "numerics"]
    return ["check", "memo_test::scale", "f32[8,128]", "--import", str(file), *passes]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was really checked."""
    seen: list[Any] = []
    original = check._checked

    def counted(options: Any, output: Output) -> bool:
        seen.append(options)
        return original(options, output)

    monkeypatch.setattr(check, "_checked", counted)
    return seen


def test_the_same_question_is_answered_once(
    words: list[str], asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == main.EXIT_OK
    first = capsys.readouterr().out
    assert main.main(words) == main.EXIT_OK
    repeated = capsys.readouterr()
    assert len(asked) == 1
    assert repeated.out == first
    assert "nothing has changed since" in repeated.err
    assert main.main([*words, "--json"]) == main.EXIT_OK
    document = json.loads(capsys.readouterr().out)
    assert document["reports"][0]["ok"]
    assert "answered" in document


@pytest.mark.parametrize("file", ["memo_kernels.py", "memo_helper.py", "table.txt"])
def test_a_file_that_was_read_and_changed_makes_it_ask_again(
    words: list[str], asked: list[Any], tmp_path: Path, file: str
) -> None:
    assert main.main(words) == main.EXIT_OK
    with (tmp_path / file).open("a", encoding="utf-8") as handle:
        handle.write("\n")
    assert main.main(words) == main.EXIT_OK
    assert len(asked) == 2


def test_other_words_settings_and_tables_are_other_questions(
    words: list[str], asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main.main(words) == main.EXIT_OK
    assert main.main([*words, "--no-cache"]) == main.EXIT_OK
    assert main.main([*words[:2], "f32[8,256]", *words[3:]]) == main.EXIT_OK
    monkeypatch.setenv("TPU_KERNELS_SIM_CHIP", "v5e")
    assert main.main(words) == main.EXIT_OK
    tuned = tmp_path / "cache" / "tuning" / "new.json"
    tuned.parent.mkdir(parents=True, exist_ok=True)
    tuned.write_text("{}", encoding="utf-8")
    assert main.main(words) == main.EXIT_OK
    assert len(asked) == 5


def test_failures_are_not_kept(
    words: list[str], asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "memo_kernels.py"
    file.write_text(KERNELS.replace("return x * FACTOR", "return x * 3"), encoding="utf-8")
    for _ in range(2):
        assert main.main([*words, "--shrink-s", "0"]) == main.EXIT_NO
    assert len(asked) == 2
    assert "numerics" in capsys.readouterr().out


def test_a_damaged_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use_cache(monkeypatch, tmp_path)
    memo, output = Memo("check", {"kernel": "k"}), Output(json_wanted=False)
    with memo.watch():
        pass
    memo.keep(Recorder(output))
    (stored,) = (tmp_path / "answers").rglob("*.json")
    assert memo.repeat(output)
    stored.write_text('{"said": ', encoding="utf-8")
    assert not memo.repeat(output)
    stored.write_text("[]", encoding="utf-8")
    assert not memo.repeat(output)
