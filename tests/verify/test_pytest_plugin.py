"""The pytest plugin: one test per call and pass, failures that say what, where and how small."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from _pytest.pytester import SysModulesSnapshot

from tpu_kernels.compiler import versions, worker_pool
from tpu_kernels.errors import ArgumentError
from tpu_kernels.testing import kernel_test

pytest_plugins = ["pytester"]

NAME = "tpu_kernels.verify.pytest_plugin"
KERNELS = """
import jax, pytest, torch
import jax.numpy as jnp
from jax.experimental import pallas as pl
import tpu_kernels as tk
from tpu_kernels.testing import kernel_test


@tk.tpu_kernel("plugin_test::scaled", reference=lambda x, a=2.0: x * a, replace=True)
def scaled(x: jax.Array, a: float = 2.0) -> jax.Array:
    def body(i, o):
        o[...] = i[...] * a

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@tk.tpu_kernel("plugin_test::wrong", reference=lambda x: x + 1, replace=True)
def wrong(x: jax.Array) -> jax.Array:
    return x + jnp.where(jnp.arange(x.shape[1]) < 3, 1, 2)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of an author's, with kernels and strict markers."""
    # pytester forgets what a run has imported, and torch cannot be imported twice in a process.
    kept = SysModulesSnapshot(preserve=lambda name: True)
    monkeypatch.setattr(
        pytest.Pytester, "_Pytester__take_sys_modules_snapshot", lambda self: kept, raising=True
    )
    monkeypatch.setattr(pytester, "_sys_modules_snapshot", kept, raising=True)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider")
    return pytester


def run(project: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    """Run tests of an author's, in this process."""
    # A name of its own for each run: what was imported stays imported.
    module = f"test_{project.path.name}_{len(list(project.path.glob('test_*.py')))}"
    file = project.makepyfile(**{module: KERNELS + tests})
    names = {entry.name for entry in metadata.entry_points(group="pytest11")}
    plugin = () if "tpu_kernels" in names else ("-p", NAME)
    with worker_pool():
        return project.runpytest_inprocess("-rsf", "-v", "-W", "ignore", *plugin, *options, file)


def test_a_line_makes_a_test_of_every_pass(project: pytest.Pytester) -> None:
    tests = "test_scaled = kernel_test(scaled, (torch.ones(8, 128),), passes=('grid', 'numerics'))"
    result = run(project, tests)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_scaled?grid? PASSED*", "*test_scaled?numerics? PASSED*"])


def test_a_failure_says_what_where_and_how_small(project: pytest.Pytester) -> None:
    tests = "test_wrong = kernel_test(wrong, (torch.randn(8, 200),), passes='numerics')"
    result = run(project, tests)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "plugin_test::wrong: numerics failed: output 0: element*the reference*.py:*",
            "*smallest failing call found:*",
            "*tk.check(wrong, (torch.zeros(1, 4),), passes=('numerics',))*",
            "FAILED*test_wrong?numerics?*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_a_marked_function_returns_the_arguments(project: pytest.Pytester) -> None:
    tests = """
@pytest.mark.tpu_kernel(scaled, passes=("numerics", "grid"))
@pytest.mark.parametrize("rows", [8, 16])
def test_marked(rows, tmp_path):
    return {"x": torch.ones(rows, 128), "a": 3.0}


@pytest.mark.tpu_kernel(scaled, passes="numerics")
def test_forgotten():
    torch.ones(8, 128)
"""
    result = run(project, tests)
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*test_forgotten has to return the arguments of the kernel*"])


def test_cases_are_made_when_they_run(project: pytest.Pytester) -> None:
    tests = """
def broken():
    raise RuntimeError("no such data")

test_scaled = kernel_test(
    scaled, cases={"small": (torch.ones(8, 128),), "data": broken}, passes="numerics"
)
"""
    result = run(project, tests)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_scaled?small-numerics? PASSED*", "*no such data*"])


def test_what_does_not_apply_is_skipped_with_the_reason(project: pytest.Pytester) -> None:
    result = run(
        project, "test_x = kernel_test(jnp.tanh, (torch.ones(8, 128),), passes='numerics')"
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*a plain JAX function has no reference*"])


def test_without_the_compiler_targets_are_skipped(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "libtpu_version", lambda: None)
    tests = "test_x = kernel_test(scaled, (torch.ones(8, 128),), passes='grid', targets='v6e')"
    result = run(project, tests + "\n", "--tpu-passes", "grid")
    result.assert_outcomes(passed=1)
    tests = "test_x = kernel_test(scaled, (torch.ones(8, 128),), targets='v6e', passes='compile')"
    result = run(project, tests)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*libtpu*is not installed*pip install*"])


@pytest.mark.libtpu
def test_each_target_is_a_test(project: pytest.Pytester) -> None:
    tests = """
test_x = kernel_test(scaled, (torch.ones(8, 128),), targets="v6e")
test_half = kernel_test(scaled, (torch.ones(8, 128, dtype=torch.float16),), targets="v6e")
"""
    result = run(project, tests, "--tpu-target", "v5e,v4", "--tpu-passes", "compile")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        ["*test_x?compile-v5e? PASSED*", "*compile on v4 failed: unsupported: float16*"]
    )


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("(scaled, target='v6e')", "unexpected keyword argument 'target'"),
        ("()", "missing 1 required positional argument: 'kernel'"),
        ("(scaled, passes='speed')", "unknown pass 'speed'"),
    ],
)
def test_a_wrong_marker_is_refused(project: pytest.Pytester, marker: str, words: str) -> None:
    result = run(project, f"@pytest.mark.tpu_kernel{marker}\ndef test_x():\n    return ()\n")
    assert result.ret != 0
    assert words in result.stdout.str() + result.stderr.str()


def test_arguments_and_cases_exclude_each_other() -> None:
    with pytest.raises(ArgumentError, match="either args or cases"):
        kernel_test(abs)
    with pytest.raises(ArgumentError, match="either args or cases"):
        kernel_test(abs, (1,), cases={})


def test_the_plugin_costs_nothing_where_there_are_no_kernels() -> None:
    code = (
        f"import {NAME}, sys; "
        "raise SystemExit(any(m in sys.modules for m in ('torch', 'jax', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
