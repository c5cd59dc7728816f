"""Whole models: the same losses and gradients as on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device.models import losses


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}],
    ids=str,
)
def test_adamw_training_agrees_with_the_cpu(options: dict[str, Any]) -> None:
    # Float32 on both sides; only the order of sums in the fused optimizer can differ.
    here = {k: v for k, v in options.items() if k != "capturable"}
    assert losses("tpu", **options) == pytest.approx(losses("cpu", **here), abs=2e-5)


def gradients_agree(model: nn.Module, *inputs: torch.Tensor, tolerance: float = 2e-5) -> None:
    there = copy.deepcopy(model).to("tpu")
    results = []
    for module, device in ((model, "cpu"), (there, "tpu")):
        torch.manual_seed(3)
        output = module(*(t.to(device) for t in inputs))
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    for on_cpu, on_tpu in zip(*results, strict=True):
        assert on_tpu.device.type == "tpu"
        torch.testing.assert_close(on_tpu.cpu(), on_cpu, rtol=tolerance, atol=tolerance)


def test_convolution_batch_norm_pooling_and_dropout() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3),
    )  # fmt: skip
    gradients_agree(model, torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_networks(kind: type[nn.Module], bias: bool) -> None:
    model = kind(5, 4, num_layers=2, bidirectional=True, bias=bias)
    gradients_agree(model, torch.randn(6, 2, 5))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(kind: type[nn.Module]) -> None:
    gradients_agree(kind(5, 4), torch.randn(3, 5))


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    gradients_agree(model, torch.randn(2, 5, 8))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}], ids=str)
def test_attention(options: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 6, 8)
    options = {k: torch.randn(6, 6) if k == "attn_mask" else v for k, v in options.items()}
    there = {k: v.to("tpu") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    x = q.to("tpu").requires_grad_()
    output = F.scaled_dot_product_attention(x, x, x, **there)
    output.sum().backward()
    expected = F.scaled_dot_product_attention(q, q, q, **options)
    torch.testing.assert_close(output.detach().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert x.grad is not None


def test_autocast_runs_matmuls_in_bfloat16_and_softmax_in_float32() -> None:
    x = torch.randn(4, 4, device="tpu", requires_grad=True)
    with torch.autocast("tpu", torch.bfloat16):
        product = x @ x
        normal = F.softmax(product, -1)
        assert F.linear(x, x).dtype is torch.bfloat16
        assert torch.cat([product, x]).dtype is torch.float32
        assert (x + x).dtype is torch.float32
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype is torch.float32
    assert (product.dtype, normal.dtype) == (torch.bfloat16, torch.float32)
    normal.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    rounded = x.detach().cpu().bfloat16()
    assert torch.equal(product.cpu(), rounded @ rounded)


def test_autocast_training_follows_the_cpus() -> None:
    # bfloat16 has 8 bits: losses of about 3.7 differ by the rounding of different operator lists.
    assert losses("tpu", autocast=True) == pytest.approx(losses("cpu", autocast=True), abs=0.03)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_dropout(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("tpu")
    found = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(7)
        x = torch.ones(2, 4, device="tpu", requires_grad=True)
        call(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
    assert torch.equal(*found)


def test_gradcheck_in_float64() -> None:
    x = torch.randn(3, 3, dtype=torch.float64, device="tpu", requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: (a @ a.t()).sin(), (x,))


def test_gradient_scaler() -> None:
    weight = torch.ones(2, device="tpu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == pytest.approx([0.9, 0.9])
