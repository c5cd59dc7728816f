"""Kernels under the settings of torch and JAX, in threads, after interrupts, under collection."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpu_kernels as tk


@tk.tpu_kernel("surroundings::wave", dynamic_args=("shift",))
def wave(x: jax.Array, shift: float = 0.5) -> jax.Array:
    return jnp.sin(x) * x + shift


def expected(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x + 0.5


@contextlib.contextmanager
def switched(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def global_of_torch(setter: Callable[[Any], None], value: Any, normal: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(normal)


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "jax.disable_jit": jax.disable_jit,
    "jax.enable_x64": lambda: jax.enable_x64(True),
    "jax_enable_x64": lambda: switched("jax_enable_x64", True),
    "jax.default_device": lambda: jax.default_device("cpu"),
    "jax_debug_nans": lambda: switched("jax_debug_nans", True),
    "jax_check_tracer_leaks": lambda: switched("jax_check_tracer_leaks", True),
    "jax_numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_numpy_rank_promotion": lambda: jax.numpy_rank_promotion("warn"),
    "jax.default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "torch device meta": lambda: torch.device("meta"),
    "torch device tpu": lambda: torch.device("tpu"),
    "set_default_device": lambda: global_of_torch(torch.set_default_device, "meta", None),
    "set_default_dtype": lambda: global_of_torch(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "deterministic": lambda: global_of_torch(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_call_is_the_same_under_every_setting(scope: str) -> None:
    size = 3 + sorted(SCOPES).index(scope)  # a first call inside, further ones outside
    data = torch.linspace(-1, 1, size, device="cpu", dtype=torch.float32)
    with SCOPES[scope]():
        x = data.clone().requires_grad_()
        y = wave(x)
        y.sum().backward()
        faked = torch._subclasses.FakeTensorMode()
        with faked:
            fake = wave(faked.from_tensor(data))
    assert (y.dtype, y.device.type, fake.dtype, fake.device) == (
        torch.float32,
        "cpu",
        torch.float32,
        y.device,
    )
    torch.testing.assert_close(y, expected(data))
    torch.testing.assert_close(x.grad, torch.cos(data) * data + torch.sin(data))
    torch.testing.assert_close(wave(data), expected(data))


def test_inference_mode_makes_and_takes_inference_tensors() -> None:
    with torch.inference_mode():
        made = wave(torch.ones(40))
    assert made.is_inference()
    torch.testing.assert_close(wave(made), expected(made.clone()))
    x = torch.ones(40, requires_grad=True)
    wave(x).sum().backward()
    assert x.grad is not None


def in_threads(count: int, work: Callable[[int], Any]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_backward_of_one_graph_and_of_many_from_sixteen_threads() -> None:
    x = torch.ones(41, requires_grad=True)
    one, many = wave(x).sum(), [wave(x).sum() for _ in range(16)]
    in_threads(16, lambda i: (one.backward(retain_graph=True), many[i].backward()))
    assert x.grad is not None
    torch.testing.assert_close(
        x.grad, torch.full((41,), 32 * float(torch.sin(torch.ones(())) + torch.cos(torch.ones(()))))
    )


def test_first_calls_and_definitions_from_sixteen_threads() -> None:
    @tk.tpu_kernel("surroundings::first")
    def first(x: jax.Array) -> jax.Array:
        return jnp.exp(x) @ x.T

    def work(index: int) -> None:
        first(torch.ones(8, 8, requires_grad=True)).sum().backward()
        first(torch.ones(3 + index % 4, 4))
        own = tk.tpu_kernel(f"surroundings::own{index}")(lambda_of(index))
        assert float(own(torch.zeros(1))) == index

    in_threads(16, work)
    stats = first.stats()
    assert stats.kernel_compilations + stats.disk_cache_hits == 2 + 4


def lambda_of(index: int) -> Callable[..., Any]:
    def add(x: jax.Array) -> jax.Array:
        return x + index

    return add


def test_an_interrupt_while_tracing_leaves_a_kernel_that_works() -> None:
    interrupting = [True]

    @tk.tpu_kernel("surroundings::interrupted")
    def interrupted(x: jax.Array) -> jax.Array:
        if interrupting[0]:
            raise KeyboardInterrupt
        return x * 2

    x = torch.ones(2, requires_grad=True)
    for argument in (x.detach(), x):
        interrupting[0] = True
        with pytest.raises(KeyboardInterrupt):
            interrupted(argument)
        interrupting[0] = False
        assert interrupted(argument).tolist() == [2.0, 2.0]
    interrupted(x).sum().backward()
    assert x.grad is not None


def test_an_error_while_tracing_names_the_line_and_passes() -> None:
    broken = [True]

    @tk.tpu_kernel("surroundings::broken")
    def fragile(x: jax.Array) -> jax.Array:
        if broken[0]:
            raise ValueError("out of order")
        return x + 1

    call = torch.compile(lambda t: fragile(t) * 2, backend="aot_eager", fullgraph=True)
    for function in (fragile, fragile, call):
        broken[0] = True
        with pytest.raises(Exception, match="out of order") as caught:
            function(torch.ones(2))
        assert 'raise ValueError("out of order")' in str(caught.value)
    broken[0] = False
    assert fragile(torch.ones(2)).tolist() == [2.0, 2.0]
    assert call(torch.ones(2)).tolist() == [4.0, 4.0]


def test_collection_during_calls_and_lifetimes_of_tensors() -> None:
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        x = torch.ones(42, requires_grad=True)
        y = wave(x)
        y.sum().backward()
    finally:
        gc.set_threshold(*before)
    alive = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [r() for r in alive] == [None, None]
    for i in range(200):  # ids are used again
        t = torch.full((43,), float(i))
        assert torch.equal(wave(t), wave(t.clone()))


def test_new_tensors_and_replaced_kernels_leave_nothing_behind() -> None:
    def define(value: int) -> Any:
        @tk.tpu_kernel("surroundings::again")
        def again(x: jax.Array) -> jax.Array:
            return x + value

        return again

    kernels = []
    for i in range(30):
        kernel = define(i)
        kernels.append(weakref.ref(kernel))
        if i % 10 == 0:
            x = torch.zeros(1, requires_grad=True)
            kernel(x).sum().backward()
            del x
    del kernel
    gc.collect()
    assert [i for i, k in enumerate(kernels) if k() is not None] == [29]
    assert float(torch.ops.surroundings.again(torch.zeros(1))) == 29


def test_copies_closures_and_coroutines() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = wave
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kernel(x * self.weight)

    model = Model()
    twin = copy.deepcopy(model)
    assert twin.kernel is wave
    twin(torch.ones(3)).sum().backward()
    assert model.weight.grad is None
    assert twin.weight.grad is not None
    bound = pickle.loads(pickle.dumps(functools.partial(wave, torch.ones(3))))
    assert torch.equal(bound(), wave(torch.ones(3)))

    async def call(i: int) -> torch.Tensor:
        await asyncio.sleep(0)
        return wave(torch.ones(44 + i % 3))

    async def everything() -> None:
        results = await asyncio.gather(*map(call, range(12)))
        others = await asyncio.gather(
            *(asyncio.to_thread(wave, torch.ones(44 + i % 3)) for i in range(12))
        )
        assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))

    asyncio.run(everything())
