"""Searching large spaces: the sampler, the journal of a search, resuming, XLA as a candidate."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning import TuningCache, autotune, compiled, lookup
from tpu_kernels.tuning.guided import Guide
from tpu_kernels.tuning.journal import Journal
from tpu_kernels.tuning.report import TuneReport, TuneRow

X = torch.ones(8, 128)
SPACE = {"a": list(range(40)), "b": list(range(40)), "kind": ["x", "y"]}


@tk.tpu_kernel("guided_test::scale", reference=lambda x, **_: x + 1)
def scale(x: jax.Array, *, a: int = 0, b: int = 0, kind: str = "x") -> jax.Array:
    return x + 1


@tk.tpu_kernel("guided_test::open", configs={"block": [8, 16]}, reference=lambda x, **_: 2 * x)
def open_kernel(x: jax.Array, *, block: int | None = None) -> jax.Array:
    return 2 * x


@pytest.fixture(autouse=True)
def fresh_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned configs of one test must not reach kernels of another."""
    monkeypatch.setattr(lookup, "_source", lookup.TunedConfigs())
    monkeypatch.setattr(lookup.config_table, "_sources", [])


def bowl(config: dict[str, Any]) -> float:
    """A cost with its minimum at a=30, b=10, kind="y"."""
    return 1.0 + (config["a"] - 30) ** 2 + (config["b"] - 10) ** 2 + 50 * (config["kind"] == "x")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Compiling replaced by the bowl; gets the configs in the order tried."""
    configs: list[dict[str, Any]] = []

    def try_candidates(candidates: Any, target: Any, goal: Any, found: Any, **_: Any) -> None:
        for candidate in candidates:
            configs.append(dict(candidate.config))
            found(candidate.index, TuneRow(candidate.config, "ok", cost=bowl(candidate.config)))

    monkeypatch.setattr(compiled, "try_candidates", try_candidates)
    return configs


def run(cache: Path, **options: Any) -> TuneReport:
    return autotune(
        scale, X, configs=SPACE, target="v6e", measure="roofline", cache=cache, **options
    )


def test_a_large_space_is_sampled_towards_its_minimum(
    tried: list[dict[str, Any]], tmp_path: Path
) -> None:
    report = run(tmp_path, trials=80, store=False)
    assert len(tried) == 80 == len(report.results)
    assert report.space == 3200
    assert "a sample of a space of 3200" in report.text
    assert report.best is not None
    # 80 random configs of 3200 would reach a cost of about 50; the first is the one in force.
    assert report.best.rank < 40
    assert tried[0] == {"a": 0, "b": 0, "kind": "x"}
    again: list[dict[str, Any]] = list(tried)
    tried.clear()
    run(tmp_path, trials=80, store=False)
    assert tried == again


def test_neighbours_results_are_tried_first(tried: list[dict[str, Any]], tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    lookup.source().add(cache)
    near = scale.bind(torch.ones(8, 256)).request("v6e")
    cache.put({**lookup.exact_key(near), "static": {}}, {"a": 29, "b": 11, "kind": "y"})
    report = run(tmp_path, trials=3)
    assert {"a": 29, "b": 11, "kind": "y"} in tried[:2]
    assert report.best is not None
    assert report.best.config == {"a": 29, "b": 11, "kind": "y"}


def test_the_sampler_proposes_each_config_once_and_ends() -> None:
    space = [{"block": 8 * n} for n in range(5)] + [{"block": "auto"}]
    guide = Guide(space, seeds=[3, 3])
    seen = []
    while batch := guide.ask(2):
        seen += batch
        for index in batch:
            guide.tell(index, TuneRow(space[index], "error", "no"))
    assert seen[0] == 3
    assert sorted(seen) == list(range(6))
    assert guide.best is None


def test_options_of_the_search_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="search='grid'"):
        run(tmp_path, search="grid")
    with pytest.raises(ArgumentError, match="trials=0"):
        run(tmp_path, trials=0)


def test_what_the_kernel_chooses_itself_is_a_candidate(tmp_path: Path) -> None:
    report = autotune(open_kernel, X, target="v6e", measure="roofline", cache=tmp_path)
    assert {row.config["block"] for row in report.results} == {8, 16, None}


def test_a_journal_survives_a_cut_line_and_keeps_only_what_is_final(tmp_path: Path) -> None:
    configs = [{"block": (8, n)} for n in range(4)]
    journal = Journal(tmp_path, {"kernel": "ns::f"})
    journal.add(TuneRow(configs[0], "ok", cost=1.5, figures={"vmem_bytes": 3}))
    journal.add(TuneRow(configs[1], "crashed", "killed"))
    journal.add(TuneRow(configs[2], "vmem", "too large"))
    journal.add(TuneRow(configs[3], "ok", same_as=0))
    with open(journal.file, "a") as file:
        file.write('{"config": {"block": [8, 3]}, "sta')
    found = Journal(tmp_path, {"kernel": "ns::f"}).recall(configs)
    assert {index: row.status for index, row in found.items()} == {0: "ok", 2: "vmem"}
    assert found[0].config == {"block": (8, 0)}
    assert found[0].figures == {"vmem_bytes": 3}
    assert Journal(tmp_path, {"kernel": "ns::g"}).recall(configs) == {}
    journal.close()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys, torch, jax
import tpu_kernels as tk
from tpu_kernels.tuning import autotune, compiled
from tpu_kernels.tuning.report import TuneRow

@tk.tpu_kernel("guided_test::killed")
def kernel(x: jax.Array, *, a: int = 0) -> jax.Array:
    return x

def try_candidates(candidates, target, goal, found, **_):
    for candidate in candidates:
        print(candidate.config["a"], flush=True)
        if candidate.config["a"] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        found(candidate.index, TuneRow(candidate.config, "ok", cost=10.0 - candidate.config["a"]))

compiled.try_candidates = try_candidates
report = autotune(kernel, torch.ones(8), configs={"a": range(6)}, target="v6e",
                  measure="roofline", cache=sys.argv[1])
print("best", report.best.config["a"], len(report.results), flush=True)
"""


def test_a_killed_search_loses_only_the_running_candidate(tmp_path: Path) -> None:
    program = tmp_path / "tune.py"
    program.write_text(textwrap.dedent(KILLED))

    def tune(kill_at: int) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path / "cache"), str(kill_at)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        return done.returncode, done.stdout.split()

    assert tune(3) == (-signal.SIGKILL, ["0", "1", "2", "3"])
    assert tune(-1) == (0, ["3", "4", "5", "best", "5", "6"])
    assert list((tmp_path / "cache" / "searches").iterdir()) == []


@pytest.mark.libtpu
def test_xla_without_the_kernel_is_a_candidate(tmp_path: Path) -> None:
    report = autotune(open_kernel, X, target="v6e", cache=tmp_path, xla=True)
    assert report.baseline is not None
    assert report.baseline.status == "ok", report.baseline.reason
    assert 0 < report.baseline.rank < 1e6
    assert "XLA without the kernel" in report.text
    assert json.loads(json.dumps(report.to_dict()))["baseline"]["config"] == {
        "implementation": "xla"
    }
