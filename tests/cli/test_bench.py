"""`tpu-kernels bench`: kernels beside their references."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.cli import main
from tpu_kernels.tuning import bench

USER_FILE = str(Path(__file__).with_name("kernels_of_a_user.py"))


@tk.tpu_kernel("bench_test::double", reference=lambda x: 2 * x, replace=True)
def double(x: jax.Array) -> jax.Array:
    return x + x


@tk.tpu_kernel("bench_test::wrong", reference=lambda x: 2 * x, replace=True)
def wrong(x: jax.Array) -> jax.Array:
    return x * 3


def test_both_are_timed_on_the_simulated_device_and_compared() -> None:
    x = torch.ones(8, 128)
    row = bench.on_device(double, [x], {}, rounds=2)
    assert row.ok
    assert row.where == bench.SIMULATED
    assert row.kernel_us is not None
    assert row.reference_us is not None
    assert row.speedup == pytest.approx(row.reference_us / row.kernel_us)
    assert row.note == ""
    assert "results differ" in bench.on_device(wrong, [x], {}, rounds=1).note


def test_the_command_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cli_test::scale", "f32[16,128]", "--import", USER_FILE, "--target", "none"]
    assert main.main(["bench", *words, "--simulated", "--json"]) == main.EXIT_OK
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["note"] == "nothing to compare with"
    assert row["kernel_us"] > 0
    assert row["speedup"] is None
    assert main.main(["bench"]) == main.EXIT_USAGE


@pytest.mark.libtpu
def test_the_compiler_compares_with_what_xla_makes_of_the_reference() -> None:
    row = bench.on_chip(double, [torch.empty(64, 128, device="meta")], {}, "v6e")
    assert row.ok, row.note
    assert row.reference_us is not None
    assert row.speedup == pytest.approx(1.0, rel=0.5)  # the same program, more or less
    x = torch.empty(64, 128, device="meta")
    beside = bench.beside_peer(row, lambda a: a * 2, "twice", double, [x], {})
    assert (beside.kernel_us, beside.note) == (row.kernel_us, "beside twice")
    assert beside.speedup == pytest.approx(1.0, rel=0.5)
    broken = bench.beside_peer(row, lambda a, b: a, "other", double, [x], {})
    assert broken.reference_us is None
    assert broken.note.startswith("beside other: ")


def test_a_peer_is_named_by_module_and_function(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "cli_test::scale", "f32[16,128]", "--import", USER_FILE, "--target", "none"]
    assert main.main([*words, "--peer", "math"]) == main.EXIT_USAGE
    assert main.main([*words, "--peer", "math:nothing"]) == main.EXIT_USAGE
    assert "has no function 'nothing'" in capsys.readouterr().err
