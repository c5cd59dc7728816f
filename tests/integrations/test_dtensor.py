"""Kernels on DTensors over real processes: results and gradients as without sharding."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.packaging.sources import ROOT

TIME_LIMIT_S = 240

NAMES = [
    "matmul_agrees_in_every_placement",
    "a_matmul_moves_nothing_where_it_need_not",
    "sizes_that_do_not_divide",
    "keywords_statics_absent_arguments_and_batch_axes",
    "lists_and_several_results",
    "whole_axes_are_gathered",
    "results_that_combine_by_max",
    "partial_sums_pass_through_a_linear_kernel",
    "a_result_without_dimensions",
    "without_a_rule_everything_is_replicated",
    "written_arguments_stay_where_they_are",
    "rules_as_functions_and_replaced_rules",
    "mistakes_are_named",
    "a_model_trains_as_on_one_device",
    "second_derivatives_agree",
    "compiled_graphs_agree",
]


@functools.cache
def outcome(world_size: int) -> dict[int, dict[str, str | None]]:
    """Run the program on so many processes, once; returns what each rank reported."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.integrations.dtensor_program"]
        logs = [(folder / f"log{rank}").open("w") for rank in range(world_size)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), name], cwd=ROOT, stdout=log, stderr=log
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for rank in ranks:
                rank.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # the checks that have no outcome fail, with the end of the log
        finally:
            for rank, log in zip(ranks, logs, strict=True):
                rank.kill()
                rank.wait()
                log.close()
        reports: dict[int, dict[str, str | None]] = {}
        for i in range(world_size):
            file = folder / f"rank{i}.json"
            reports[i] = json.loads(file.read_text()) if file.exists() else {}
            log_end = (folder / f"log{i}").read_text()[-2000:]
            for check in NAMES:
                reports[i].setdefault(check, f"not reached; the log ends with\n{log_end}")
        return reports


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("check", NAMES)
def test_on_processes(check: str, world_size: int) -> None:
    for rank, report in outcome(world_size).items():
        assert report[check] is None, f"rank {rank}\n{report[check]}"


def test_every_check_is_listed() -> None:
    for report in outcome(2).values():
        assert set(report) == set(NAMES)


def test_our_module_may_be_what_imports_dtensor_first(tmp_path: Path) -> None:
    """Kernels are attached in the middle of the import of torch.distributed.tensor."""
    code = (
        "import tpu_kernels as tk; tk.tpu_kernel; import tpu_kernels.integrations.dtensor;"
        "from tpu_kernels.ops.matmul import matmul as m; print(m.autograd.distributed is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
