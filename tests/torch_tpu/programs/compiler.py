"""Programs of TorchTPU through the TPU compiler: ``tpu_kernels.compile(via="torch_tpu")``."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl

import tpu_kernels as tk
from tests.torch_tpu.programs.kernels import raises
from tpu_kernels.backends.torch_tpu import stablehlo
from tpu_kernels.compiler.chips import resolve
from tpu_kernels.tuning import device as tuning_device
from tpu_kernels.tuning.device import Device


def _double(a: Any, out: Any) -> None:
    out[...] = a[...] * 2


@tk.tpu_kernel("ttc::twice", reference=lambda a: a * 2, backward="reference")
def twice(a: jax.Array) -> jax.Array:
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype))(a)


class Net(torch.nn.Module):
    """Attention (TorchTPU's own Mosaic kernel) after a Pallas kernel of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = twice(self.up(x)).view(2, 128, 4, 64).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def check_a_module_compiles_for_several_chips() -> None:
    torch.backends.cuda.enable_flash_sdp(True)
    try:
        reports = tk.compile(
            Net(), (torch.randn(2, 128, 256),), target=["v5e", "v6e"], via="torch_tpu"
        )
    finally:
        torch.backends.cuda.enable_flash_sdp(False)
    for report in reports.values():
        assert report.ok, report.text
        assert report.kernel == "Net"
        # x, weight and bias in float32; the result is as large as x.
        assert report.hbm_argument_bytes == 4 * (2 * 128 * 256 + 256 * 256 + 256)
        assert report.hbm_output_bytes == 4 * 2 * 128 * 256
        assert report.flops > 2 * 256 * 256 * 256  # at least the linear layer
        assert report.estimate is not None
        assert report.estimate.us > 0


def check_a_training_step_compiles() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = twice(x @ weight).pow(2).sum()
        return (loss, *torch.autograd.grad(loss, [weight]))

    weight = torch.randn(256, 128, requires_grad=True)
    report = tk.compile(step, (torch.randn(64, 256), weight), target="v6e", via="torch_tpu")
    assert report.ok, report.text
    # Outputs in HBM are padded to whole tiles: the loss takes more than its 4 bytes.
    assert report.hbm_output_bytes >= 4 * (256 * 128 + 1)


def check_an_override_is_in_the_program() -> None:
    def product(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return twice(a) @ c

    args = (torch.randn(128, 128), torch.randn(128, 128))
    plain = stablehlo.lower(torch.mm, args, {}, resolve("v6e"))
    with tk.override("aten::mm", product):
        changed = stablehlo.lower(torch.mm, args, {}, resolve("v6e"))
    assert "tpu_custom_call" not in plain
    assert "tpu_custom_call" in changed  # lowered by Mosaic for the chip, not interpreted


def check_what_the_compiler_refuses_points_at_the_kernel() -> None:
    report = tk.compile(twice_everything, (torch.randn(8192, 8192),), via="torch_tpu")
    assert report.status == "vmem"
    assert report.where is not None
    assert report.where.startswith(__file__)
    assert "pallas_call" in str(report.source_line)


def twice_everything(x: torch.Tensor) -> torch.Tensor:
    return twice(x)


def check_what_cannot_be_a_program_is_said_in_words() -> None:
    held = torch.randn(3).to("tpu")
    x = torch.ones(3)
    with raises(tk.ArgumentError, "not among its arguments", "compiler.py"):
        tk.compile(lambda a: a + held, (x,), via="torch_tpu")
    with raises(tk.ArgumentError, "value"):
        tk.compile(lambda a: a.sum().item(), (x,), via="torch_tpu")
    with raises(tk.ArgumentError, "returns no tensor"):
        tk.compile(lambda a: 3, (x,), via="torch_tpu")
    with raises(tk.ArgumentError, "config"):
        tk.compile(torch.sin, (x,), via="torch_tpu", config={"block": 8})


def check_what_the_compiler_ranks_best_is_measured_on_a_chip_that_is_there() -> None:
    # All in here: workers, which have no TorchTPU, must not import this module.
    def double(a: Any, out: Any) -> None:
        out[...] = a[...] * 2

    @tk.tpu_kernel("ttc::rows", reference=lambda a, **_: a * 2)
    def rows(a: jax.Array, *, block: int = 256) -> jax.Array:
        spec = pl.BlockSpec((block, a.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype),
            grid=(a.shape[0] // block,),
            in_specs=[spec],
            out_specs=spec,
        )(a)

    def tune(device: Device) -> tk.tuning.TuneReport:
        with mock.patch.object(tuning_device, "current", return_value=device):
            return tk.autotune(rows, (x,), configs={"block": [8, 256]}, target="v6e", store=False)

    x = torch.randn(512, 128)
    report = tune(Device("a pretended v6e", "v6e"))
    slow, fast = report.results if report.results[0].config["block"] == 8 else report.results[::-1]
    assert slow.rank > 1.1 * (fast.cost or 0)  # by the cost model: it is left out
    assert (fast.ok, slow.ok) == (True, True), report.text
    assert report.best is fast
    assert fast.cost is not None
    assert fast.time_us is not None
    assert slow.time_us is None
    assert fast.figures["samples"] > 0
    assert "a pretended v6e" in report.decision
    assert all(row.time_us is None for row in tune(Device("another", "v5e")).results)
