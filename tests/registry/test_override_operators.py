"""Overrides of operators of every kind: each is reached, eager and in graphs, and changes nothing
but who computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.registry.override_checks import DEVICES, nothing_left
from tpu_kernels.registry.overrides import override

clean = pytest.fixture(autouse=True)(nothing_left)

# torch's own deprecated calls, made while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]

Tensor = torch.Tensor


def through(*args: Any, fallback: Any, **kwargs: Any) -> Any:
    return fallback(*args, **kwargs)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def stepped(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Tensor], Tensor]:
    def call(value: Tensor) -> Tensor:
        parameter = torch.nn.Parameter(value.detach().clone())
        (parameter * parameter).sum().backward()
        optimizer([parameter], lr=0.1, **options).step()
        return parameter.detach()

    return call


def added_in_place(a: Tensor, b: Tensor) -> Tensor:
    tensors = [a.clone(), b.clone()]
    torch._foreach_add_(tensors, [b, a])
    return tensors[0]


def scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    left, right = (t.to(torch.float8_e4m3fn) for t in (a, b))
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(a.bfloat16(), b.bfloat16(), ends)


ENDS, ROWS = torch.tensor([16, 32], dtype=torch.int32), torch.tensor([1, 2, 2])
NORMALISED, WEIGHT = data(4, 8), data(8)

# operator: (what calls it, its inputs); with gradients where the inputs are differentiated
FORWARD: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "aten::_grouped_mm": (grouped_mm, [data(32, 16), data(2, 16, 16), ENDS]),
    "aten::_scaled_mm": (scaled_mm, [data(32, 32), data(32, 32)]),
    "aten::_foreach_add_.List": (added_in_place, [data(4, 4), data(4, 4)]),
    "aten::_fused_adamw_": (stepped(torch.optim.AdamW, fused=True), [data(4, 4)]),
    "aten::_foreach_addcdiv_.ScalarList": (
        stepped(torch.optim.AdamW, foreach=True),
        [data(4, 4)],
    ),
    "aten::_fused_sgd_": (stepped(torch.optim.SGD, fused=True), [data(4, 4)]),
}
DIFFERENTIATED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "aten::_foreach_add.List": (lambda a, b: torch._foreach_add([a], [b])[0], [data(4, 4)] * 2),
    "aten::native_layer_norm": (lambda x: F.layer_norm(x, (8,)), [NORMALISED]),
    "aten::native_layer_norm_backward": (lambda x: F.layer_norm(x, (8,)), [NORMALISED]),
    "aten::_fused_rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [NORMALISED, WEIGHT]),
    "aten::embedding": (lambda w, i: F.embedding(i, w), [data(10, 8), ROWS]),
    "aten::embedding_dense_backward": (lambda w, i: F.embedding(i, w), [data(10, 8), ROWS]),
    "aten::_softmax": (lambda x: x.softmax(-1), [NORMALISED]),
    "aten::_softmax_backward_data": (lambda x: x.softmax(-1), [NORMALISED]),
    "aten::convolution": (F.conv2d, [data(2, 3, 8, 8), data(4, 3, 3, 3)]),
    "aten::convolution_backward": (F.conv2d, [data(2, 3, 8, 8), data(4, 3, 3, 3)]),
    "aten::scaled_dot_product_attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q),
        [data(2, 2, 8, 8)],
    ),
    "aten::rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [NORMALISED, WEIGHT]),
    "aten::baddbmm": (torch.baddbmm, [data(2, 4, 3), data(2, 4, 8), data(2, 8, 3)]),
    "aten::gelu_backward": (F.gelu, [NORMALISED]),
    "aten::relu": (lambda x: torch.relu_(x * 1), [NORMALISED]),
}


def forward_and_gradients(
    function: Callable[..., Any], inputs: list[Tensor], device: str, differentiated: bool
) -> list[Tensor]:
    given = [t.to(device).clone() for t in inputs]
    if not differentiated:
        return [function(*given)]
    given = [t.requires_grad_() if t.is_floating_point() else t for t in given]
    result = function(*given)
    weight = data(*result.shape).to(device)
    leaves = [t for t in given if t.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, leaves, weight)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*FORWARD, *DIFFERENTIATED])
def test_every_kind_of_operator_is_reached_and_its_result_kept(name: str, device: str) -> None:
    function, inputs = (FORWARD | DIFFERENTIATED)[name]
    plain = forward_and_gradients(function, inputs, device, name in DIFFERENTIATED)
    with override(name, through, device=device) as handle:
        got = forward_and_gradients(function, inputs, device, name in DIFFERENTIATED)
    assert handle.hits == 1
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("backend", "device"), [("aot_eager", "cpu"), ("tpu", "tpu")])
@pytest.mark.parametrize(
    "name",
    [
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_foreach_add.List",
        "aten::native_layer_norm_backward",
        "aten::embedding_dense_backward",
        "aten::convolution_backward",
        "aten::rms_norm",
    ],
)
def test_graphs_reach_it_too(name: str, backend: str, device: str) -> None:
    function, inputs = (FORWARD | DIFFERENTIATED)[name]
    plain = forward_and_gradients(function, inputs, device, name in DIFFERENTIATED)
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend)
    with override(name, through, device=device) as handle:
        got = forward_and_gradients(compiled, inputs, device, name in DIFFERENTIATED)
    assert handle.hits >= 1, "composites are counted when they are traced"
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_inductor_reaches_an_override_of_a_random_operator() -> None:
    def zeros(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)

    torch.compiler.reset()
    x = torch.ones(8)
    compiled = torch.compile(lambda x: torch.native_dropout(x, 0.5, True)[0] + 1)
    assert set(compiled(x).tolist()) <= {1.0, 3.0}
    with override("aten::native_dropout", zeros, device="cpu") as handle:
        assert compiled(x).tolist() == [1.0] * 8
    assert handle.hits == 1
    torch.compiler.reset()


def test_an_override_may_give_a_device_what_it_lacks() -> None:
    op = torch.ops.aten._fused_rms_norm_backward
    x, rstd = data(4, 8), torch.ones(4, 1)
    given = (x, x, [8], rstd, None, [True, False])
    with pytest.raises(NotImplementedError):
        op(*given)

    def only_ones(grad: Tensor, *rest: Any) -> tuple[Tensor, None]:
        return torch.ones_like(grad), None

    ready = [False]
    with override(op, only_ones, device="cpu", when=lambda *args: ready[0]):
        with pytest.raises(NotImplementedError, match="no implementation on cpu"):
            op(*given)
        ready[0] = True
        assert op(*given)[0].eq(1).all()
    with pytest.raises(NotImplementedError):
        op(*given)
