"""Helion kernels and the TPU compiler: compile, check, tune, show."""

from __future__ import annotations

import jax
import pytest
import torch

import tpu_kernels as tk
from tests.helion import kernels
from tests.helion.test_operator import operator, randn
from tpu_kernels.cli.main import main
from tpu_kernels.dsl import generated_code, helion_config, helion_space
from tpu_kernels.errors import ConfigError


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.libtpu
@pytest.mark.parametrize("target", ["v5e", "v6e", "tpu7x"])
def test_a_matrix_product_compiles_for_every_generation(target: str) -> None:
    args = (meta(256, 256, dtype=torch.bfloat16), meta(256, 256, dtype=torch.bfloat16))
    report = tk.compile(operator("matmul"), args, target=target)
    assert report.status == "ok", str(report)


@pytest.mark.libtpu
@pytest.mark.parametrize("name", ["rms_norm_residual", "attention", "matmul_of_transposed"])
def test_kernels_with_host_code_compile(name: str) -> None:
    shapes = {
        "rms_norm_residual": ((128, 512), (128, 512), (512,)),
        "attention": ((1, 2, 128, 64),) * 3,
        "matmul_of_transposed": ((128, 256), (384, 256)),
    }[name]
    report = tk.compile(operator(name), tuple(meta(*s) for s in shapes), target="v6e")
    assert report.status == "ok", str(report)


@pytest.mark.libtpu
def test_what_the_compiler_refuses_is_told_at_the_line_of_the_helion_source() -> None:
    args = (meta(64, 128, dtype=torch.float16), meta(64, 128, dtype=torch.float16))
    text = str(tk.compile(operator("swiglu"), args, target="v6e"))
    first = kernels.swiglu.fn.__code__.co_firstlineno
    assert "float16" in text
    assert any(f"helion/kernels.py:{first + n}" in text for n in range(6)), text


@pytest.mark.libtpu
def test_a_ragged_kernel_passes_the_checks_of_the_tpu_interpreter() -> None:
    kernel = tk.tpu_kernel("helion_tests::checked_add", reference=torch.add)(kernels.add)
    passes = ("numerics", "races", "bounds", "nan")
    report = tk.check(kernel, (randn(70, 128), randn(70, 128)), target="v6e", passes=passes)
    rows = {row.name: row.status for row in report.rows}
    assert {rows[name] for name in passes} == {"ok"}, str(report)


def test_a_kernel_without_configs_has_a_bounded_space_of_its_own() -> None:
    spec = operator("matmul").spec
    square = jax.ShapeDtypeStruct((512, 512), "float32")
    configs = spec.config_space({"x": square, "y": square})
    assert 2 <= len(configs) <= helion_space.LIMIT
    texts = [c["config"] for c in configs]
    assert len(set(texts)) == len(texts)
    assert texts[0] == '{"block_sizes": [64, 128, 128]}'  # the declared one comes first


def test_the_generated_code_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    operator("add")
    status = main(["show", "helion_tests::add", "f32[64,128]", "f32[64,128]", "--code"])
    shown = capsys.readouterr().out
    assert status == 0
    assert "_launcher(_helion_add" in shown


def test_code_of_a_kernel_that_is_not_helions_is_refused() -> None:
    assert main(["show", "tpu::matmul", "f32[8,128]", "f32[128,8]", "--code"]) != 0


def test_a_generated_line_is_traced_back(tmp_path: object) -> None:
    made = f"{tmp_path}/made.py"
    with open(made, "w", encoding="utf-8") as file:
        file.write("def f(x):\n    # src[k.py:5]: y = x\n    y = x\n    return y\n")
    assert generated_code.origin(made, 3) == (made, 3)
    generated_code.remember(made, "/src/k.py")
    assert generated_code.origin(made, 3) == ("/src/k.py", 5)
    assert generated_code.origin(made, 1) == ("/src/k.py", 1)


@pytest.mark.parametrize("value", [17, "block_sizes", [1, 2]])
def test_what_is_no_config_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="not a config of a Helion kernel"):
        helion_config.read(value)
