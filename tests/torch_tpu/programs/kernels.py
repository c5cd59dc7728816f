"""Kernels on TorchTPU's device, in its eager modes and its compile backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

import tpu_kernels as tk
from tpu_kernels import _compat_torch_tpu
from tpu_kernels.backends import device
from tpu_kernels.backends.torch_tpu import backend

device_module: Any = torch.tpu  # type: ignore[attr-defined]
MODES = [
    device_module.EagerMode.DEFER_NEVER,
    device_module.EagerMode.DEFER_AND_FUSE,
    device_module.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING,
]
X, Y = torch.randn(16, 32), torch.randn(16, 32)
x, y = X.to("tpu"), Y.to("tpu")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Both devices compute in float32 by XLA:CPU and torch; sums of 16 products differ by 1e-5."""
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), atol=1e-4, rtol=1e-4)


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, list[Any]]:
    """Result of a compiled call, and what TorchTPU tells of the compilation."""
    torch._dynamo.reset()
    told: list[Any] = []
    options = {"debug_callback": told.append, "serializable": False}
    return torch.compile(fn, backend="tpu", fullgraph=True, options=options)(*args), told


def _add_twice(a: Any, b: Any, out: Any) -> None:
    out[...] = a[...] + 2 * b[...]


@tk.tpu_kernel("ttt::blocks", reference=lambda a, b, block=8: a + 2 * b, backward="reference")
def blocks(a: jax.Array, b: jax.Array, *, block: int = 8) -> jax.Array:
    spec = pl.BlockSpec((block, a.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
    grid = (a.shape[0] // block,)
    return pl.pallas_call(
        _add_twice, out_shape=shape, grid=grid, in_specs=[spec, spec], out_specs=spec
    )(a, b)


@tk.tpu_kernel("ttt::product")
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


@tk.tpu_kernel("ttt::many")
def many(
    xs: Sequence[jax.Array], m: jax.Array | None = None, times: int = 1
) -> tuple[jax.Array, list[jax.Array]]:
    total = sum(xs[1:], xs[0]) * times
    return total if m is None else total * m, [v + 1 for v in xs]


def check_who_owns_the_device() -> None:
    assert backend.call_path() == "fast"
    assert not device.is_installed()
    assert "owns the device 'tpu'" in str(device.why_not())
    with raises(tk.DeviceError, "real TorchTPU"):
        device.install()


def check_private_names_are_where_they_were() -> None:
    assert _compat_torch_tpu.missing_names() == []


def check_eager_modes() -> None:
    for mode in MODES:
        with device_module.set_eager_mode(mode):
            close(blocks(x, y, block=4).relu(), (X + 2 * Y).relu())
            close(blocks(x.t().contiguous().t(), y), X + 2 * Y)
            close(blocks(x[::2], y[::2]), X[::2] + 2 * Y[::2])


def check_pallas_is_interpreted_inside_one_module() -> None:
    out, told = compiled(lambda a, b: torch.nn.functional.gelu(blocks(a, b)).sum(), x, y)
    close(out, torch.nn.functional.gelu(X + 2 * Y).sum())
    (text,) = told[0].stablehlo_forward_text
    assert "stablehlo.while" in text  # the grid of the Pallas kernel
    assert "chlo.erf" in text  # gelu
    assert "tpu_custom_call" not in text


def check_gradients_eager_and_compiled() -> None:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (product(a, b.t()) ** 2).sum() + blocks(a, b).sin().sum()

    A, B = (t.clone().requires_grad_() for t in (X, Y))
    ((A @ B.t()) ** 2).sum().add((A + 2 * B).sin().sum()).backward()
    for run in (loss, lambda a, b: compiled(loss, a, b)[0]):
        a, b = (t.clone().requires_grad_() for t in (x, y))
        run(a, b).backward()
        for mine, wanted in ((a.grad, A.grad), (b.grad, B.grad)):
            assert mine is not None
            assert wanted is not None
            torch.testing.assert_close(mine.cpu(), wanted, atol=1e-2, rtol=1e-4)


def check_mutation() -> None:
    @tk.tpu_kernel("ttt::accumulate", mutates_args=("total",))
    def accumulate(total: jax.Array, v: jax.Array, scale: float = 2.0) -> None:
        return {"total": total + scale * v}  # type: ignore[return-value]

    total = torch.zeros(16, 32, device="tpu")
    accumulate(total, x)
    accumulate(total[:4], x[:4])
    expected = 2 * X
    expected[:4] += 2 * X[:4]
    close(total, expected)
    compiled(lambda t, v: accumulate(t, v, scale=1.0), total, x)
    close(total, expected + X)
    with raises(tk.ArgumentError, "share memory"):
        accumulate(total[:1].expand(4, 32), x[:4])


def check_lists_options_and_several_results() -> None:
    total, more = many([x, y], x, times=3)
    close(total, (X + Y) * 3 * X)
    close(more[1], Y + 1)
    close(many([x, y])[0], X + Y)
    close(compiled(lambda a, b: many([a, b])[1][0] * 2, x, y)[0], (X + 1) * 2)


def check_one_program_for_all_values_of_a_dynamic_number() -> None:
    @tk.tpu_kernel("ttt::scaled", dynamic_args=("c",))
    def scaled(v: jax.Array, c: float, n: int = 1) -> jax.Array:
        return v * c + n

    for c in (0.5, 1.5, -2.0):
        close(scaled(x, c), X * c + 1)
    assert scaled.stats().kernel_compilations == 1
    assert scaled.stats().launches == 3
    close(compiled(lambda a: scaled(a, 0.25) * 2, x)[0], (X * 0.25 + 1) * 2)


def check_64_bit_policies() -> None:
    @tk.tpu_kernel("ttt::take", int64="narrow_checked")
    def take(v: jax.Array, index: jax.Array) -> jax.Array:
        return v[index]

    @tk.tpu_kernel("ttt::square", int64="exact")
    def square(v: jax.Array) -> jax.Array:
        return v * v

    index = torch.tensor([1, 3])
    close(take(x, index.to("tpu")), X[index])
    close(compiled(lambda a, i: take(a, i) + 1, x, index.to("tpu"))[0], X[index] + 1)
    with raises(tk.ArgumentError, "'index'", "out of the range of int32"):
        take(x, torch.tensor([2**40]).to("tpu"))
    wide = torch.tensor([2**31 + 5, -7])
    assert torch.equal(square(wide.to("tpu")).cpu(), wide * wide)
    with raises(tk.DTypeError, "'a'", "float64"):
        blocks(x.double(), y.double())


def check_empty_results_launch_nothing() -> None:
    before = blocks.stats().launches
    empty = blocks(x[:0], y[:0])
    assert empty.shape == (0, 32)
    assert empty.device.type == "tpu"
    assert blocks.stats().launches == before


def check_errors_name_argument_and_device() -> None:
    blocks(x, y)  # on the way that is taken from the second call on, too
    with raises(tk.DeviceError, "'a' on tpu", "'b' on cpu"):
        blocks(x, Y)

    @tk.tpu_kernel("ttt::broken")
    def broken(v: jax.Array) -> jax.Array:
        return v @ v

    with raises(tk.TraceError, "ttt::broken", "kernels.py"):
        broken(x)


def check_donated_tensors_are_dead() -> None:
    @tk.tpu_kernel("ttt::consume", donate_args=("v",))
    def consume(v: jax.Array) -> jax.Array:
        return v + 1

    given = torch.ones(4, device="tpu")
    copy = given.clone()
    close(consume(given), torch.full((4,), 2.0))
    close(copy, torch.ones(4))  # TorchTPU's clones share memory: nothing may be reused
    with raises(RuntimeError, "donated"):
        given + 1


def check_vmap_and_opcheck() -> None:
    batched = torch.vmap(product)(x.view(4, 4, 32), y.view(4, 32, 4))
    close(batched, torch.bmm(X.view(4, 4, 32), Y.view(4, 32, 4)))
    # The fourth of opcheck's tests has symbolic sizes, which are refused here.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(product.op, (x, y.t()), test_utils=utils)


def check_a_kernel_that_is_defined_again_is_compiled_again() -> None:
    def define(value: float) -> Any:
        @tk.tpu_kernel("ttt::cell")
        def cell(v: jax.Array) -> jax.Array:
            return v * 0 + value

        return cell

    for value in (1.0, 2.0):
        define(value)
        op = torch.ops.ttt.cell
        assert compiled(lambda a: torch.ops.ttt.cell(a) * 1, x)[0][0, 0].item() == value
        assert op(x)[0, 0].item() == value


def check_a_kernel_that_is_replaced_on_the_device_is_compiled_again() -> None:
    @tk.integrations.jax_op("ttt::served")
    def served(v: jax.Array) -> jax.Array:
        return v + 1

    close(compiled(lambda a: served(a) * 1, x)[0], X + 1)
    served.register_kernel("tpu")(lambda v: v + 10)
    close(served(x), X + 10)
    close(compiled(lambda a: served(a) * 1, x)[0], X + 10)


def check_symbolic_sizes_are_refused_in_words() -> None:
    torch._dynamo.reset()
    rows = torch.ones(24, 32, device="tpu")
    torch._dynamo.mark_dynamic(rows, 0, min=8, max=64)
    run = torch.compile(lambda a: product(a, a.t()) + 1, backend="tpu", dynamic=None)
    with raises(Exception, "ttt::product", "one size"):
        run(rows)


def check_candidates_are_timed_on_the_device_and_their_results_compared() -> None:
    def reference(total: torch.Tensor, a: torch.Tensor) -> None:
        total += a

    @tk.tpu_kernel("ttt::tuned", mutates_args=("total",), reference=reference)
    def tuned(total: jax.Array, a: jax.Array, *, how: str = "good") -> None:
        if how == "refused":
            raise ValueError("not this one")
        factor = 2 if how == "wrong" else 1
        return {"total": total + a * factor}  # type: ignore[return-value]

    before, seen = X.clone(), list[Any]()
    options: dict[str, Any] = {"measure": "device", "store": False, "watch": seen.append}
    with pytest.warns(tk.tuning.SimulatedTime, match="TorchTPU on the CPU"):
        report = tk.autotune(
            tuned, (x, X), configs={"how": ["good", "wrong", "refused"]}, **options
        )
    rows = {row.config["how"]: row for row in report.results}
    assert {name: row.status for name, row in rows.items()} == {
        "good": "ok",
        "wrong": "wrong",
        "refused": "invalid",
    }, report.text
    assert rows["good"].time_us is not None
    assert "not this one" in rows["refused"].reason
    with pytest.warns(tk.tuning.SimulatedTime):
        report = tk.autotune(tuned, (X, x), configs={"how": ["good", "fine"]}, **options)
    assert report.best is not None
    assert report.best.figures["samples"] > 0
    assert "TorchTPU on the CPU" in report.decision
    assert {activity.stage for activity in seen} == {"running", "timing"}
    assert torch.equal(X, before)
    close(x, X)
