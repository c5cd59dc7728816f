"""The subcommands of `tpu-kernels`: what they print and how they exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpu_kernels import versions
from tpu_kernels.backends.torch_tpu import cpu_plugin
from tpu_kernels.cli import env, main
from tpu_kernels.cli import list as list_command
from tpu_kernels.config import SIM_CHIP, settings
from tpu_kernels.versions import in_range

USER_FILE = str(Path(__file__).with_name("kernels_of_a_user.py"))
SCALE = ["cli_test::scale", "--import", USER_FILE]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command in this process; returns exit code, stdout and stderr."""
    code = main.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Run a command with ``--json``; stdout must be one document."""
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)


# ---------------------------------------------------------------- list and show


def test_list_shows_shipped_kernels_and_those_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "list", "--import", USER_FILE)
    rows = {row["name"]: row for row in document["kernels"]}
    assert code == main.EXIT_OK
    assert {"tpu::matmul", "cli_test::scale", "cli_test::total"} <= set(rows)
    assert rows["cli_test::scale"]["tunables"] == ["rows"]
    assert "Tensor x" in rows["cli_test::scale"]["schema"]
    assert "kernels_of_a_user.py:" in rows["cli_test::scale"]["source"]


def test_list_prints_a_table_that_keeps_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "list", "--import", USER_FILE)
    assert (code, err) == (main.EXIT_OK, "")
    (line,) = (line for line in out.splitlines() if "cli_test::total" in line)
    assert "Tensor[] xs" in line


def test_importing_a_file_twice_is_no_clash(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "list", "--import", USER_FILE, "--import", USER_FILE)
    assert (code, err) == (main.EXIT_OK, "")


def test_show_describes_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "show", *SCALE)
    parameters = {p["name"]: (p["kind"], p["default"]) for p in document["parameters"]}
    assert code == main.EXIT_OK
    assert parameters == {
        "x": ("tensor", None),
        "factor": ("static", "2.0"),
        "rows": ("tunable", "8"),
    }
    assert document["doc"] == "Return factor * x."
    assert "choice" not in document


def test_show_with_arguments_explains_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", *SCALE, "f32[32,128]")
    assert code == main.EXIT_OK
    assert "Config of this call" in out
    assert "rows=8" in out


def test_an_unknown_kernel_is_a_usage_error_with_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "show", "tpu::matmull")
    assert (code, out) == (main.EXIT_USAGE, "")
    assert "no kernel is called 'tpu::matmull'" in err
    assert "did you mean tpu::matmul" in err


# ---------------------------------------------------------------- --import


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1\nraise RuntimeError('no luck')\n", "RuntimeError: no luck"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_a_file_that_fails_is_named_with_its_error(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_kernels.py").write_text(content)
    code, _, err = run(capsys, "list", "--import", str(tmp_path / "broken_kernels.py"))
    assert code == main.EXIT_USAGE
    assert message in err
    assert "broken_kernels.py" in err


def test_a_missing_file_and_a_missing_module_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("no/such_file.py", "no_such_module_of_kernels"):
        code, document = run_json(capsys, "list", "--import", name)
        assert code == main.EXIT_USAGE
        assert document["error"]["type"] == "ImportFailure"
        assert name in document["error"]["message"]


# ---------------------------------------------------------------- compile and tune


@pytest.mark.libtpu
def test_compile_reports_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", *SCALE, "f32[32,128]", "3.0", "--target", "v5e,v6e", "--config", "rows=16"]
    code, document = run_json(capsys, *words)
    assert code == main.EXIT_OK
    assert document["ok"] is True
    assert set(document["reports"]) == {"v5e", "v6e"}
    assert all(report["code_bytes"] > 0 for report in document["reports"].values())


@pytest.mark.libtpu
def test_a_kernel_that_does_not_compile_exits_with_no(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", "cli_test::too_large", "--import", USER_FILE, "f32[20480,128]"]
    code, out, _ = run(capsys, *words, "--target", "v5e")
    assert code == main.EXIT_NO
    assert "vmem" in out
    assert "kernels_of_a_user.py" in out


@pytest.mark.libtpu
def test_tune_stores_what_the_next_call_uses(capsys: pytest.CaptureFixture[str]) -> None:
    call = [*SCALE, "f32[64,256]"]
    code, document = run_json(capsys, "tune", *call, "--target", "v6e", "--configs", "rows=8,16,7")
    report = document["reports"]["v6e"]
    assert code == main.EXIT_OK
    assert len(report["results"]) == 3
    best = report["best"]["config"]
    assert best["rows"] in (8, 16)
    _, shown = run_json(capsys, "show", *call)
    assert shown["choice"]["config"] == best
    assert shown["choice"]["provenance"] == "tuned"


@pytest.mark.parametrize(
    "words",
    [
        ["compile", *SCALE, "f32[32,128]", "--target", "v99"],
        ["compile", *SCALE, "f32[32,128]", "--config", "no_such=1"],
        ["compile", *SCALE, "q8[32]"],
        ["compile", *SCALE],
        ["tune", *SCALE, "f32[32,128]", "--configs", "8"],
    ],
)
def test_a_question_that_makes_no_sense_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (main.EXIT_USAGE, "")
    assert err.startswith(("tpu-kernels: ", "tuning"))


# ---------------------------------------------------------------- env


def test_env_reports_versions_and_abilities(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run_json(capsys, "env")
    versions = {p["name"]: p["version"] for p in document["packages"]}
    assert code == main.EXIT_OK
    assert versions["torch"].startswith("2.13")
    assert document["abilities"][0]["works"] is True
    assert all(a["works"] or a["reason"] for a in document["abilities"])


def test_env_imports_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from tpu_kernels.cli.main import main; main(['env', '--json']);"
        "sys.exit(str({'torch', 'jax', 'libtpu', 'helion'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr.strip() == "set()"


def test_env_says_how_to_add_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = env._version
    monkeypatch.setattr(env, "_version", lambda name: None if name == "libtpu" else found(name))
    monkeypatch.setattr(env.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(env.sys, "platform", "linux")
    code, out, _ = run(capsys, "env")
    assert code == main.EXIT_OK  # libtpu is optional
    assert "pip install 'tpu_kernels[aot]'" in out


@pytest.mark.parametrize("version", [None, "2.15.0"])
def test_env_says_no_where_a_required_package_does_not_fit(
    version: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = env._version
    monkeypatch.setattr(env, "_version", lambda name: version if name == "torch" else found(name))
    code, out, _ = run(capsys, "env")
    assert code == main.EXIT_NO
    assert "pip install 'torch>=2.13,<2.14'" in out


def test_env_shows_versions_that_do_not_work_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have = {"torch": "2.16.0", "torch_tpu": "0.2.0"}
    monkeypatch.setattr(versions, "installed", lambda names: have)
    code, out, _ = run(capsys, "env", "--json")
    assert code == main.EXIT_NO
    broken = next(row for row in json.loads(out)["versions"] if row["breaks"])
    assert broken["text"].startswith("torch 2.16.0 with torch_tpu 0.2.0 does not work")
    assert broken["fix"] == "pip install 'torch>=2.11,<=2.15'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["program.py"], "--torch-tpu is required"),
        (["--torch-tpu"], "no program"),
        (["--torch-tpu", "no_such_file.py"], "'no_such_file.py' is not a file"),
    ],
)
def test_run_says_what_it_lacks(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "run", *words)
    assert code == main.EXIT_USAGE
    assert message in err


def test_run_becomes_the_program_with_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    become: list[Any] = []
    monkeypatch.setattr(cpu_plugin, "why_not", lambda: None)
    monkeypatch.setattr(os, "execve", lambda *words: become.append(words))
    run(capsys, "run", "--torch-tpu", "-q", str(program), "--json", "-q", "x")
    run(capsys, "run", "--torch-tpu", "-m", "package.module", "--flag")
    (file, command, environment), (_, by_name, _) = become
    assert file == command[0] == sys.executable
    assert command[-5:] == ["-q", str(program), "--json", "-q", "x"]
    assert by_name[-3:] == ["-m", "package.module", "--flag"]
    assert environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_run_says_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    monkeypatch.setattr(cpu_plugin, "why_not", lambda: "torch_tpu is not installed")
    code, _, err = run(capsys, "run", "--torch-tpu", str(program))
    assert code == main.EXIT_USAGE
    assert "pip install 'tpu_kernels[torch-tpu-cpu]'" in err


def test_a_bad_setting_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SIM_CHIP, "v99")
    try:
        settings.cache_clear()
        code, _, err = run(capsys, "env")
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert code == main.EXIT_USAGE
    assert "TPU_KERNELS_SIM_CHIP='v99'" in err


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.0", ">=2.13,<2.14", False),
        ("0.10.1", ">=0.10.2,<0.11", False),
        ("2.4.6", ">=2.0", True),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version: str, wanted: str, fits: bool) -> None:
    assert in_range(version, wanted) is fits


# ---------------------------------------------------------------- the frame


@pytest.mark.parametrize(
    "words", [[], ["no-such-command"], ["list", "--no-such-option"], ["env", "extra"]]
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (main.EXIT_USAGE, "")
    assert err.startswith("usage: tpu-kernels")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (main.EXIT_OK, "")
    assert "--json" in out


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(KeyboardInterrupt(), main.EXIT_INTERRUPTED), (RuntimeError("a bug"), main.EXIT_FAILURE)],
)
def test_interrupts_and_bugs_have_codes_of_their_own(
    error: BaseException,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*unused: object) -> bool:
        raise error

    monkeypatch.setattr(env, "run", fail)
    code, _, err = run(capsys, "env")
    assert code == exit_code
    assert ("a bug" in err) == (exit_code == main.EXIT_FAILURE)


def test_a_reader_that_leaves_is_no_error() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tpu_kernels", "env"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.close()
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (main.EXIT_OK, "")


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        (
            "f(Tensor x, *, int a=1, bool t=False) -> Tensor",
            "(Tensor x, *, bool t=False) -> Tensor",
        ),
        ("f(Tensor x, *, int[2] a=[8, 16], int? b=None) -> ()", "(Tensor x) -> ()"),
        ("f(Tensor ab, int a) -> Tensor", "(Tensor ab) -> Tensor"),
    ],
)
def test_a_listed_signature_leaves_the_tunables_out(schema: str, shown: str) -> None:
    facts = {
        "name": "ns::f",
        "schema": schema,
        "tunables": ["a", "b"],
        "language": "",
        "source": "",
    }
    assert list_command._row(facts)[1] == shown


# ---------------------------------------------------------------- check


def test_check_finds_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", *SCALE, "f32[16,128]", "--passes", "grid,numerics")
    code, document = run_json(capsys, *words)
    (report,) = document["reports"]
    assert (code, document["ok"]) == (main.EXIT_OK, True)
    assert [row["status"] for row in report["rows"]] == ["ok", "skipped"]
    code, out, _ = run(capsys, *words)
    assert "no reference" in out


def test_check_refuses_an_unknown_pass(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "check", *SCALE, "f32[16,128]", "--passes", "speed")
    assert code == main.EXIT_USAGE
    assert "unknown pass 'speed'" in err


# ---------------------------------------------------------------- overrides

OVERRIDES_FILE = """
import torch
import tpu_kernels as tk


@tk.override("aten::mm", device="cpu", when=lambda a, b: len(a) > 1 or "only one row")
def my_mm(a, b):
    return (a.double() @ b.double()).to(a.dtype) * FACTOR


with my_mm:
    torch.ones(2, 2) @ torch.ones(2, 2)
    torch.ones(1, 2) @ torch.ones(2, 2)
"""


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, main.EXIT_OK), (1.01, main.EXIT_NO)])
def test_overrides_lists_and_checks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, factor: float, verdict: int
) -> None:
    from tpu_kernels.registry.overrides.handle import listed

    file = tmp_path / f"overrides_{verdict}.py"
    file.write_text(OVERRIDES_FILE.replace("FACTOR", str(factor)))
    code, document = run_json(capsys, "overrides", "--import", str(file), "--check")
    assert code == verdict
    (row,) = (row for row in document["overrides"] if row["where"].startswith(str(file)))
    assert (row["op"], row["hits"], row["declines"]) == ("aten::mm", 1, 1)
    assert row["last_decline"] == "only one row"
    (report,) = document["reports"]
    assert report["ok"] is (verdict == main.EXIT_OK)
    for handle in listed():
        handle.remove()
    code, out, _ = run(capsys, "overrides")
    assert (code, "no overrides" in out) == (main.EXIT_OK, True)
