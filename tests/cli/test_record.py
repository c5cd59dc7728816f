"""`tpu-kernels record` and `tune --workload`: from a program to tuned calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tpu_kernels.cli import main
from tpu_kernels.tuning.workload import Workload

USER_FILE = str(Path(__file__).with_name("kernels_of_a_user.py"))

PROGRAM = """\
import runpy, sys, torch
scale = runpy.run_path(sys.argv[1])["scale"]
scale(torch.ones(16, 128), 3.0)
print("ran")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_program_is_recorded_and_its_exit_code_kept(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, program: str
) -> None:
    file = str(tmp_path / "w.json")
    words = ["record", "--json", "-o", file, "--", sys.executable, program, USER_FILE]
    with pytest.raises(SystemExit) as stop:
        main.main([*words, "7"])
    assert stop.value.code == 7
    captured = capfd.readouterr()
    document = json.loads(captured.out)
    assert "ran" in captured.err
    assert (document["exit_code"], document["new"]) == (7, 1)
    (call,) = Workload.load(file)
    assert str(call) == "cli_test::scale x=float32[16,128] factor=3.0"


def test_wrong_usage_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["record"]) == main.EXIT_USAGE
    assert main.main(["record", "--", str(tmp_path / "absent")]) == main.EXIT_USAGE
    assert main.main(["tune"]) == main.EXIT_USAGE
    assert main.main(["tune", "--shapes", "nobody"]) == main.EXIT_USAGE
    assert main.main(["tune", "tpu::matmul", "f32[8,8]", "--shapes", "square"]) == main.EXIT_USAGE
    told = capsys.readouterr().err
    for text in ("no program", "cannot start", "tune: what?", "sets: ", "beside a workload"):
        assert text in told


@pytest.mark.libtpu
def test_a_workload_is_tuned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tpu_kernels.tuning.workload import WorkloadCall

    file = tmp_path / "w.json"
    Workload(
        [
            WorkloadCall("cli_test::scale", {"x": "float32[64,128]"}, {"factor": 2.0}),
            WorkloadCall("cli_test::total", {"xs": ["float32[8]"]}),
        ]
    ).save(file)
    code = main.main(["tune", "--workload", str(file), "--import", USER_FILE, "--json"])
    assert code == main.EXIT_OK
    first, second = json.loads(capsys.readouterr().out)["results"]
    assert first["report"]["best"]["config"]["rows"] in (8, 16)
    assert second["reason"] == "the kernel declares no configs to try"
