"""Gradients under overrides equal those without, whatever the operator is made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch.nn import functional as F

from tests.registry.override_checks import DEVICES, matrices, nothing_left
from tpu_kernels import OverrideError, tpu_kernel
from tpu_kernels.registry.overrides import override

clean = pytest.fixture(autouse=True)(nothing_left)


@tpu_kernel("override_test::pallas_mm")
def pallas_mm(x: jax.Array, y: jax.Array) -> jax.Array:
    """A Pallas kernel that JAX cannot differentiate."""

    def body(a: Any, b: Any, o: Any) -> None:
        o[...] = jnp.dot(a[...], b[...], precision="highest")

    shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x, y)


@tpu_kernel("override_test::jax_mm")
def jax_mm(x: jax.Array, y: jax.Array) -> jax.Array:
    """A kernel with a backward of its own, by JAX."""
    return jnp.dot(x, y, precision="highest")


def opaque_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An implementation that autograd cannot see through."""
    return torch.from_numpy(a.detach().cpu().numpy() @ b.detach().cpu().numpy()).to(a.device)


def differentiable_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def gradients(call: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    call(*leaves).pow(2).sum().backward()
    return [leaf.grad for leaf in leaves]  # type: ignore[misc]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", [pallas_mm, jax_mm, opaque_mm, differentiable_mm])
@pytest.mark.parametrize("name", ["mm", "matmul"])
def test_matrix_products(device: str, impl: Any, name: str) -> None:
    a, b = matrices(device)
    call = getattr(torch, name)
    expected = gradients(call, a, b)
    with override(f"aten::{name}", impl, device=device) as handle:
        found = gradients(call, a, b)
    assert handle.hits >= 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_backward_of_the_implementation_is_preferred_and_can_be_refused() -> None:
    a, b = matrices("cpu")
    with override("aten::matmul", lambda x, y: differentiable_mm(x, y) * 2, device="cpu"):
        own = gradients(torch.matmul, a, b)
    with override(
        "aten::matmul",
        lambda x, y: differentiable_mm(x, y) * 2,
        device="cpu",
        backward="original",
    ):
        borrowed = gradients(torch.matmul, a, b)
    plain = gradients(torch.matmul, a, b)
    # y = 2ab, so the derivative of y² is four times as large; the borrowed half forgets one factor.
    torch.testing.assert_close(own, [4 * g for g in plain], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(borrowed, [2 * g for g in plain], rtol=1e-4, atol=1e-4)


def test_missing_backward_is_refused_where_it_was_asked_for() -> None:
    a, b = matrices("cpu")
    a.requires_grad_()
    with override("aten::matmul", opaque_mm, device="cpu", backward="impl"):
        with pytest.raises(OverrideError, match=r"aten::matmul.*backward must be supplied"):
            torch.matmul(a, b)
        assert not torch.matmul(a.detach(), b).requires_grad

    library = torch.library.Library("override_test", "FRAGMENT")
    library.define("no_autograd(Tensor a, Tensor b) -> Tensor")
    library.impl("no_autograd", opaque_mm, "CPU")
    operator = torch.ops.override_test.no_autograd.default
    with pytest.raises(OverrideError, match=r"composite.*backward must be supplied.*no_autograd"):
        override("aten::matmul", operator, device="cpu", backward="impl")
    expected = gradients(torch.matmul, a, b)
    with override("aten::matmul", operator, device="cpu"):
        torch.testing.assert_close(gradients(torch.matmul, a, b), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_through_a_borrowed_backward(device: str) -> None:
    a, b = (t.double() for t in matrices(device, size=3))
    a.requires_grad_()
    b.requires_grad_()
    with override("aten::matmul", opaque_mm, device=device):
        assert torch.autograd.gradcheck(torch.matmul, (a, b))
        assert torch.autograd.gradgradcheck(torch.matmul, (a, b))


def test_inputs_that_depend_on_each_other() -> None:
    a, _ = matrices("cpu")

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, x * 2)

    expected = gradients(call, a)
    with override("aten::matmul", opaque_mm, device="cpu"):
        torch.testing.assert_close(gradients(call, a), expected)


def test_inputs_changed_before_the_backward_are_noticed() -> None:
    a, b = matrices("cpu")
    a.requires_grad_()
    with override("aten::matmul", opaque_mm, device="cpu"):
        loss = torch.matmul(a, b).sum()
        b.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_other_composites(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, device=device) for _ in range(3))
    x, w = matrices(device)

    def attention(*args: Any, fallback: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return fallback(*args, **kwargs)

    def norm(t: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(t, (8,))

    def detached(*args: Any, fallback: Any) -> torch.Tensor:
        return fallback(*args).detach()

    cases = [
        ("scaled_dot_product_attention", attention, F.scaled_dot_product_attention, (q, k, v)),
        ("layer_norm", detached, norm, (x,)),
        ("linear", detached, F.linear, (x, w)),
        ("softmax.int", detached, lambda t: torch.softmax(t, -1), (x,)),
    ]
    for name, impl, call, inputs in cases:
        expected = gradients(call, *inputs)
        with override(f"aten::{name}", impl, device=device) as handle:
            found = gradients(call, *inputs)
        assert handle.hits >= 1, name
        torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_base_operators_keep_torchs_formula(device: str) -> None:
    x, w = matrices(device)
    index = torch.arange(4, device=device)

    def same(*args: Any, fallback: Any, **kwargs: Any) -> Any:
        return fallback(*args, **kwargs)

    cases = [
        ("addmm", lambda t, u: torch.addmm(t, t, u), (x, w)),
        ("bmm", lambda t, u: torch.bmm(t[None], u[None]), (x, w)),
        ("_softmax", lambda t: torch.softmax(t, -1), (x,)),
        ("native_layer_norm", lambda t: F.layer_norm(t, (8,)), (x,)),
        ("embedding", lambda t: F.embedding(index, t), (w,)),
        ("where.self", lambda t, u: torch.where(t > 0, t, u), (x, w)),
    ]
    for name, call, inputs in cases:
        expected = gradients(call, *inputs)
        with override(f"aten::{name}", same, device=device) as handle:
            found = gradients(call, *inputs)
        assert handle.hits >= 1, name
        torch.testing.assert_close(found, expected, msg=name)


def test_under_functorch_and_dispatch_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    a, b = matrices("cpu")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, b).pow(2).sum()

    expected = torch.func.grad(loss)(a)
    for impl in (differentiable_mm, lambda x, y: differentiable_mm(x, y).detach()):
        with override("aten::matmul", impl, device="cpu") as handle:
            torch.testing.assert_close(torch.func.grad(loss)(a), expected, rtol=1e-4, atol=1e-4)
            with Passing():
                (found,) = gradients(lambda x: torch.matmul(x, b), a)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert handle.hits >= 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in forward AD
def test_forward_mode_through_a_borrowed_backward_is_refused() -> None:
    a, b = matrices("cpu")
    forward_ad = torch.autograd.forward_ad
    with (
        override("aten::matmul", opaque_mm, device="cpu", backward="original"),
        forward_ad.dual_level(),
    ):
        dual = forward_ad.make_dual(a.requires_grad_(), torch.ones_like(a))
        with pytest.raises(OverrideError, match="forward-mode"):
            torch.matmul(dual, b)


def test_random_operators_are_not_borrowed() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)

    def attention(*args: Any, fallback: Any, **kwargs: Any) -> torch.Tensor:
        return fallback(*args, **kwargs).detach()

    with override("aten::scaled_dot_product_attention", attention, device="cpu"):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        with pytest.raises(OverrideError, match=r"random numbers.*backward must be supplied"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert not F.scaled_dot_product_attention(q.detach(), q.detach(), q.detach()).requires_grad


def test_autocast_of_the_forward_holds_in_a_borrowed_backward() -> None:
    a, b = matrices("cpu")

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.matmul(x, y).float()

    def detached(x: torch.Tensor, y: torch.Tensor, fallback: Any) -> torch.Tensor:
        return fallback(x, y).detach()

    expected = gradients(call, a, b)
    with override("aten::matmul", detached, device="cpu"):
        torch.testing.assert_close(gradients(call, a, b), expected)


def test_inference_mode_and_no_grad_take_the_override_too() -> None:
    a, b = matrices("cpu")
    with override("aten::matmul", lambda x, y: x * 0, device="cpu") as handle:
        with torch.inference_mode():
            assert not torch.matmul(a, b).any()
        with torch.no_grad():
            assert not torch.matmul(a.requires_grad_(), b).any()
    assert handle.hits == 2


def test_outputs_given_by_the_caller_have_no_gradient() -> None:
    a, b = matrices("cpu")
    out = torch.empty(8, 8)
    with override("aten::matmul", lambda x, y: x * 0, device="cpu"):
        assert not torch.matmul(a, b, out=out).any()
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.matmul(a.requires_grad_(), b, out=out)


def test_a_redefined_kernel_is_followed() -> None:
    def define(factor: float) -> Any:
        @tpu_kernel("override_test::scaled")
        def scaled(x: jax.Array) -> jax.Array:
            return x * factor

        return scaled

    x = torch.ones(4)
    with override("aten::relu", define(2.0), device="cpu"):
        assert (torch.relu(x) == 2).all()
        define(3.0)
        assert (torch.relu(x) == 3).all()


def test_an_operator_of_ours_counts_as_its_kernel() -> None:
    a, b = matrices("cpu")
    expected = gradients(torch.matmul, a, b)
    # A packet, an overload and the kernel are the same implementation; this one has no backward.
    packet = torch.ops.override_test.pallas_mm
    for impl in (packet, packet.default, pallas_mm):
        with override("aten::matmul", impl, device="cpu") as handle:
            found = gradients(torch.matmul, a, b)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert handle.impl_name == "override_test::pallas_mm"
        assert handle.where == str(pallas_mm.spec.source)


@tpu_kernel(
    "override_test::rms", reference=lambda x: F.rms_norm(x, x.shape[-1:]), backward="reference"
)
def rms(x: jax.Array) -> jax.Array:
    """Its reference is the operator that it is put in the place of."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.finfo(x.dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reference_that_calls_the_overridden_operator_means_the_original(device: str) -> None:
    x = torch.randn(4, 8).to(device)

    def call(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (8,))

    expected = gradients(call, x)
    with override("aten::rms_norm", lambda x, normalized_shape: rms(x), device=device) as handle:
        got = gradients(call, x)
    assert handle.hits == 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
