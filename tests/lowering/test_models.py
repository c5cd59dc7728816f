"""Whole models: trained through compiled programs as in eager, and compiled for a real chip."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tpu_kernels as tk
from tests.lowering.models import LanguageModel, ResNet, train
from tpu_kernels.backends.graphs import compile_stats
from tpu_kernels.verify.modules import ModelReport


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "device"), [("mlp", "cpu"), ("gpt", "tpu"), ("resnet", "tpu")])
def test_training_is_that_of_eager_in_one_program_for_each_graph(name: str, device: str) -> None:
    expected, state = train(name, device, lambda model: model)
    before = compile_stats()
    losses, found = train(
        name, device, lambda model: torch.compile(model, backend="tpu", fullgraph=True)
    )
    after = compile_stats()
    # Same arithmetic in another order; AdamW divides small gradients by their own size, which
    # makes of the last bits of a gradient a fraction of the learning rate (1e-2).
    assert losses == pytest.approx(expected, rel=2e-4)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=2e-3)
    assert after.left == before.left
    assert (after.graphs - before.graphs, after.programs - before.programs) == (2, 2)


@pytest.mark.libtpu
def test_a_model_with_its_backward_compiles_for_a_chip() -> None:
    with torch.device("meta"):
        model = LanguageModel(dropout=0.1)
        tokens = torch.zeros(2, 17, dtype=torch.int64)
    forward = tk.compile(model, (tokens,), target="v6e")
    report = tk.compile(model, (tokens,), target="v6e", backward=True)
    assert isinstance(forward, ModelReport)
    assert isinstance(report, ModelReport)
    assert (forward.status, report.status) == ("ok", "ok"), report.text
    assert report.unlowered == {}
    assert report.fits
    assert report.parameter_bytes == sum(4 * p.numel() for p in model.parameters())
    # Parameters are arguments, with their gradients as results.
    assert forward.hbm_argument_bytes is not None
    assert forward.hbm_argument_bytes >= report.parameter_bytes
    assert (report.hbm_output_bytes or 0) >= report.parameter_bytes > 0
    assert report.flops is not None
    assert forward.flops is not None
    assert report.flops > 2 * forward.flops
    assert "HBM of the device" in report.text
    places = [buffer["where"] for buffer in report.buffers]
    assert any(place.startswith(("blocks.0.", "head", "tokens")) for place in places), places


@pytest.mark.libtpu
def test_what_does_not_fit_and_what_does_not_lower_is_said() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(1 << 16, 1 << 17, bias=False, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)

    report = tk.compile(Wide(), (torch.empty(8, 1 << 16, device="meta"),), target="v5e")
    assert isinstance(report, ModelReport)
    assert report.fits is False
    assert "HBM" in (report.error or "")

    def odd(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_y1(x).sum(0)

    report = tk.compile(odd, (torch.ones(8, 128),), target="v6e")
    assert isinstance(report, ModelReport)
    assert list(report.unlowered) == ["aten.special_bessel_y1.default"]
    assert "not in the program" in report.text


def test_statistics_of_batch_norm_are_results() -> None:
    from tpu_kernels.lowering.capture import capture
    from tpu_kernels.lowering.whole import WholeGraph
    from tpu_kernels.registry.engine import Engine

    captured = capture(ResNet(), (torch.randn(4, 3, 8, 8),))
    whole = WholeGraph(captured.graph, captured.inputs)
    import jax

    shapes = jax.eval_shape(lambda *a: whole.trace(Engine(), *a), *whole.avals())
    assert whole.unlowered == {}
    # The loss, then mean, variance and count of each of three layers.
    assert [s.shape for s in shapes].count((8,)) == 6
    assert len(shapes) == 10
