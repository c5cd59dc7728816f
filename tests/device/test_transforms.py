"""torch's machinery on top of the device: function transforms, fake tensors, tracing, modes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode


# torch's own forward mode compiles its decompositions with the deprecated torch.jit.script.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_function_transforms() -> None:
    x = torch.tensor([0.5, 1.0, 2.0], device="tpu")
    assert grad(lambda y: (y**3).sum())(x).tolist() == [0.75, 3, 12]
    value, tangent = jvp(lambda y: y * y, (x,), (torch.ones_like(x),))
    assert (value.tolist(), tangent.tolist()) == ([0.25, 1, 4], [1, 2, 4])
    assert jacrev(lambda y: y**2)(x).diagonal().tolist() == [1, 2, 4]
    assert hessian(lambda y: (y**2).sum())(x).diagonal().tolist() == [2, 2, 2]
    batched = vmap(lambda a, b: a @ b, in_dims=(0, None))(torch.eye(3, device="tpu"), x)
    assert batched.tolist() == x.tolist()
    per_sample = vmap(grad(lambda w, y: (w * y).sum()), in_dims=(None, 0))(
        x, torch.stack([x, 2 * x])
    )
    assert per_sample.tolist() == [x.tolist(), (2 * x).tolist()]


def test_double_backward() -> None:
    x = torch.tensor([1.0, 2.0], device="tpu", requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6, 12]


def test_zero_tensors_of_autograd_have_memory() -> None:
    x = torch.tensor([1.0, -2.0], device="tpu", requires_grad=True)
    (gradient,) = torch.autograd.grad(x.sgn().sum(), x)
    assert gradient.cpu().tolist() == [0, 0]


def test_fake_tensors_know_the_device() -> None:
    with FakeTensorMode() as mode:
        made = (torch.empty(2, 3, device="tpu") @ torch.empty(3, 4, device="tpu")).relu()
    taken = mode.from_tensor(torch.ones(3, 2, device="tpu").t())
    assert (made.device, made.shape) == (torch.device("tpu:0"), (2, 4))
    assert (taken.device, taken.stride()) == (torch.device("tpu:0"), (1, 2))


def test_tracing_records_aten_operators() -> None:
    traced = make_fx(lambda a: (a @ a).relu() + 1, tracing_mode="symbolic")(
        torch.ones(3, 3, device="tpu")
    )
    names = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    assert names == ["aten.mm.default", "aten.relu.default", "aten.add.Tensor"]


def test_dispatch_modes_see_the_devices_operators() -> None:
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Record():
        torch.ones(2, device="tpu").add(1).sum()
    assert seen[-2:] == ["aten.add.Tensor", "aten.sum.default"]


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(2, device="tpu")
        x.add_(1)
        assert (x * 2).is_inference()
        assert x.view(2, 1).sum().item() == 4


def test_export_with_a_dynamic_dimension() -> None:
    model = torch.nn.Linear(3, 2).to("tpu")
    batch = torch.export.Dim("batch", min=2, max=16)
    exported = torch.export.export(
        model, (torch.ones(4, 3, device="tpu"),), dynamic_shapes=({0: batch},)
    )
    x = torch.randn(7, 3, device="tpu")
    assert torch.equal(exported.module()(x).cpu(), model(x).cpu())
