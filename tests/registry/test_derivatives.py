"""Gradients, tangents and batching of kernels, against torch's own operators and numerical
derivatives."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import tpu_kernels as tk

DEVICES = ["cpu", "tpu"]


@tk.tpu_kernel("derivatives::wave", int64="exact")
def wave(x: jax.Array, y: jax.Array, power: int = 2) -> jax.Array:
    return jnp.sin(x) * y**power


@tk.tpu_kernel("derivatives::wave_again", int64="exact", backward="recompute")
def wave_again(x: jax.Array, y: jax.Array, power: int = 2) -> jax.Array:
    return jnp.sin(x) * y**power


def torch_wave(x: torch.Tensor, y: torch.Tensor, power: int = 2) -> torch.Tensor:
    return torch.sin(x) * y**power


@pytest.mark.parametrize("kernel", [wave, wave_again])
def test_first_and_second_derivatives_are_numerically_right(kernel: Any) -> None:
    x, y = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(kernel, (x, y, 3))
    assert gradgradcheck(kernel, (x, y, 3))
    assert gradcheck(kernel, (x, y, 3), check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_equal_torchs(device: str, compiled: bool) -> None:
    torch._dynamo.reset()
    call = torch.compile(wave, backend="aot_eager", fullgraph=True) if compiled else wave
    grads = []
    for function in (call, torch_wave):
        generator = torch.Generator().manual_seed(0)
        x, y = (
            torch.randn(4, 5, generator=generator).to(device).requires_grad_() for _ in range(2)
        )
        function(x, y).square().sum().backward()
        grads.append((x.grad, y.grad))
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0][0].device.type == device


def test_transforms_of_torch_func() -> None:
    x, y = torch.randn(3), torch.randn(3)

    def loss(function: Any) -> Any:
        return lambda a: (function(a, y) ** 2).sum()

    close = torch.testing.assert_close
    close(torch.func.grad(loss(wave))(x), torch.func.grad(loss(torch_wave))(x))
    close(torch.func.hessian(loss(wave))(x), torch.func.hessian(loss(torch_wave))(x))
    tangent = torch.randn(3)
    close(
        torch.func.jvp(lambda a: wave(a, y), (x,), (tangent,)),
        torch.func.jvp(lambda a: torch_wave(a, y), (x,), (tangent,)),
    )
    batch = torch.randn(4, 3)
    close(
        torch.func.vmap(torch.func.grad(loss(wave)))(batch),
        torch.func.vmap(torch.func.grad(loss(torch_wave)))(batch),
    )


def test_vmap_is_one_launch_whatever_the_dims() -> None:
    x, y = torch.randn(4, 3), torch.randn(3)
    launches = wave.stats().launches
    result = torch.vmap(wave, in_dims=(0, None))(x, y)
    assert wave.stats().launches - launches == 1
    torch.testing.assert_close(result, torch_wave(x, y))
    torch.testing.assert_close(
        torch.vmap(wave, in_dims=(1, None), out_dims=1)(x.t(), y), torch_wave(x, y).t()
    )
    nested = torch.vmap(torch.vmap(wave, in_dims=(0, None)), in_dims=(0, None))(
        x.expand(2, 4, 3), y
    )
    torch.testing.assert_close(nested, torch_wave(x, y).expand(2, 4, 3))


def test_vmap_of_lists_and_optionals() -> None:
    @tk.tpu_kernel("derivatives::joined")
    def joined(
        xs: list[jax.Array], b: jax.Array | None = None
    ) -> tuple[jax.Array, list[jax.Array]]:
        total = jnp.concatenate(xs)
        return (total if b is None else total + b), [x * 2 for x in xs]

    a, b = torch.randn(5, 2), torch.randn(5, 3)
    total, doubled = torch.vmap(lambda u, v: joined([u, v]))(a, b)
    torch.testing.assert_close(total, torch.cat([a, b], 1))
    torch.testing.assert_close(doubled[1], 2 * b)
    leaf = a.clone().requires_grad_()
    joined([leaf, a])[1][0].sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full_like(a, 2.0))


def test_checkpoint_recomputes_to_the_same_gradient() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    checkpoint(lambda a: wave(a, y).sum(), x, use_reentrant=False).backward()
    expected = torch.cos(x.detach()) * y**2
    torch.testing.assert_close(x.grad, expected)


def test_integers_unused_outputs_and_inputs_without_gradient() -> None:
    @tk.tpu_kernel("derivatives::gather")
    def gather(
        x: jax.Array, w: jax.Array, index: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return x[index] * 2, x * w, index + 1

    index = torch.tensor([0, 2], dtype=torch.int32)
    x, w = torch.arange(3.0, requires_grad=True), torch.full((3,), 5.0)
    picked, _, shifted = gather(x, w, index)
    assert not shifted.requires_grad
    picked.sum().backward()
    assert x.grad.tolist() == [2.0, 0.0, 2.0]
    assert w.grad is None


def pallas_square(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * x_ref[...]

    return pl.pallas_call(body, grid=(1,), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("backward", ["jax", None])
def test_a_kernel_without_backward_says_so_at_backward(backward: str | None) -> None:
    kernel = tk.tpu_kernel(f"derivatives::square_{backward}", backward=backward)(pallas_square)
    x = torch.ones(8, 128, requires_grad=True)
    result = kernel(x)
    assert result.requires_grad
    with pytest.raises(tk.MissingBackwardError, match=f"derivatives::square_{backward}") as error:
        result.sum().backward()
    assert "@kernel.backward" in str(error.value)


def test_backward_by_the_reference_and_by_hand() -> None:
    by_reference = tk.tpu_kernel(
        "derivatives::square_ref", backward="reference", reference=lambda x: x * x
    )(pallas_square)
    by_hand = tk.tpu_kernel("derivatives::square_hand")(pallas_square)
    seen: dict[str, Any] = {}

    @by_hand.backward
    def backward(
        grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor, needs_input_grad: Any
    ) -> dict[str, Any]:
        seen.update(out=out, needs=needs_input_grad)
        return {"x": 2 * x * grad}

    for kernel in (by_reference, by_hand):
        x = torch.randn(8, 128, requires_grad=True)
        kernel(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())
    assert seen["needs"] == {"x": True}
    torch.testing.assert_close(seen["out"], x.detach() ** 2)
    x = torch.randn(8, 128, requires_grad=True)
    (grad,) = torch.autograd.grad(by_hand(x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0], torch.full_like(x, 2.0))


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (lambda x: {"x": x[:1]}, r"'x' has shape \(1,\), expected \(3,\)"),
        (lambda x: {"x": x.double()}, "'x' is torch.float64, expected torch.float32"),
        (lambda x: {"z": x}, "'z', which is no tensor input"),
        (lambda x: [x], "must return a dict"),
    ],
)
def test_wrong_gradients_of_a_users_backward_are_errors(gradient: Any, words: str) -> None:
    @tk.tpu_kernel("derivatives::doubled")
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    doubled.backward(lambda grad, x: gradient(grad))
    with pytest.raises(tk.GradientError, match=words):
        doubled(torch.ones(3, requires_grad=True)).sum().backward()


def test_a_backward_that_asks_for_an_unknown_input_is_refused_at_once() -> None:
    with pytest.raises(tk.GradientError, match="'nothing', which is not an input"):
        wave.backward(lambda grad, nothing: {})


def test_custom_vjp_is_honoured() -> None:
    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return x

    clipped.defvjp(lambda x: (x, None), lambda residual, g: (jnp.clip(g, -1, 1),))

    @tk.tpu_kernel("derivatives::clipped")
    def kernel(x: jax.Array) -> jax.Array:
        return clipped(x)

    x = torch.ones(2, requires_grad=True)
    (kernel(x) * torch.tensor([5.0, 0.5])).sum().backward()
    assert x.grad.tolist() == [1.0, 0.5]


def test_context_style_backward_as_in_torch_library() -> None:
    @tk.tpu_kernel("derivatives::cubed")
    def cubed(x: jax.Array) -> jax.Array:
        return x**3

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad

    cubed.register_autograd(backward, setup_context=setup)
    x = torch.full((2,), 2.0, requires_grad=True)
    cubed(x).sum().backward()
    assert x.grad.tolist() == [12.0, 12.0]


@tk.tpu_kernel("derivatives::complex_wave", int64="exact")
def complex_wave(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sin(x) * y


def test_complex_gradients_follow_torchs_convention() -> None:
    x, y = (torch.randn(2, dtype=torch.complex128, requires_grad=True) for _ in range(2))
    assert gradcheck(complex_wave, (x, y), check_forward_ad=True)
    assert gradgradcheck(complex_wave, (x, y))
    real = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(complex_wave, (real, y))

    @tk.tpu_kernel("derivatives::magnitude", int64="exact")
    def magnitude(x: jax.Array) -> jax.Array:
        return jnp.abs(x)

    assert gradcheck(magnitude, (x,), check_forward_ad=True)
    z = torch.randn(2, dtype=torch.complex128)
    ours = torch.func.grad(lambda a: complex_wave(a, z).abs().sum())(z)
    torch.testing.assert_close(ours, torch.func.grad(lambda a: (a.sin() * z).abs().sum())(z))


@tk.tpu_kernel("derivatives::scaled", mutates_args=("a",), int64="exact")
def scaled(a: jax.Array, r: jax.Array) -> jax.Array:
    return jnp.sin(r) * a, {"a": a * a * r}  # type: ignore[return-value]


def torch_scaled(a: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    old = a.clone()
    a.copy_(old * old * r)
    return torch.sin(r) * old


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_flow_through_mutated_arguments(
    backend: str | None, needs: tuple[bool, bool]
) -> None:
    def loss(function: Any) -> Any:
        def of(start: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            a = start * 1
            first = function(a, r)
            second = function(a, r)
            return (first + second * a).sum()

        return of

    found = []
    for function in (scaled, torch_scaled):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(3, generator=generator).requires_grad_(need) for need in needs]
        call = loss(function)
        if backend is not None:
            torch._dynamo.reset()
            call = torch.compile(call, backend=backend, fullgraph=True)
        call(*inputs).backward()
        found.append([x.grad for x in inputs])
    torch.testing.assert_close(found[0], found[1])


def test_forward_mode_through_mutated_arguments() -> None:
    def of(function: Any) -> Any:
        def run(start: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            a = start * 1
            return function(a, r) + a

        return run

    a, r = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(of(scaled), (a, r), check_forward_ad=True)
    assert gradcheck(of(torch_scaled), (a, r), check_forward_ad=True)


def test_writes_that_autograd_cannot_record_are_refused_before_they_happen() -> None:
    leaf, r = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(tk.ArgumentError, match="'a' is written to, but it is a leaf"):
        scaled(leaf, r)
    memory = torch.ones(2, 3)
    with pytest.raises(tk.ArgumentError, match="'a' is written to, but it is a view"):
        scaled(memory[0], r)
    assert leaf.tolist() == [1.0] * 3
    assert memory.tolist() == [[1.0] * 3] * 2
    with torch.no_grad():
        scaled(memory[0], r)


def test_whether_there_is_a_derivative_may_depend_on_sizes_and_failures_are_not_kept() -> None:
    broken = [True]

    @tk.tpu_kernel("derivatives::by_size")
    def by_size(x: jax.Array) -> jax.Array:
        if broken:
            raise ValueError("not now")
        return pallas_square(x) if x.shape[0] >= 8 else x * x

    small, large = (torch.ones(n, 128, requires_grad=True) for n in (4, 8))
    with pytest.raises(tk.TraceError, match="not now"):
        by_size(small)
    broken.clear()
    with pytest.raises(tk.MissingBackwardError):
        by_size(large).sum().backward()
    by_size(small).sum().backward()
    assert float(small.grad.sum()) == 2 * 4 * 128


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_and_gradients_of_keyword_only_tensors(dim: int) -> None:
    @tk.tpu_kernel("derivatives::keywords")
    def keywords(x: jax.Array, n: int = 1, *, y: jax.Array, b: float = 2.0) -> jax.Array:
        return x * y * n * b

    x, y = torch.randn(3), torch.randn(4, 3)
    batched = y if dim == 0 else y.t()
    run = torch.vmap(lambda a, b: keywords(a, 2, y=b), in_dims=(None, dim))
    torch.testing.assert_close(run(x, batched), x * y * 4)
    leaf = y.clone().requires_grad_()
    keywords(x, y=leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, (2 * x).expand(4, 3))
    grad = torch.func.vmap(torch.func.grad(lambda b: keywords(x, y=b).sum()))(y)
    torch.testing.assert_close(grad, (2 * x).expand(4, 3))


def test_one_backward_may_run_in_many_threads() -> None:
    x, y = torch.randn(16, requires_grad=True), torch.randn(16)
    loss = wave(x, y).sum()
    expected = torch.cos(x.detach()) * y**2
    wrong: list[Any] = []

    def run() -> None:
        for _ in range(20):
            try:
                (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
                torch.testing.assert_close(grad, expected)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_integer_results_have_no_tangent_in_forward_mode() -> None:
    @tk.tpu_kernel("derivatives::best")
    def best(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 2 * x, jnp.argmax(x)

    x = torch.randn(3)
    jacobian = torch.func.jacfwd(lambda t: best(t)[0])(x)
    torch.testing.assert_close(jacobian, 2 * torch.eye(3))
    assert torch.func.jvp(best, (x,), (torch.ones(3),))[1][1].sum() == 0
