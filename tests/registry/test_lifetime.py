"""Names, redefinition, mutation, 64-bit policies, symbolic shapes, threads and pickling of
kernels."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpu_kernels as tk

CELL = """
import jax
@tk.tpu_kernel("lifetime::{name}")
def cell(x: jax.Array{extra}) -> jax.Array:
    return x + {value}
"""


def run_cell(
    namespace: dict[str, Any], value: int, extra: str = "", file: str = "<cell>", name: str = "cell"
) -> None:
    exec(compile(CELL.format(value=value, extra=extra, name=name), file, "exec"), namespace)


def test_running_a_cell_again_replaces_the_kernel_everywhere() -> None:
    namespace: dict[str, Any] = {"tk": tk, "__name__": "__main__"}
    x = torch.zeros(1)
    run_cell(namespace, 1)
    old = namespace["cell"]
    compiled = torch.compile(lambda t: namespace["cell"](t), backend="aot_eager", fullgraph=True)
    assert float(compiled(x)) == 1
    run_cell(namespace, 2)
    assert (
        float(namespace["cell"](x)) == float(torch.ops.lifetime.cell(x)) == float(compiled(x)) == 2
    )
    run_cell(namespace, 3, ", s: float = 1.0")
    assert float(torch.ops.lifetime.cell(x, 5.0)) == float(compiled(x)) == 3
    with pytest.raises(tk.SignatureError, match="NoSuchType"):
        run_cell(namespace, 4, ", s: NoSuchType")
    assert float(torch.ops.lifetime.cell(x)) == 3
    with pytest.raises(tk.KernelError, match="was replaced by a later definition"):
        old(x)


def test_a_clash_between_two_places_names_both() -> None:
    run_cell({"tk": tk, "__name__": "first"}, 1, file="first.py", name="clash")
    with pytest.raises(tk.NameClashError) as error:
        run_cell({"tk": tk, "__name__": "second"}, 2, file="second.py", name="clash")
    assert "first.py:3" in str(error.value)
    assert "second.py:3" in str(error.value)
    torch.library.define("lifetime::foreign", "(Tensor x) -> Tensor")
    with pytest.raises(tk.NameClashError, match="was not defined by tpu_kernels"):
        tk.tpu_kernel("lifetime::foreign")(plus_one)


def plus_one(x: jax.Array) -> jax.Array:
    return x + 1


def test_bare_decorator_uses_the_functions_name() -> None:
    kernel = tk.tpu_kernel(plus_one)
    assert kernel.name == "tpu::plus_one"
    assert float(torch.ops.tpu.plus_one(torch.zeros(1))) == 1.0


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_mutated_arguments_are_written_back_into_views(device: str, backend: str | None) -> None:
    @tk.tpu_kernel("lifetime::write", mutates_args=("cache",))
    def write(cache: jax.Array, rows: jax.Array) -> jax.Array:
        return rows.sum(), {"cache": cache.at[1:3].set(rows)}  # type: ignore[return-value]

    torch._dynamo.reset()
    call = write if backend is None else torch.compile(write, backend=backend, fullgraph=True)
    big = torch.full((8, 4), 3.0, device=device)
    view = big[2:7]
    version = view._version
    assert float(call(view, torch.ones(2, 4, device=device))) == 8.0
    assert big[:, 0].tolist() == [3, 3, 3, 1, 1, 3, 3, 3]
    assert view._version > version
    with torch.inference_mode():
        call(big, torch.zeros(2, 4, device=device))
    assert big[:, 0].tolist() == [3, 0, 0, 1, 1, 3, 3, 3]


def test_new_values_must_fit_the_mutated_argument() -> None:
    @tk.tpu_kernel("lifetime::misfit", mutates_args=("cache",))
    def misfit(cache: jax.Array):  # type: ignore[no-untyped-def]
        return {"cache": cache[:1]}

    @tk.tpu_kernel("lifetime::forgetful", mutates_args=("cache",))
    def forgetful(cache: jax.Array):  # type: ignore[no-untyped-def]
        return {"other": cache}

    with pytest.raises(
        tk.TraceError, match=r"new value of 'cache' is float32\(1,\), the argument float32\(3,\)"
    ):
        misfit(torch.zeros(3))
    with pytest.raises(tk.TraceError, match="a kernel with mutates_args must return"):
        forgetful(torch.zeros(3))


def test_narrow_checked_integers() -> None:
    @tk.tpu_kernel("lifetime::narrow", int64="narrow_checked")
    def narrow(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return index + 1, index.astype(jnp.int32)

    wide, narrowed = narrow(torch.tensor([1, -5]))
    assert (wide.dtype, narrowed.dtype) == (torch.int64, torch.int32)
    assert wide.tolist() == [2, -4]
    with torch._subclasses.FakeTensorMode() as mode:
        fake = narrow(mode.from_tensor(torch.tensor([1, -5])))
    assert [t.dtype for t in fake] == [torch.int64, torch.int32]
    with pytest.raises(tk.ArgumentError, match="'index' holds values out of the range of int32"):
        narrow(torch.tensor([2**40 + 5]))
    with pytest.raises(tk.DTypeError, match=r"'index' is torch\.float64"):
        narrow(torch.ones(2, dtype=torch.float64))


def test_exact_policy_computes_in_64_bits_and_leaves_jax_alone() -> None:
    @tk.tpu_kernel("lifetime::exact", int64="exact")
    def exact(x: jax.Array) -> jax.Array:
        return x * 3 + 1

    assert exact(torch.tensor([2**40])).tolist() == [3 * 2**40 + 1]
    assert exact(torch.tensor([0.1], dtype=torch.float64)).tolist() == [0.1 * 3 + 1]
    assert jnp.arange(2).dtype == jnp.int32


def test_symbolic_sizes_through_arithmetic_and_pallas_grids() -> None:
    @tk.tpu_kernel("lifetime::padded")
    def padded(x: jax.Array) -> jax.Array:
        rows = -(-x.shape[0] // 8) * 8
        return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return padded(x) * 2

    program = torch.export.export(
        Model(), (torch.ones(5, 3),), dynamic_shapes=({0: torch.export.Dim("n", min=3)},)
    )
    for n in (4, 8, 9, 100):
        assert program.module()(torch.ones(n, 3)).shape == (-(-n // 8) * 8, 3)


def test_sizes_that_jax_cannot_decide_are_specialised_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @tk.tpu_kernel("lifetime::branching")
    def branching(x: jax.Array) -> jax.Array:
        return x[:4] if x.shape[0] > 6 else x

    compiled = torch.compile(
        lambda t: branching(t), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for n in (5, 7):
        assert compiled(torch.ones(n)).shape == branching(torch.ones(n)).shape
    assert "lifetime::branching" in caplog.text
    assert "register_fake" in caplog.text


def test_a_users_fake_is_used() -> None:
    @tk.tpu_kernel("lifetime::with_fake")
    def with_fake(x: jax.Array) -> jax.Array:
        return x + 1

    calls = []

    @with_fake.register_fake
    def fake(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return torch.empty_like(x)

    with torch._subclasses.FakeTensorMode() as mode:
        assert with_fake(mode.from_tensor(torch.ones(3))).shape == (3,)
    assert calls


def test_first_calls_from_many_threads_compile_once() -> None:
    @tk.tpu_kernel("lifetime::threaded")
    def threaded(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ x

    results: list[torch.Tensor] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        try:
            results.append(threaded(torch.ones(16, 16)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(r, results[0]) for r in results)
    assert threaded.stats().kernel_compilations == 1
    assert threaded.stats().launches == 8


module_kernel = tk.tpu_kernel("lifetime::module_kernel")(plus_one)


def test_kernels_pickle_by_name() -> None:
    assert pickle.loads(pickle.dumps(module_kernel)) is module_kernel


def test_config_choice_prefers_the_caller_then_tuned_then_declared() -> None:
    from tpu_kernels.registry import config_table
    from tpu_kernels.registry.config_table import ConfigChoice, ConfigRequest

    @tk.tpu_kernel("lifetime::tuned", configs={"block": [(8, 8), (16, 16)]})
    def tuned(x: jax.Array, *, block: tuple[int, int] = (8, 8), mode: int = 0) -> jax.Array:
        return x * block[0] + mode

    x = torch.ones(2)
    assert tuned.config_for(x).provenance == "default"
    assert float(tuned(x)[0]) == 8.0
    requests: list[ConfigRequest] = []

    class Source:
        def find(self, request: ConfigRequest) -> ConfigChoice | None:
            requests.append(request)
            mine = request.kernel == "lifetime::tuned"
            return (
                ConfigChoice({"block": [16, 16], "mode": 5}, "tuned", "for the test")
                if mine
                else None
            )

    source = Source()
    config_table.add_config_source(source)
    try:
        assert float(tuned(x)[0]) == 21.0
        assert requests[-1].arrays == (((2,), "float32"),)
        assert tuned.config_for(x).config == {"block": (16, 16), "mode": 5}
        assert float(tuned(x, block=(2, 2))[0]) == 7.0
        assert float(tuned(x, block=(2, 2), mode=1)[0]) == 3.0
        assert "tuned" in tuned.explain(x)
    finally:
        config_table._sources.remove(source)
        config_table.bump()
    assert float(tuned(x)[0]) == 8.0


def test_bind_describes_a_call_without_running_it() -> None:
    @tk.tpu_kernel("lifetime::bound")
    def bound(x: jax.Array, y: jax.Array, block: tuple[int, int], scale: float = 2.0) -> jax.Array:
        return (x + y) * scale * block[0]

    x = torch.ones(3, 4)
    call = bound.bind(x, x, config={"block": (4, 4)})
    assert [(a.shape, a.dtype.name) for a in call.avals] == [((3, 4), "float32")] * 2
    assert call.static == {"block": (4, 4), "scale": 2.0}
    (result,) = call.function(interpret=True)(jnp.ones((3, 4)), jnp.ones((3, 4)))
    assert float(result[0, 0]) == 16.0
    with pytest.raises(tk.ConfigError, match="'blok', which is not a static parameter"):
        bound.bind(x, x, config={"blok": (4, 4)})
    with pytest.raises(tk.ArgumentError, match="missing a required argument: 'block'"):
        bound.bind(x, x)


def test_precision_is_the_default_of_the_kernels_products() -> None:
    @tk.tpu_kernel("lifetime::precise", precision="highest")
    def precise(x: jax.Array) -> jax.Array:
        return x @ x

    call = precise.bind(torch.ones(4, 4))
    assert "Precision.HIGHEST" in str(jax.make_jaxpr(call.function(interpret=True))(*call.avals))


@tk.tpu_kernel("lifetime::two_caches", mutates_args=("a", "bs"))
def two_caches(a: jax.Array, bs: list[jax.Array], c: jax.Array):  # type: ignore[no-untyped-def]
    return {"a": a + c, "bs": [b * 2 for b in bs]}


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda m: (m[:4], [m[3:7]]), r"arguments 'a' and 'bs\[0\]' are written to, but share"),
        (lambda m: (m[:4], [m[4:], m[4:]]), r"arguments 'bs\[0\]' and 'bs\[1\]' are written to"),
        (lambda m: (m[:1].expand(4), []), "'a' is written to, but several of its elements share"),
        (lambda m: (m.unfold(0, 4, 1)[:, 0:4], []), "'a' is written to, but several of its"),
        (lambda m: (m.view(torch.int32)[:4], [m[2:6]]), "arguments 'a' and 'bs"),
    ],
)
def test_overlapping_writes_are_refused_before_the_launch(
    device: str, arguments: Any, words: str
) -> None:
    memory = torch.arange(8.0, device=device)
    for compiled in (False, True):
        torch._dynamo.reset()
        call = torch.compile(two_caches, backend="aot_eager") if compiled else two_caches
        with pytest.raises((tk.ArgumentError, torch._dynamo.exc.TorchRuntimeError), match=words):
            call(*arguments(memory), torch.ones(4, device=device))
    assert memory.tolist() == list(range(8))


def test_interleaved_and_read_only_overlaps_are_right() -> None:
    memory = torch.arange(8.0)
    two_caches(memory[::2], [memory[1::2]], memory[:4])
    assert memory.tolist() == [0, 2, 3, 6, 6, 10, 9, 14]
    empty = torch.zeros(0)
    two_caches(empty, [empty], empty)


def test_inference_tensors_are_written_to_in_inference_mode_only() -> None:
    with torch.inference_mode():
        cache = torch.zeros(2)
        two_caches(cache, [], torch.ones(2))
    with pytest.raises(tk.ArgumentError, match="'a' is written to, but is an inference tensor"):
        two_caches(cache, [], torch.ones(2))
    assert cache.tolist() == [1.0, 1.0]


def test_declared_dtypes_under_64_bit_policies_are_the_real_ones() -> None:
    @tk.tpu_kernel("lifetime::wide", int64="exact", dynamic_args=("n", "s"))
    def wide(x: jax.Array, n: int, s: float) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(n), jnp.asarray(s)

    @tk.tpu_kernel("lifetime::narrowed", int64="narrow_checked")
    def narrowed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.arange(3), jnp.zeros(3)

    calls = [lambda x: wide(x, 2**40, 0.1), lambda x: narrowed(x)]
    for call in calls:
        for dtype in (torch.int32, torch.int64):
            x = torch.zeros(2, dtype=dtype)
            with torch._subclasses.FakeTensorMode() as mode:
                fake = call(mode.from_tensor(x))
            assert [t.dtype for t in call(x)] == [t.dtype for t in fake]
    assert wide(torch.zeros(1), 2**40, 0.1)[0].item() == 2**40
