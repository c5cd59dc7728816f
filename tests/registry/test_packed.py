"""Values below a byte: packed float4 crosses bit for bit, integers stay refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from torch._subclasses.fake_tensor import FakeTensorMode

import tpu_kernels as tk
import tpu_kernels.device
from tpu_kernels.dsl import dtypes

F4 = torch.float4_e2m1fn_x2
DEVICES = ["cpu", "tpu"]
# The eight magnitudes of e2m1 by its low three bits; the fourth is the sign.
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLE = torch.cat([MAGNITUDES, -MAGNITUDES])


@tk.tpu_kernel("packed::decode")
def decode(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) * scale


@tk.tpu_kernel("packed::quantize")
def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.astype(jnp.float4_e2m1fn), x * 2


@tk.tpu_kernel("packed::same")
def same(x: jax.Array) -> jax.Array:
    return x


@tk.tpu_kernel("packed::fill", mutates_args=("cache",))
def fill(cache: jax.Array, row: jax.Array, at: int) -> None:
    return {"cache": cache.at[at].set(row)}  # type: ignore[return-value]


def packed(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(F4)


def expected_values(raw: torch.Tensor) -> torch.Tensor:
    """What bytes stand for, by the format's definition."""
    nibbles = torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
    return TABLE[nibbles.long()]


def raw_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_bit_pattern_in_every_layout(data: Any) -> None:
    device = data.draw(st.sampled_from(DEVICES))
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    count = int(np.prod(shape))
    values = data.draw(st.lists(st.integers(0, 255), min_size=count, max_size=count))
    raw = torch.tensor(values, dtype=torch.uint8).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    given_raw = raw.to(device).permute(order)  # any strides, and not always aligned
    x = packed(given_raw)
    scale = torch.ones((), device=device)
    out = decode(x, scale)
    assert torch.equal(out.cpu(), expected_values(given_raw.cpu()))
    signs = torch.signbit(out.cpu())
    assert torch.equal(signs, torch.signbit(expected_values(given_raw.cpu())))
    back = same(x)
    assert back.dtype is F4
    assert back.shape == x.shape
    assert torch.equal(back.view(torch.uint8).cpu(), given_raw.cpu())
    assert torch.equal(
        torch.from_numpy(dtypes.to_numpy(x).astype(np.float32)), expected_values(given_raw.cpu())
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager", "tpu"])
def test_values_round_as_in_ml_dtypes(device: str, backend: str | None) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-7, 7, 64).reshape(4, 16)
    function: Any = quantize
    if backend is not None:
        function = torch.compile(quantize, backend=backend, fullgraph=True, dynamic=True)
    out, twice = function(x.to(device))
    assert (out.dtype, out.shape, out.stride()) == (F4, (4, 8), (8, 1))
    assert torch.equal(twice.cpu(), 2 * x)
    expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert torch.equal(expected_values(out.view(torch.uint8).cpu()), torch.from_numpy(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_batches_and_written_arguments(device: str) -> None:
    raw = raw_bytes(4, 6).to(device)
    scale = torch.ones(4, 12, device=device, requires_grad=True)
    decode(packed(raw), scale).sum().backward()
    assert torch.equal(scale.grad.cpu(), expected_values(raw.cpu()))
    for dim in (0, 1):  # in the second case along the dimension that holds packed pairs
        rows = packed(raw if dim == 0 else raw.t().contiguous())
        out = torch.vmap(decode, in_dims=(dim, None))(rows, torch.ones((), device=device))
        assert torch.equal(out.cpu(), expected_values(raw.cpu()))
    cache = torch.zeros(3, 6, dtype=torch.uint8, device=device)
    fill(packed(cache), packed(raw[1]), 2)
    assert torch.equal(cache[2], raw[1])
    assert not cache[:2].any()


def test_fakes_and_symbolic_sizes() -> None:
    with FakeTensorMode():
        out, _ = quantize(torch.empty(3, 8))
        assert (out.dtype, out.shape, out.stride()) == (F4, (3, 4), (4, 1))
        assert decode(torch.empty(3, 4, dtype=F4), torch.empty(())).shape == (3, 8)
    torch._dynamo.reset()
    graphs = []

    def count(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(decode, backend=count, fullgraph=True, dynamic=True)
    for rows in (2, 3, 5):
        raw = raw_bytes(rows, 2 * rows)
        assert torch.equal(compiled(packed(raw), torch.ones(())), expected_values(raw))
    assert len(graphs) == 1


def _decode_block(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...].astype(jnp.float32)


@tk.tpu_kernel("packed::blocks", reference=lambda x: expected_values(x.view(torch.uint8)))
def blocks(x: jax.Array) -> jax.Array:
    spec = pl.BlockSpec((32, 256), lambda i: (i, 0))
    return pl.pallas_call(
        _decode_block,
        grid=(x.shape[0] // 32,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
    )(x)


def test_pallas_kernels_and_their_check() -> None:
    raw = raw_bytes(64, 128)
    assert torch.equal(blocks(packed(raw)), expected_values(raw))
    report = tk.check(blocks, (packed(raw),), passes=("op", "numerics", "bounds"))
    assert report.ok, str(report)


def test_arrays_that_do_not_fill_elements_are_refused_by_name() -> None:
    for shape in ((3,), (4, 1), ()):
        with pytest.raises(tk.DTypeError, match=r"packed::quantize.*cannot be a tensor") as error:
            quantize(torch.ones(shape))
        assert error.value.where is not None
    with pytest.raises(tk.DTypeError, match=r"'x' is torch.float4_e2m1fn_x2 without a dimension"):
        same(torch.empty((), dtype=F4))


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2", "int7"])
def test_integers_below_a_byte_are_refused_by_name(name: str) -> None:
    tensor = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
    with pytest.raises(tk.DTypeError, match=rf"(?s)'x' is torch.{name}.*uint8") as error:
        same(tensor)
    assert "packed::same" in str(error.value)


def test_results_and_residuals_without_a_counterpart_in_torch() -> None:
    @tk.tpu_kernel("packed::integers")
    def integers(x: jax.Array) -> jax.Array:
        return x.astype(jnp.int4)

    with pytest.raises(tk.DTypeError, match=r"packed::integers.*int4"):
        integers(torch.ones(4))

    @tk.tpu_kernel("packed::cubed")
    def cubed(x: jax.Array) -> jax.Array:
        small = x.astype(jnp.float4_e2m1fn)  # what jax.vjp keeps of it cannot leave: odd, or 0-d
        return (small * small * small).astype(x.dtype)

    for shape in ((3,), ()):
        x = torch.full(shape, 1.5, requires_grad=True)
        cubed(x).sum().backward()
        assert x.grad is not None
        assert (x.grad == 6).all()  # 6.75 does not exist
