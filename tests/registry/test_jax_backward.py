"""Backwards that a user writes in JAX: operators of their own, differentiable and compiled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch._dynamo.exc import BackendCompilerFailed
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import tpu_kernels as tk

DEVICES = ["cpu", "tpu"]
BACKENDS = [None, "aot_eager", "tpu"]


def called(function: Any, backend: str | None) -> Any:
    torch._dynamo.reset()
    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


@tk.tpu_kernel("jaxback::wave", int64="exact", flops=lambda x, y, *power: 3 * x[0])
def wave(x: jax.Array, y: jax.Array, power: int = 2) -> jax.Array:
    return jnp.sin(x) * y**power


@wave.backward
def wave_backward(
    grad: jax.Array, x: jax.Array, y: jax.Array, power: int, needs_input_grad: dict[str, bool]
) -> dict[str, jax.Array]:
    gradients = {"y": grad * jnp.sin(x) * power * y ** (power - 1)}
    if needs_input_grad["x"]:
        gradients["x"] = grad * jnp.cos(x) * y**power
    return gradients


def torch_wave(x: torch.Tensor, y: torch.Tensor, power: int = 2) -> torch.Tensor:
    return torch.sin(x) * y**power


def test_first_and_second_derivatives_are_numerically_right() -> None:
    x, y = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(wave, (x, y, 3))
    assert gradgradcheck(wave, (x, y, 3))
    assert gradcheck(wave, (x.detach(), y, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_torchs(device: str, backend: str | None) -> None:
    grads = []
    for function in (called(wave, backend), torch_wave):
        generator = torch.Generator().manual_seed(0)
        x, y = (
            torch.randn(4, 5, generator=generator).to(device).requires_grad_() for _ in range(2)
        )
        function(x, y).square().sum().backward()
        grads.append((x.grad, y.grad))
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0][0].device.type == device


def test_one_graph_for_all_sizes_holds_forward_and_backward() -> None:
    graphs: list[str] = []

    def record(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return make_boxed_func(gm.forward)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    compiled = torch.compile(
        wave, backend=aot_autograd(fw_compiler=record), dynamic=True, fullgraph=True
    )
    for size in (3, 4, 7):
        x, y = (torch.randn(size, 2, requires_grad=True) for _ in range(2))
        compiled(x, y).sum().backward()
        torch.testing.assert_close(x.grad, (x.cos() * y**2).detach())
    assert graphs.count("jaxback.wave.default") == 1
    assert graphs.count("jaxback.wave__bwd.default") == 1


def test_transforms_of_torch_func() -> None:
    x, y = torch.randn(3), torch.randn(3)

    def loss(function: Any) -> Any:
        return lambda a: (function(a, y) ** 2).sum()

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(loss(wave))(x), transform(loss(torch_wave))(x))
    batch = torch.randn(4, 3)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(loss(wave)))(batch),
        torch.func.vmap(torch.func.grad(loss(torch_wave)))(batch),
    )
    tangent = torch.randn(3)
    torch.testing.assert_close(
        torch.func.jvp(lambda a: wave(a, y), (x,), (tangent,)),
        torch.func.jvp(lambda a: torch_wave(a, y), (x,), (tangent,)),
    )


def test_flops_of_the_backward_are_counted() -> None:
    x, y = (torch.randn(5, requires_grad=True) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        wave(x, y).sum().backward()
    assert counter.get_total_flops() == 3 * 5 * 3


@tk.tpu_kernel("jaxback::mixed", dynamic_args=("scale",))
def mixed(
    xs: list[jax.Array | None],
    index: jax.Array,
    bias: jax.Array | None = None,
    scale: float = 2.0,
) -> tuple[jax.Array, tuple[jax.Array | None, list[jax.Array]], jax.Array]:
    present = [x for x in xs if x is not None]
    total = sum(present[1:], present[0])[index] * scale
    return total, (None if bias is None else total * bias, [x * x for x in present]), index + 1


@mixed.backward
def mixed_backward(
    grad: tuple[jax.Array, ...],
    xs: Any,
    index: Any,
    bias: Any,
    scale: Any,
    out: Any,
    needs_input_grad: Any,
    interpret: Any,
) -> dict[str, Any]:
    assert interpret is True
    assert needs_input_grad["index"] is False
    assert isinstance(needs_input_grad["xs"], tuple)
    total, _, squares, following = out
    assert isinstance(squares, list)
    assert following.dtype == jnp.int32
    first, *rest = grad
    gradients: dict[str, Any] = {}
    if bias is not None:
        with_bias_grad, *rest = rest
        gradients["bias"] = with_bias_grad * total
        first = first + with_bias_grad * bias
    *square_grads, of_integers = rest
    assert of_integers.shape == following.shape
    items: list[Any] = []
    grads = iter(square_grads)
    for x in xs:
        if x is None:
            items.append(None)
        else:
            items.append(jnp.zeros_like(x).at[index].add(first * scale) + 2 * x * next(grads))
    return {**gradients, "xs": items}


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", None), ("cpu", "aot_eager"), ("tpu", None), ("tpu", "tpu")]
)
@pytest.mark.parametrize(("with_bias", "used"), [(True, "all"), (True, "total"), (False, "square")])
def test_lists_holes_optionals_integers_and_several_outputs(
    device: str, backend: str | None, with_bias: bool, used: str
) -> None:
    def run(function: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        a, b, bias = (
            torch.randn(*shape, generator=generator).to(device).requires_grad_()
            for shape in ((4, 3), (4, 3), (2, 3))
        )
        frozen = torch.randn(4, 3, generator=generator).to(device)
        index = torch.tensor([3, 1], dtype=torch.int32, device=device)
        total, (with_, squares), _ = function(
            [a, None, frozen, b], index, bias if with_bias else None, 3.0
        )
        parts = [total.sum(), squares[2].square().sum()]
        if with_ is not None:
            parts.append(with_.square().sum())
        loss = sum(parts[1:], parts[0]) if used == "all" else parts[used == "square"]
        loss.backward()
        return [x.grad for x in (a, b, bias, frozen)]

    def reference(xs: Any, index: Any, bias: Any, scale: float) -> Any:
        present = [x for x in xs if x is not None]
        total = sum(present[1:], present[0])[index.long()] * scale
        return total, (None if bias is None else total * bias, [x * x for x in present]), index + 1

    got, expected = run(called(mixed, backend)), run(reference)
    for g, e in zip(got, expected, strict=True):
        if e is None:
            assert g is None or not g.any()
        else:
            torch.testing.assert_close(g, e)


def _double(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def pallas_double(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("device", DEVICES)
def test_pallas_backwards_and_what_they_cannot(device: str) -> None:
    kernel = tk.tpu_kernel("jaxback::pallas")(pallas_double)

    @kernel.backward
    def backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        return pallas_double(grad * jnp.ones_like(x) + 0 * x)

    x = torch.randn(8, 128, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(kernel(x).sum(), x, create_graph=True)
    assert (grad == 2).all()
    with pytest.raises(tk.MissingBackwardError, match="its derivative 'jaxback::pallas__bwd'") as e:
        grad.sum().backward()
    assert e.value.where is not None
    assert e.value.where.endswith(f":{backward.__code__.co_firstlineno}")


def test_a_gradient_that_is_left_out_is_none() -> None:
    @tk.tpu_kernel("jaxback::partial")
    def kernel(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    @kernel.backward
    def backward(grad: jax.Array) -> dict[str, jax.Array]:
        return {"x": grad}

    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    kernel(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is None


def plain_double(x: jax.Array, ys: list[jax.Array]) -> jax.Array:
    return 2 * x + sum(ys)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        (lambda g: {"x": g[:1]}, r"gradient of 'x' has shape \(1,\), expected \(3,\)"),
        (lambda g: {"x": g[None]}, r"gradient of 'x' has shape \(1, 3\), expected \(3,\)"),
        (lambda g: {"x": 1.0}, r"gradient of 'x' has shape float, expected \(3,\)"),
        (lambda g: {"x": g.astype(jnp.bfloat16)}, "'x' is bfloat16, expected float32"),
        (lambda g: {"x": g, "z": g}, "'z', which is no tensor input"),
        (lambda g: {"x": g, "ys": [g]}, "gradient of 'ys' has 1 entries for 2 tensors"),
        (lambda g: {"x": g, "ys": g}, "gradient of 'ys' has no entries for 2 tensors"),
        (lambda g: {"x": g, "ys": [g, g[:2]]}, r"gradient of 'ys\[1\]' has shape \(2,\)"),
        (lambda g: (g, [g, g], g), "for each of x, ys; got 3 gradients"),
        (lambda g: [g], "must return a dict"),
        (lambda g: None, "got NoneType"),
    ],
)
def test_wrong_gradients_are_errors_that_name_the_backward(
    gradients: Any, words: str, backend: str | None
) -> None:
    kernel = tk.tpu_kernel("jaxback::wrong")(plain_double)

    @kernel.backward
    def wrong(grad: jax.Array) -> Any:
        return gradients(grad)

    x, a, b = (torch.ones(3, requires_grad=True) for _ in range(3))
    # While a graph is compiled torch wraps what a backend raises, and keeps the text.
    expected = tk.GradientError if backend is None else BackendCompilerFailed
    with pytest.raises(expected, match=words) as error:
        called(kernel, backend)(x, [a, b]).sum().backward()
    assert "kernel 'jaxback::wrong'" in str(error.value)
    assert f"at {__file__}:{wrong.__code__.co_firstlineno}\n" in f"{error.value}\n"


def test_errors_of_the_backwards_own_code_show_its_line() -> None:
    kernel = tk.tpu_kernel("jaxback::raising")(plain_double)

    @kernel.backward
    def raising(grad: jax.Array, x: jax.Array) -> Any:
        return {"x": grad.reshape(17)}

    with pytest.raises(tk.TraceError, match="jaxback::raising") as error:
        kernel(torch.ones(3, requires_grad=True), [torch.ones(3)]).sum().backward()
    assert error.value.where == f"{__file__}:{raising.__code__.co_firstlineno + 2}"


def _nothing() -> dict[str, Any]:
    return {}


def test_a_backward_that_cannot_be_called_is_refused_and_the_old_one_stays() -> None:
    with pytest.raises(tk.GradientError, match="'nothing', which is not an input"):

        @wave.backward
        def one(grad: jax.Array, nothing: jax.Array) -> Any: ...

    with pytest.raises(tk.GradientError, match="takes no gradient"):
        wave.backward(_nothing, language="jax")
    with pytest.raises(tk.GradientError, match="no function that can be read"):
        wave.backward(dict)
    with pytest.raises(tk.GradientError, match="no backward is written in 'numpy'"):
        wave.backward(lambda grad: {}, language="numpy")
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    wave(x, y).sum().backward()
    assert y.grad is not None


def _scaled(grad: Any, factor: float) -> Any:
    return {"x": jnp.multiply(grad, factor)}


def _untyped(grad, x):  # type: ignore[no-untyped-def]
    return {"x": jnp.multiply(grad, 5)}


@pytest.mark.parametrize(
    ("backward", "options", "expected"),
    [
        (jax.jit(_untyped), {}, 5),
        (_untyped, {"language": "jax"}, 5),
        (functools.partial(_scaled, factor=7.0), {"language": "jax"}, 7),
        (lambda grad, x: {"x": torch.mul(grad, 3)}, {}, 3),
    ],
)
def test_the_language_is_said_or_seen(backward: Any, options: Any, expected: int) -> None:
    kernel = tk.tpu_kernel("jaxback::language")(pallas_double)
    assert kernel.backward(backward, **options) is backward
    x = torch.ones(8, 128, requires_grad=True)
    kernel(x).sum().backward()
    assert (x.grad == expected).all()


def test_a_torch_function_that_returns_arrays_is_told_how_to_say_so() -> None:
    kernel = tk.tpu_kernel("jaxback::unsaid")(pallas_double)
    kernel.backward(lambda grad, x: {"x": jnp.ones((8, 128))})
    with pytest.raises(tk.GradientError, match=r"(?s)expected a tensor.*language='jax'"):
        kernel(torch.ones(8, 128, requires_grad=True)).sum().backward()


def test_another_kernel_is_a_backward() -> None:
    @tk.tpu_kernel("jaxback::product")
    def product(x: jax.Array, y: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * y * scale

    @product.backward
    @tk.tpu_kernel("jaxback::product_backward")
    def product_backward(
        grad: jax.Array, x: jax.Array, y: jax.Array, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        return grad * y * scale, grad * x * scale

    launches = product_backward.stats().launches
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    product(x, y, 3.0).sum().backward()
    torch.testing.assert_close(x.grad, 3 * y.detach())
    torch.testing.assert_close(y.grad, 3 * x.detach())
    assert product_backward.stats().launches == launches + 1


def test_a_later_backward_replaces_an_earlier_one_of_any_kind() -> None:
    kernel = tk.tpu_kernel("jaxback::again", flops=lambda x: 1)(lambda_double)
    x = torch.ones(2, requires_grad=True)

    def gradient() -> float:
        (grad,) = torch.autograd.grad(kernel(x).sum(), x)
        return float(grad[0])

    assert gradient() == 2  # by jax.vjp
    kernel.backward(lambda grad: {"x": grad * 10}, language="jax")
    assert gradient() == 10
    kernel.backward(lambda grad: {"x": grad * 11}, language="jax")
    assert gradient() == 11
    kernel.backward(lambda grad: {"x": grad * 12})
    assert gradient() == 12
    kernel.backward(lambda grad: {"x": grad * 13}, language="jax")
    assert gradient() == 13


def lambda_double(x: jax.Array) -> jax.Array:
    return x * 2


def test_written_arguments_and_complex_numbers() -> None:
    @tk.tpu_kernel("jaxback::accumulate", mutates_args=("state",))
    def accumulate(state: jax.Array, x: jax.Array) -> jax.Array:
        return x * 2, {"state": state + x * x}  # type: ignore[return-value]

    @accumulate.backward
    def backward(grad: Sequence[jax.Array], x: jax.Array) -> Any:
        return {"state": grad[1], "x": 2 * grad[0] + 2 * x * grad[1]}

    start, x = (torch.randn(3, requires_grad=True) for _ in range(2))
    state = start * 1
    out = accumulate(state, x)
    (out.sum() + (state * 3).sum()).backward()
    torch.testing.assert_close(start.grad, torch.full((3,), 3.0))
    torch.testing.assert_close(x.grad, 2 + 6 * x.detach())

    @tk.tpu_kernel("jaxback::rotate", int64="exact")
    def rotate(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    @rotate.backward
    def rotate_backward(grad: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return grad * y.conj(), grad * x.conj()  # torch's convention

    a, b = (torch.randn(3, dtype=torch.complex128, requires_grad=True) for _ in range(2))
    assert gradcheck(rotate, (a, b))
    assert gradgradcheck(rotate, (a, b))


def test_the_kernels_configuration_reaches_its_backward() -> None:
    @tk.tpu_kernel("jaxback::tuned", configs={"block": [4, 8]})
    def tuned(x: jax.Array, *, block: int = 4) -> jax.Array:
        return x * block

    @tuned.backward
    def backward(grad: jax.Array, block: int) -> Any:
        return {"x": grad * block}

    for config in ({}, {"block": 8}):
        x = torch.ones(3, requires_grad=True)
        out = tuned(x, **config)
        out.sum().backward()
        torch.testing.assert_close(x.grad, out.detach())


def test_opcheck_and_checkpointing() -> None:
    x, y = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    torch.library.opcheck(wave.op, (x, y, 3))
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.jaxback.wave__bwd.default, (x.detach(), y, 3, [x.detach()], [True, False])
        )
    out = torch.utils.checkpoint.checkpoint(wave, x, y, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(x.grad, (x.cos() * y**2).detach())
