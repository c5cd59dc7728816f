"""PyTorch's matrix products by `tpu::matmul`: values, gradients, what is left to torch and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpu_kernels.device  # noqa: F401
from tpu_kernels.ops import gated_linear, linear, matmul, use_matmul
from tpu_kernels.ops.linear import PLAIN, suits


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def with_gradients(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.device, out.dtype)
    return [out.detach().cpu()] + [
        g.cpu() for g in torch.autograd.grad((out * weights).sum(), leaves)
    ]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Sums of at most 60 products of float32, in another order; bfloat16 rounds results once."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        tolerance = 2e-5 if a.dtype is torch.float32 else 4 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(20, 30), (30, 25)]),
    "mm of transposed": (lambda a, b: torch.mm(a.t(), b.t()), [(30, 20), (25, 30)]),
    "addmm": (torch.addmm, [(25,), (20, 30), (30, 25)]),
    "addmm with factors": (
        lambda c, a, b: torch.addmm(c, a, b.t(), beta=0.5, alpha=-2),
        [(20, 1), (20, 30), (25, 30)],
    ),
    "bmm": (torch.bmm, [(3, 20, 30), (3, 30, 25)]),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b.mT, beta=2, alpha=0.5),
        [(3, 1, 25), (3, 20, 30), (3, 25, 30)],
    ),
    "linear": (F.linear, [(2, 7, 30), (25, 30), (25,)]),
    "linear of a vector": (F.linear, [(30,), (25, 30)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    function, shapes = CALLS[name]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    wanted = with_gradients(function, inputs)
    with use_matmul(plain=True) as overrides:
        got = with_gradients(function, [x.to("tpu") for x in inputs])
    assert overrides.hits >= 1
    assert overrides.last_decline is None
    assert_same(got, wanted)


def test_bfloat16_is_rounded_once() -> None:
    inputs = [normal(*s, dtype=torch.bfloat16) for s in ((12, 30), (25, 30), (25,))]
    wanted = with_gradients(F.linear, [x.float() for x in inputs])
    with use_matmul() as overrides:
        got = with_gradients(F.linear, [x.to("tpu") for x in inputs])
    assert overrides.hits == 1
    assert_same(got, [w.bfloat16() for w in wanted])


def test_what_does_not_count_may_be_nan() -> None:
    a, b = normal(4, 5).to("tpu"), normal(5, 6).to("tpu")
    with use_matmul() as overrides:
        out = torch.addmm(torch.full((6,), torch.nan).to("tpu"), a, b, beta=0)
    assert overrides.hits == 1
    torch.testing.assert_close(out.cpu(), a.cpu() @ b.cpu())


def test_plain_products_are_left_to_xla_with_the_reason() -> None:
    a = normal(6, 6, dtype=torch.bfloat16).to("tpu")
    with use_matmul() as overrides:
        torch.mm(a, a)
        F.linear(a, a)
    assert overrides.hits == 0
    assert overrides.last_decline == PLAIN


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ((torch.ones(2, 2, dtype=torch.int32),) * 2, "torch.int32 is not a dtype of the kernel"),
        ((torch.ones(2, 2), torch.ones(2, 2).bfloat16()), "several dtypes"),
        ((torch.ones(2, 2, 2), torch.ones(2, 2)), "3-d and 2-d operands"),
        ((torch.ones(2, 3), torch.ones(2, 3)), "shapes that do not fit"),
        ((torch.ones(0, 3), torch.ones(3, 2)), "an empty tensor"),
        ((torch.ones(2, 2).to_sparse(), torch.ones(2, 2)), "a sparse tensor"),
        (
            (torch.ones(2, 3), torch.ones(3, 2), torch.ones(3)),
            "a tensor to add to that does not fit",
        ),
    ],
)
def test_what_the_kernel_does_not_compute_is_declined(
    operands: tuple[torch.Tensor, ...], reason: str
) -> None:
    assert suits(2, *operands) == reason


def test_declined_calls_are_answered_by_torch() -> None:
    x = normal(3, 4).double().to("tpu")
    layer = nn.Linear(4, 2).double().to("tpu")
    with use_matmul() as overrides:
        out = layer(x)
    assert overrides.hits == 0
    assert overrides.last_decline == "torch.float64 is not a dtype of the kernel"
    assert torch.equal(out, layer(x))


def test_compiled_graphs_contain_the_kernel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    x = normal(6, 12)
    wanted = with_gradients(model, [x])
    torch._dynamo.reset()
    with use_matmul() as overrides:
        got = with_gradients(torch.compile(model.to("tpu"), backend="tpu"), [x.to("tpu")])
    assert overrides.hits >= 2
    assert_same(got, wanted)


@pytest.fixture
def restored_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("restored_precision")
def test_float32_follows_the_precision_that_torch_is_set_to() -> None:
    x, y, bias = normal(8, 60), normal(60, 5), normal(5)
    found = {}
    for torch_name, name in (("high", "high"), ("highest", "highest")):
        torch.set_float32_matmul_precision(torch_name)
        with use_matmul():
            found[name] = torch.addmm(bias.to("tpu"), x.to("tpu"), y.to("tpu")).cpu()
        assert torch.equal(found[name], matmul(x, y, bias, precision=name))
    assert not torch.equal(found["high"], found["highest"])


def test_a_layer_with_all_that_follows_it() -> None:
    x, weight, bias = normal(2, 3, 30), normal(25, 30), normal(25)
    residual = normal(2, 3, 25, seed=1)
    wanted = with_gradients(
        lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, [x, weight, bias, residual]
    )
    got = with_gradients(
        lambda x, w, b, r: linear(x, w, b, activation="gelu", residual=r),
        [x, weight, bias, residual],
    )
    assert_same(got, wanted)


def test_a_gated_layer() -> None:
    x, gate, up = normal(2, 3, 30), normal(25, 30), normal(25, 30, seed=1)
    wanted = with_gradients(lambda x, g, u: F.silu(x @ g.t()) * (x @ u.t()), [x, gate, up])
    assert_same(with_gradients(gated_linear, [x, gate, up]), wanted)
