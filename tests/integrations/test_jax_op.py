"""Code written for `torch.tpu.pallas.jax_op` runs unchanged on CPUs and the simulated device."""

from __future__ import annotations

import enum
import functools
import inspect
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

import tpu_kernels as tk
from tpu_kernels.errors import ArgumentError, DeviceError, NameClashError
from tpu_kernels.integrations import jax_op

DEVICES = ["cpu", "tpu"]


class Act(enum.Enum):
    RELU = "relu"
    NONE = "none"


def body(a: Any, b: Any, out: Any) -> None:
    out[...] = jnp.dot(a[...], b[...])


@jax_op("jaxop::mm")
def mm(a: jax.Array, b: jax.Array, bm: int = 8) -> jax.Array:
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=(a.shape[0] // bm,),
        in_specs=[
            pl.BlockSpec((bm, a.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec(b.shape, lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((bm, b.shape[1]), lambda i: (i, 0)),
    )(a, b)


def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return mm(grad, b.t().contiguous()), mm(a.t().contiguous(), grad), None


def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


mm.register_autograd(backward, setup_context=setup_context)


def test_the_signature_is_that_of_torch_tpu() -> None:
    parameters = inspect.signature(jax_op).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert positional == ["name", "fn"]
    assert keyword == ["donate_argnums", "mesh", "input_partition_specs", "output_partition_specs"]
    assert all(p.default is None for p in parameters if p.name != "name")
    assert torch.tpu.pallas.jax_op is jax_op  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", DEVICES)
def test_a_pallas_kernel_with_its_gradient(device: str) -> None:
    x, w = torch.randn(16, 32), torch.randn(32, 16)
    a, b = (t.to(device).requires_grad_() for t in (x, w))
    out = torch.ops.jaxop.mm(a, b, 4)
    assert out.device.type == device
    # float32 sums of 32 products of numbers below 5: errors stay below 32 * 25 * 2^-24
    torch.testing.assert_close(out.detach().cpu(), x @ w, atol=5e-5, rtol=0)
    out.sum().backward()
    torch.testing.assert_close(a.grad.cpu(), torch.ones(16, 16) @ w.t(), atol=5e-5, rtol=0)
    compiled = torch.compile(lambda a, b: mm(a, b).relu(), backend="tpu", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(a, b).cpu(), (x @ w).relu(), atol=5e-5, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_argument(device: str) -> None:
    @jax_op("jaxop::kinds")
    def kinds(
        x: jax.Array,
        ws: Sequence[jax.Array],
        b: jax.Array | None,
        *,
        act: Act = Act.RELU,
        eps: float = 1e-6,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[jax.Array, list[jax.Array]]:
        out = (x + sum(ws)).astype(dtype) + (0 if b is None else b)
        return (jax.nn.relu(out) if act is Act.RELU else out) + eps, [w * 2 for w in ws]

    x = torch.tensor([-3.0, 1.0], device=device)
    out, doubled = kinds(x, [x, x], None, act=Act.NONE, eps=0.5, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [-8.5, 3.5]
    assert [d.tolist() for d in doubled] == [[-6.0, 2.0]] * 2
    assert kinds(x, [x], x, eps=0.0)[0].tolist() == [0.0, 3.0]


def test_a_decorated_and_a_given_function() -> None:
    def twice(x: jax.Array) -> jax.Array:
        return x * 2

    given = jax_op("jaxop::given", twice)
    decorated = jax_op("jaxop::decorated")(twice)
    for op in (given, decorated):
        assert isinstance(op, tk.Kernel)
        assert op(torch.ones(1)).item() == 2.0
    assert given._opoverload is torch.ops.jaxop.given.default
    assert given._qualname == "jaxop::given"


def test_bound_parameters_are_not_in_the_schema() -> None:
    def apply(x: jax.Array, function: Any, alpha: float = 2.0) -> jax.Array:
        return function(x) * alpha

    bound = jax_op("jaxop::bound", functools.partial(apply, function=jnp.sin))
    assert str(bound.op._schema) == "jaxop::bound(Tensor x, *, float alpha=2.) -> Tensor"
    x = torch.ones(3)
    torch.testing.assert_close(bound(x, alpha=3.0), x.sin() * 3)
    jitted = jax_op("jaxop::jitted", jax.jit(functools.partial(apply, function=jnp.cos)))
    torch.testing.assert_close(jitted(x), x.cos() * 2)


@pytest.mark.parametrize("types", ["cpu", ["cpu", "tpu"], None])
def test_an_implementation_for_a_device(types: Any) -> None:
    @jax_op(f"jaxop::implemented_{types if isinstance(types, str) else len(types or ())}")
    def op(x: jax.Array, n: int = 1) -> jax.Array:
        return x + n

    x = torch.zeros(2)
    assert op(x).tolist() == [1.0, 1.0]

    @op.register_kernel(types)
    def _(x: torch.Tensor, n: int = 1) -> torch.Tensor:
        return x + 10 * n

    assert op(x).tolist() == [10.0, 10.0]
    assert op(x, n=2).tolist() == [20.0, 20.0]
    assert op(x.to("tpu")).tolist() == ([1.0, 1.0] if types == "cpu" else [10.0, 10.0])


def test_donated_arguments_cannot_be_used_again() -> None:
    @jax_op("jaxop::donated", donate_argnums=(0,))
    def donated(x: jax.Array) -> jax.Array:
        return x + 1

    x = torch.zeros(2)
    assert donated(x).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="'x' was donated to jaxop::donated"):
        x.tolist()


@pytest.mark.parametrize("name", ["mm", "a::b::c", "::b", "a::"])
def test_a_name_needs_one_namespace(name: str) -> None:
    with pytest.raises(ValueError, match="namespace::op"):
        jax_op(name)


def test_mistakes_are_named() -> None:
    def f(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(ArgumentError, match="parameter 3, there are 1"):
        jax_op("jaxop::f", f, donate_argnums=[3])
    with pytest.raises(ArgumentError, match="partition specs were given without a mesh"):
        jax_op("jaxop::f", f, input_partition_specs=(("x",),))
    with pytest.raises(DeviceError, match=r"needs torch.distributed, which is not initialized"):
        jax_op("jaxop::f", f, mesh=jax.sharding.AbstractMesh((2,), ("x",)))
    with pytest.raises(DeviceError, match="get_pallas_mesh"):
        torch.tpu.pallas.get_pallas_mesh("x")  # type: ignore[attr-defined]
    jax_op("jaxop::taken", f)

    def another(x: jax.Array) -> jax.Array:
        return x + 1

    with pytest.raises(NameClashError, match="already defined"):
        jax_op("jaxop::taken", another)


def test_torch_tpu_pallas_needs_no_more_than_the_device() -> None:
    code = """
import torch, tpu_kernels.device
import jax
from torch.tpu.pallas import jax_op

@torch.tpu.pallas.jax_op("fresh::twice")
def twice(x: jax.Array) -> jax.Array:
    return x * 2

print(torch.ops.fresh.twice(torch.ones(1, device="tpu")).item(), twice(torch.ones(1)).item())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2.0 2.0\n"), done.stderr
