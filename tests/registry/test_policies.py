"""Donation, autocast, FLOP counting and profiler names of kernels."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import tpu_kernels as tk

DEVICES = ["cpu", "tpu"]


@tk.tpu_kernel("policies::donating", donate_args=("a",))
def donating(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


BASE = torch.arange(64.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: donating(t, t), "'a' is donated, but it shares its memory with argument 'a'"),
        (
            lambda t: donating(t[:32], torch.ones(32, device=t.device)),
            "'a' is donated, but it is a view",
        ),
        (
            lambda t: donating(t, t.view(8, 8).view(-1)),
            "'a' is donated, but it shares its memory with argument 'b'",
        ),
        (
            lambda t: donating(t.clone().requires_grad_(), t),
            "'a' is donated, but an argument requires a gradient",
        ),
    ],
)
def test_unsafe_donation_is_refused_before_the_launch(
    device: str, call: Callable[[torch.Tensor], object], words: str
) -> None:
    tensor = BASE.to(device).clone()
    with pytest.raises(tk.ArgumentError) as error:
        call(tensor)
    assert words in str(error.value)
    assert torch.equal(tensor.cpu(), BASE)


@pytest.mark.parametrize("device", DEVICES)
def test_a_donated_tensor_is_dead_and_says_who_took_it(device: str) -> None:
    tensor, other = BASE.to(device).clone(), torch.ones(64, device=device)
    assert torch.equal(donating(tensor, other).cpu(), BASE + 1)
    for use in (
        lambda: tensor.sum(),
        lambda: other + tensor,
        lambda: tensor.shape,
        lambda: donating(tensor, other),
    ):
        with pytest.raises(RuntimeError, match="tensor 'a' was donated to policies::donating"):
            use()
    assert "donated" in repr(tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", [torch.bfloat16, "autocast"])
def test_autocast_casts_floating_inputs_in_eager_and_compiled(
    device: str, policy: torch.dtype | str
) -> None:
    torch._dynamo.reset()
    name = "match" if policy == "autocast" else "fixed"

    @tk.tpu_kernel(f"policies::autocast_{name}_{device}", autocast=policy)
    def product(x: jax.Array, index: jax.Array) -> jax.Array:
        return x * index

    x, index = torch.randn(4, device=device), torch.ones(4, dtype=torch.int32, device=device)
    assert product(x, index).dtype is torch.float32
    for call in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert call(x, index).dtype is torch.bfloat16
        assert call(x, index).dtype is torch.float32
    leaf = x.clone().requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        product(leaf, index).sum().backward()
    assert leaf.grad.dtype is torch.float32


def test_unknown_autocast_policies_are_refused() -> None:
    def f(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(tk.SignatureError, match=r"autocast=torch.int8 is no autocast policy"):
        tk.tpu_kernel("policies::bad_autocast", autocast=torch.int8)(f)


def test_flops_are_counted_forward_and_backward() -> None:
    @tk.tpu_kernel("policies::product", flops=lambda x, y: 2 * x[0] * x[1] * y[1])
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.dot(x, y)

    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(8, 16)
    with FlopCounterMode(display=False) as counter:
        result = product(x, y)
    assert counter.get_total_flops() == 2 * 4 * 8 * 16
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 16


def test_profiles_show_the_kernel_by_name() -> None:
    with profile() as recorded:
        donating(torch.ones(2), torch.ones(2))
    assert "policies::donating" in {event.name for event in recorded.events()}


@pytest.mark.parametrize("device", DEVICES)
def test_donated_memory_is_free_while_the_dead_tensor_lives(device: str) -> None:
    tensor = torch.ones(64, device=device)
    memory = StorageWeakRef(tensor.untyped_storage())
    donating(tensor, torch.ones(64, device=device))
    assert memory.expired()
    assert "donated" in repr(tensor)


def test_autocast_reaches_kernels_under_vmap_as_it_reaches_torchs_operators() -> None:
    @tk.tpu_kernel("policies::autocast_vmap")
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    x, xs = torch.ones(4, 4), torch.ones(2, 3, 4, 4)

    def dtypes_under_vmap() -> list[torch.dtype]:
        seen = []

        def call(t: torch.Tensor) -> torch.Tensor:
            seen.append((result := product(t, x)).dtype)
            return result

        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(torch.vmap(call)(xs[0]).dtype)
            seen.append(torch.vmap(torch.vmap(call))(xs).dtype)
            torch.vmap(torch.func.grad(lambda t: call(t).float().sum()))(xs[0])
        return seen

    assert set(dtypes_under_vmap()) == {torch.float32}
    product.register_autocast("cpu", torch.bfloat16)  # batched operators exist already
    assert set(dtypes_under_vmap()) == {torch.bfloat16}
    assert torch.vmap(product, (0, None))(xs[0], x).dtype is torch.float32
