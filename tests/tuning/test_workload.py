"""Workloads: recorded, written, read, tuned; and the packaged sets of shapes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.cli.kernels import load_kernels
from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning import batch, shape_sets
from tpu_kernels.tuning.batch import tune_workload
from tpu_kernels.tuning.recording import collect, record
from tpu_kernels.tuning.report import TuneReport, TuneRow
from tpu_kernels.tuning.workload import FORMAT, Workload, WorkloadCall


@tk.tpu_kernel("workload_test::mix", configs={"block": [8, 16]}, dynamic_args=("shift",))
def mix(
    xs: list[jax.Array],
    bias: jax.Array | None = None,
    axes: tuple[int, int] = (0, 1),
    shift: float = 0.0,
    *,
    block: int | None = None,
) -> jax.Array:
    total = xs[0] + shift
    for x in xs[1:]:
        total = total + x
    return total if bias is None else total + bias


def test_what_runs_is_recorded_once_with_all_kinds_of_arguments() -> None:
    x = torch.ones(4, 8)
    mix([x, x])  # before: its program exists already
    with record() as workload:
        mix([x, x], shift=2.0)
        mix([x, x], shift=3.0, block=16)
        mix([x], torch.ones(8, dtype=torch.bfloat16), (1, 0))
    mix([torch.ones(5, 8)])  # after
    first, second = workload
    assert first == WorkloadCall(
        "workload_test::mix",
        {"xs": ["float32[4,8]", "float32[4,8]"], "bias": None},
        {"axes": [0, 1]},
    )
    assert second.arguments == {"xs": ["float32[4,8]"], "bias": "bfloat16[8]"}
    assert second.static == {"axes": [1, 0]}
    assert str(second).endswith("xs=[float32[4,8]] bias=bfloat16[8] axes=[1,0]")


def test_backward_compiled_graphs_and_threads_are_seen() -> None:
    with record() as workload:
        x = torch.ones(3, 8, requires_grad=True)
        mix([x]).sum().backward()
        torch.compile(lambda x: mix([x]) * 2, backend="aot_eager")(torch.ones(6, 8))
        thread = threading.Thread(target=lambda: mix([torch.ones(7, 8)]))
        thread.start()
        thread.join()
    shapes = {call.arguments["xs"][0] for call in workload}
    assert shapes == {"float32[3,8]", "float32[6,8]", "float32[7,8]"}


def test_a_recorded_call_binds_to_the_request_of_the_call(tmp_path: Path) -> None:
    x, bias = torch.ones(2, 9), torch.ones(9)
    with record(tmp_path / "w.json") as workload:
        mix([x, x], bias, (1, 1))
    (call,) = Workload.load(tmp_path / "w.json")
    assert call == next(iter(workload))
    arguments = call.bind_arguments(mix)
    assert arguments["xs"][0].device.type == "meta"
    expected = mix.bind([x, x], bias, (1, 1)).request("v6e")
    assert mix.bind(**arguments).request("v6e") == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot read"),
        ("{}", "its format is None"),
        (json.dumps({"format": "tpu_kernels.workload/9", "calls": []}), "workload/9"),
        (json.dumps({"format": FORMAT, "calls": [{"kernel": "a::b"}]}), "is not a call"),
        (
            json.dumps({"format": FORMAT, "calls": [{"kernel": "a::b", "arguments": {"x": "f"}}]}),
            "not a tensor",
        ),
    ],
)
def test_a_file_that_is_no_workload_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=told):
        Workload.load(path)
    with pytest.raises(ArgumentError, match="absent"):
        Workload.load(tmp_path / "absent.json")


def test_files_of_several_processes_are_merged_and_damage_costs_only_itself(
    tmp_path: Path,
) -> None:
    one, two = (WorkloadCall("a::b", {"x": f"float32[{n}]"}) for n in (1, 2))
    Workload([one]).save(tmp_path / "1-a.workload.json")
    Workload([one, two]).save(tmp_path / "2-b.workload.json")
    (tmp_path / "3-c.workload.json").write_text("{")
    with pytest.warns(UserWarning, match="3-c"):
        assert list(collect(tmp_path)) == [one, two]


def test_all_packaged_calls_bind_to_the_shipped_kernels() -> None:
    kernels = load_kernels([])
    assert {"llama3-8b", "gemma3-27b", "square"} <= set(shape_sets.names())
    for name in shape_sets.names():
        for call in shape_sets.shape_set(name):
            kernel = kernels[call.kernel]
            kernel.bind(**call.bind_arguments(kernel)).request("v6e")
    assert len(shape_sets.shape_set("llama3-8b/prefill/qkv")) == 1
    with pytest.raises(ArgumentError, match="llama3-8b"):
        shape_sets.shape_set("llama3")


def test_a_workload_is_tuned_call_by_call_within_one_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []

    def autotune(kernel: Any, args: Any, **options: Any) -> TuneReport:
        seen.append((kernel.name, options["xs"][0].shape, options["target"], options["budget_s"]))
        row = TuneRow({"block": 8}, "ok", cost=1.0)
        return TuneReport(kernel.name, options["target"], "compiler", (row,), row)

    monkeypatch.setattr(batch, "autotune", autotune)
    calls = [WorkloadCall(mix.name, {"xs": [f"float32[{n},8]"]}) for n in (1, 2)]
    stranger = WorkloadCall("no::kernel", {"x": "float32[1]"})
    results = list(
        tune_workload(Workload([*calls, stranger]), {mix.name: mix}, ["v5e", "v6e"], budget_s=60.0)
    )
    assert [(name, tuple(shape), target) for name, shape, target, _ in seen] == [
        (mix.name, (1, 8), "v5e"),
        (mix.name, (2, 8), "v5e"),
        (mix.name, (1, 8), "v6e"),
        (mix.name, (2, 8), "v6e"),
    ]
    assert seen[0][3] == pytest.approx(10.0, rel=0.1)
    assert [r.reason for r in results if r.report is None] == [
        "no kernel is called 'no::kernel'"
    ] * 2
    assert all(result.ok for result in results)
