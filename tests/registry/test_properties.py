"""Eager, fake and compiled calls agree for all shapes, layouts, dtypes, devices and arguments.

By default some hundred examples, always the same. ``make test-properties`` sets
``TPU_KERNELS_EXAMPLES=2000`` and draws that many new ones, each eager, fake and compiled.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable
from typing import Any, Optional

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tpu_kernels as tk

EXAMPLES = int(os.environ.get("TPU_KERNELS_EXAMPLES", "120"))
PROFILE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="TPU_KERNELS_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# Compiling costs half a second: few of those by default, as many as of the others on request.
LONG = "TPU_KERNELS_EXAMPLES" in os.environ
FEW = settings(PROFILE, max_examples=max(EXAMPLES // 4 if LONG else 0, 12))
EACH_BACKEND = settings(PROFILE, max_examples=max(EXAMPLES // 2 if LONG else EXAMPLES // 8, 12))

INTEGERS = [torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32]
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
DTYPES = [torch.bool, torch.complex64, *INTEGERS, *FLOATS, *FLOAT8]


class Side(enum.Enum):
    FRONT = "f"
    BACK = "b"


@tk.tpu_kernel("properties::kinds", dynamic_args=("shift",))
def kinds(
    x: jax.Array,
    other: Optional[jax.Array],  # noqa: UP045 (users write both)
    xs: list[jax.Array],
    holes: list[jax.Array | None],
    maybe: list[jax.Array] | None = None,
    shift: int = 0,
    scale: float = 1.0,
    axis: int = 0,
    mode: str = "keep",
    pad: tuple[int, int] = (0, 1),
    side: Side = Side.FRONT,
    *,
    last: jax.Array,
    both: bool = False,
) -> tuple[jax.Array, jax.Array | None, tuple[list[jax.Array], jax.Array]]:
    """Something of every argument; each output moves bits, or computes in a way that is exact."""
    swapped = jnp.swapaxes(x, axis, -1) if x.ndim else x
    front, back = pad if side is Side.FRONT else pad[::-1]
    padded = last
    if last.ndim:
        padded = jnp.pad(last, [(front, back)] * last.ndim, constant_values=1)  # e8m0 has no zero
    parts = [*xs, *(h for h in holes if h is not None), *(maybe or [])]
    if mode == "flip":
        parts = [jnp.flip(p) for p in parts]
    total = jnp.asarray(len(parts), jnp.float32) * scale + shift
    return swapped, (other if both else None), ([*parts, padded], total)


def torch_kinds(
    x: torch.Tensor,
    other: torch.Tensor | None,
    xs: list[torch.Tensor],
    holes: list[torch.Tensor | None],
    maybe: list[torch.Tensor] | None,
    shift: int,
    scale: float,
    axis: int,
    mode: str,
    pad: tuple[int, int],
    side: Side,
    last: torch.Tensor,
    both: bool,
) -> list[torch.Tensor | None]:
    """The same in torch, on bytes where torch cannot compute; outputs as a flat list."""
    front, back = pad if side is Side.FRONT else pad[::-1]
    padded = torch.ones([n + front + back for n in last.shape]).to(last.dtype)
    padded[tuple(slice(front, front + n) for n in last.shape)] = last.detach().cpu()
    parts = [*xs, *(h for h in holes if h is not None), *(maybe or [])]
    if mode == "flip":
        parts = [bits(p).flip(tuple(range(p.ndim))).view(p.dtype) for p in parts]
    return [
        x.transpose(axis, -1) if x.ndim else x,
        other if both else None,
        *parts,
        padded,
        torch.tensor(len(parts), dtype=torch.float32) * scale + torch.tensor(float(shift)),
    ]


# ------------------------------------------------------------------------------ inputs


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers of the same width, so that signed zeros differ; all NaNs are one,
    since XLA makes a NaN of any NaN where it moves small floats as larger ones."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.is_floating_point():
        nan = tensor.float().isnan()
        tensor = torch.where(nan, torch.full((), math.nan).to(tensor.dtype), tensor)
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(torch.int64).squeeze(-1)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(widths[tensor.element_size()])


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.permute(tuple(reversed(range(t.ndim))))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda t: t,
    "transposed": transposed,
    "every second": lambda t: t[..., ::2] if t.ndim else t,
    "offset": lambda t: t[1:] if t.ndim else t,
    "inner": lambda t: t[..., 1:] if t.ndim else t,
    "expanded": lambda t: t.unsqueeze(0).expand(2, *t.shape),
    "overlapping": lambda t: t.unfold(-1, 2, 1) if t.ndim and t.shape[-1] > 1 else t,
    "none of it": lambda t: t[:0] if t.ndim else t,
    "one element": lambda t: t.flatten()[:1].reshape(()) if t.numel() else t,
    "conjugated": lambda t: t.conj() if t.is_complex() else t,
    "negated": lambda t: t.conj().imag if t.is_complex() else t,
    "channels last": lambda t: (
        t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t
    ),
}

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
devices = st.sampled_from(["cpu", "tpu"])


@st.composite
def tensors(draw: Any, device: str) -> torch.Tensor:
    """A view of random bytes (one in eight a NaN where the dtype has them)."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(shapes)
    count = dtype.itemsize * int(torch.Size(shape).numel())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
    # `to` the device before the view: its memory layout is what is tested.
    base = raw.to(torch.uint8).view(dtype).reshape(shape).to(device)
    names = draw(st.lists(st.sampled_from(sorted(VIEWS)), max_size=2))
    for name in names:
        base = VIEWS[name](base)
    differentiable = dtype in (*FLOATS, torch.complex64)
    return base.requires_grad_() if differentiable and draw(st.booleans()) else base


@st.composite
def calls(draw: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `kinds`, on one device."""
    device = draw(devices)
    one = tensors(device)
    x = draw(one)
    positional = (
        x,
        draw(st.none() | one),
        draw(st.lists(one, max_size=2)),
        draw(st.lists(st.none() | one, max_size=2)),
        draw(st.none() | st.lists(one, max_size=1)),
        draw(st.integers(-(2**31), 2**31 - 1)),
        draw(st.sampled_from([1.0, -0.0, 0.5, float("inf"), float("nan")])),
        draw(st.integers(-x.ndim, x.ndim - 1)) if x.ndim else 0,
        draw(st.sampled_from(["keep", "flip", 'it\'s "quoted"'])),
        draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        draw(st.sampled_from(Side)),
    )
    return positional, {"last": draw(one), "both": draw(st.booleans())}


# ------------------------------------------------------------------------------ what must agree


def leaves(result: Any) -> list[torch.Tensor | None]:
    if isinstance(result, (list, tuple)):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def described(result: Any) -> list[Any]:
    """Structure, shape, strides, dtype and device of a result."""
    return [
        None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.device.type)
        for t in leaves(result)
    ]


def values(result: Any) -> list[Any]:
    return [None if t is None else bits(t) for t in leaves(result)]


def assert_same_bits(found: Any, expected: Any, what: str) -> None:
    for i, (a, b) in enumerate(zip(values(found), values(expected), strict=True)):
        assert (a is None) == (b is None), f"{what}: result {i}"
        assert a is None or torch.equal(a, b), f"{what}: result {i}: {a} instead of {b}"


def faked(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch._subclasses.FakeTensorMode() as mode:
        convert = torch.utils._pytree.tree_map_only
        return function(
            *convert(torch.Tensor, mode.from_tensor, args),
            **convert(torch.Tensor, mode.from_tensor, kwargs),
        )


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def arguments_of(call: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(call) if isinstance(t, torch.Tensor)]


@PROFILE
@given(call=calls())
def test_every_kind_of_argument_eager_and_fake(call: Any) -> None:
    args, kwargs = call
    before = values(arguments_of(call))
    found = kinds(*args, **kwargs)
    assert all(t is None or t.is_contiguous() for t in leaves(found))
    assert_same_bits(found, torch_kinds(*args, **kwargs), "eager")
    assert described(found) == described(faked(kinds, args, kwargs))
    assert all(torch.equal(a, bits(t)) for a, t in zip(before, arguments_of(call), strict=True))


@EACH_BACKEND
@given(call=calls())
@pytest.mark.parametrize("backend", ["aot_eager", "tpu"])
def test_every_kind_of_argument_compiled(backend: str, call: Any) -> None:
    args, kwargs = call
    found = kinds(*args, **kwargs)
    assert described(found) == described(faked(kinds, args, kwargs))
    again = compiled(lambda: kinds(*args, **kwargs), backend)()
    assert described(again) == described(found)
    assert_same_bits(found, torch_kinds(*args, **kwargs), "eager")
    assert_same_bits(again, found, backend)


# ------------------------------------------------------------------------------ gradients


@tk.tpu_kernel("properties::smooth", dynamic_args=("shift",))
def smooth(
    x: jax.Array, ys: list[jax.Array], z: jax.Array | None = None, shift: float = 0.0
) -> tuple[jax.Array, list[jax.Array]]:
    total = jnp.sin(x) + shift
    for y in ys:
        total = total * y
    return (total if z is None else total + z * z), [y * x for y in ys]


def torch_smooth(
    x: torch.Tensor, ys: list[torch.Tensor], z: torch.Tensor | None, shift: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    total = torch.sin(x) + shift
    for y in ys:
        total = total * y
    return (total if z is None else total + z * z), [y * x for y in ys]


@st.composite
def smooth_calls(draw: Any) -> tuple[list[torch.Tensor], list[bool], str]:
    """Tensors of one shape (the last of an even number is `z`), which need a gradient, device."""
    shape = draw(shapes)
    count = draw(st.integers(1, 4))
    views = draw(st.lists(st.sampled_from(["none", "transposed", "expanded"]), min_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.complex64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    found = []
    for view in views[:count]:
        data = torch.randn(tuple(reversed(shape)), generator=generator, dtype=dtype)
        if view == "expanded" and shape:
            data = data[..., :1].expand(data.shape)
        found.append(transposed(data) if view != "none" else data.reshape(shape))
    return found, draw(st.lists(st.booleans(), min_size=count, max_size=count)), draw(devices)


def gradients(function: Any, call: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """Outputs, and gradients of the inputs that are to have one."""
    data, needs, device = call
    tensors = [
        (t if dtype is None else t.to(dtype)).to(device if dtype is None else "cpu") for t in data
    ]
    wanted = [t.requires_grad_() for t, need in zip(tensors, needs, strict=True) if need]
    x, *rest = tensors
    z = rest.pop() if len(rest) % 2 else None
    total, products = function(x, rest, z, 0.5)
    loss = (total.abs() ** 2).sum() + sum((p.abs() ** 2).sum() for p in products)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else []
    return [total.detach(), *(p.detach() for p in products), *grads]


@FEW
@given(call=smooth_calls(), backend=st.sampled_from(["aot_eager", "tpu"]))
def test_gradients_eager_compiled_and_plain_torch(call: Any, backend: str) -> None:
    exact = torch.complex128 if call[0][0].is_complex() else torch.float64
    expected = gradients(torch_smooth, call, exact)
    for function in (smooth, compiled(smooth, backend)):
        found = gradients(function, call)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                # Products of five numbers of float32, each good to 2^-24.
                torch.testing.assert_close(a.cpu(), b.to(a.dtype), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------ mutation


@tk.tpu_kernel("properties::write", mutates_args=("caches", "flags"))
def write(caches: list[jax.Array], flags: jax.Array, rows: jax.Array) -> jax.Array:
    new = [c.at[: rows.shape[0]].set(rows) for c in caches]
    swapped = jnp.where(flags == 0, 1, 0).astype(flags.dtype)
    return rows[::-1], {"caches": new, "flags": swapped}  # type: ignore[return-value]


def torch_write(
    caches: list[torch.Tensor], flags: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    read = rows.clone()  # the rows may lie in a cache
    for cache in caches:
        cache[: read.shape[0]] = read
    flags.copy_(flags.logical_not())
    return read.flip(0)


@FEW
@given(
    rows=st.integers(0, 4),
    caches=st.integers(0, 2),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]),
    device=devices,
    backend=st.sampled_from([None, "aot_eager", "tpu"]),
)
def test_mutated_views_eager_compiled_and_plain_torch(
    rows: int, caches: int, shared: bool, dtype: torch.dtype, device: str, backend: str | None
) -> None:
    def run(function: Any, memory: torch.Tensor) -> torch.Tensor:
        views = [memory[:4, ::2], memory[4:, 4:].t()]
        given = memory[2 : 2 + rows, :4] if shared else memory[:rows, :4].clone()
        return function(views[:caches], memory[4:, :2], given)

    start = (torch.arange(64).reshape(8, 8) % 3 == 0).to(dtype)
    expected, found = start.clone(), start.to(device)
    version = found._version
    call = run if backend is None else compiled(run, backend)
    assert torch.equal(call(write, found).cpu(), run(torch_write, expected))
    assert torch.equal(found.cpu(), expected)
    assert found._version > version
