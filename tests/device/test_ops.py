"""ATen operators on the device against the same operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

Op = Callable[..., Any]

# The device runs the CPU's own kernels, so results are compared bit by bit.
ELEMENTWISE: dict[str, Op] = {
    "add": torch.add,
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=2),
    "mul": torch.mul,
    "maximum": torch.maximum,
    "eq": torch.eq,
    "where": lambda a, b: torch.where(a > b, a, b),
    "add_scalar": lambda a, b: a + 2,
    "scalar_minus": lambda a, b: 3 - a,
    "where_scalar": lambda a, b: torch.where(a > 0, a, 0),
    "clamp": lambda a, b: a.clamp(-1, 1),
    "in_place": lambda a, b: a.clone().mul_(b).add_(1),
    "fill": lambda a, b: torch.zeros_like(a).masked_fill_(a > 0, 5),
    "full_like": lambda a, b: torch.full_like(a, 3),
    "cast": lambda a, b: a.to(torch.float64) * b.to(torch.int16),
    "foreach": lambda a, b: torch._foreach_add([a, b], [b, a]),
}
FLOATING: dict[str, Op] = {
    "relu": lambda a, b: F.relu(a),
    "gelu": lambda a, b: F.gelu(a),
    "exp": lambda a, b: a.exp(),
    "div": lambda a, b: a / b,
    "sigmoid_": lambda a, b: a.clone().sigmoid_(),
    "softmax": lambda a, b: F.softmax(a, -1),
    "log_softmax": lambda a, b: F.log_softmax(a, 0),
    "layer_norm": lambda a, b: F.layer_norm(a, a.shape[-1:]),
    "var_mean": lambda a, b: torch.var_mean(a, -1),
    "norm": lambda a, b: torch.linalg.vector_norm(a, dim=-1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b + 9, value=2),
}
STRUCTURAL: dict[str, Op] = {
    "sum": lambda a, b: a.sum(0),
    "amax": lambda a, b: a.amax(-1),
    "max_dim": lambda a, b: a.max(-1),
    "argmin": lambda a, b: a.argmin(0),
    "cumsum": lambda a, b: a.cumsum(-1),
    "sort": lambda a, b: a.sort(dim=-1, stable=True),
    "topk": lambda a, b: a.topk(1, -1),
    "cat": lambda a, b: torch.cat([a, b], -1),
    "stack": lambda a, b: torch.stack([a, b]),
    "flip": lambda a, b: a.flip(0),
    "roll": lambda a, b: a.roll(1, -1),
    "index": lambda a, b: a[..., [0, -1]],
    "mask": lambda a, b: a[a > 0],
    "nonzero": lambda a, b: a.nonzero(),
    "unique": lambda a, b: a.unique(),
    "gather": lambda a, b: a.gather(-1, torch.zeros_like(a, dtype=torch.int64)),
    "scatter": lambda a, b: a.scatter(-1, torch.zeros_like(a[..., :1], dtype=torch.int64), 7),
    "index_add": lambda a, b: a.index_add(0, torch.zeros_like(a[:, 0]).long(), b),
    "tril": lambda a, b: a.tril(),
    "chunk": lambda a, b: a.chunk(2, -1),
    "reshape": lambda a, b: a.reshape(-1),
    "contiguous": lambda a, b: a.contiguous(),
    "pad": lambda a, b: F.pad(a, (1, 2)),
    "matmul": lambda a, b: a @ b.mT,
    "einsum": lambda a, b: torch.einsum("ij,kj->ki", a, b),
}  # fmt: skip
INTEGER_DTYPES = [torch.int64, torch.int32, torch.int8, torch.uint8]
FLOAT_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "stepped": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda t: F.pad(t, (3, 0))[:, 3:],
    "expanded": lambda t: t[:1].expand(t.shape),
}


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def same(on_tpu: Any, on_cpu: Any) -> None:
    for there, here in zip(tensors_of(on_tpu), tensors_of(on_cpu), strict=True):
        assert there.device.type == "tpu"
        assert there.dtype is here.dtype
        assert there.shape == here.shape
        assert there.stride() == here.stride()
        torch.testing.assert_close(there.cpu(), here, rtol=0, atol=0, equal_nan=True)


def move(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Lay a dense CPU tensor out on the device, through the device's own view operators."""
    return LAYOUTS[layout](tensor.to("tpu"))


@settings(max_examples=150, deadline=None)
@given(
    operator=st.sampled_from(sorted(ELEMENTWISE | FLOATING | STRUCTURAL)),
    dtype=st.sampled_from(FLOAT_DTYPES + INTEGER_DTYPES),
    rows=st.integers(1, 5),
    columns=st.integers(2, 7),
    layouts=st.tuples(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS))),
    seed=st.integers(0, 1000),
)
def test_operators_agree_with_the_cpu(
    operator: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    layouts: tuple[str, str],
    seed: int,
) -> None:
    if operator in FLOATING and dtype in INTEGER_DTYPES:
        dtype = torch.float32
    function = (ELEMENTWISE | FLOATING | STRUCTURAL)[operator]
    generator = torch.Generator().manual_seed(seed)
    dense = [torch.randint(0, 6, (rows, columns), generator=generator).to(dtype) for _ in range(2)]
    if dtype.is_floating_point:
        dense = [t - 2.5 for t in dense]
    on_cpu = [LAYOUTS[layout](t) for t, layout in zip(dense, layouts, strict=True)]
    on_tpu = [move(t, layout) for t, layout in zip(dense, layouts, strict=True)]
    assert [t.stride() for t in on_tpu] == [t.stride() for t in on_cpu]
    same(function(*on_tpu), function(*on_cpu))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), conjugate=st.tuples(st.booleans(), st.booleans()))
def test_complex_products_see_lazy_conjugation(seed: int, conjugate: tuple[bool, bool]) -> None:
    torch.manual_seed(seed)
    on_cpu = [torch.randn(3, 3, dtype=torch.complex64) for _ in range(2)]
    on_tpu = [t.to("tpu") for t in on_cpu]
    for function in (
        lambda a, b: a @ b,
        lambda a, b: torch.addmm(a, a, b),
        lambda a, b: torch.vdot(a[0], b[:, 0]),
        lambda a, b: a.imag + b.real,
        lambda a, b: torch.linalg.solve(a, b),
        lambda a, b: a.clone().mul_(b),
        lambda a, b: torch.view_as_real(a.resolve_conj() * b),
    ):
        a, b = (t.conj() if c else t for t, c in zip(on_cpu, conjugate, strict=True))
        x, y = (t.conj() if c else t for t, c in zip(on_tpu, conjugate, strict=True))
        torch.testing.assert_close(function(x, y).cpu(), function(a, b))


def test_views_alias_and_share_their_version() -> None:
    x = torch.zeros(4, 4, device="tpu")
    row = x[1]
    row += 1
    x.t()[0].fill_(5)
    x.view(2, 8)[0, 0] = 9
    x[:, 3].mul_(2).add_(3)
    expected = [[9, 0, 0, 3], [5, 1, 1, 5], [5, 0, 0, 3], [5, 0, 0, 3]]
    assert x.tolist() == expected
    assert row._is_view()
    assert row._base is x
    assert row._version == x._version > 0
    assert row.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_autograd_checks_versions_of_saved_tensors() -> None:
    a = torch.randn(3, device="tpu", requires_grad=True)
    b = a.exp()
    b.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        b.sum().backward()


def test_out_arguments_are_resized_filled_and_returned() -> None:
    a = torch.arange(6.0, device="tpu").reshape(2, 3)
    empty = torch.empty(0, device="tpu")
    assert torch.add(a, a, out=empty) is empty
    assert empty.tolist() == [[0, 2, 4], [6, 8, 10]]
    ready = torch.empty(3, 2, device="tpu").t()
    torch.mul(a, 2, out=ready)
    assert ready.stride() == (1, 2)
    assert ready.tolist() == empty.tolist()
    values, indices = torch.empty(0, device="tpu"), torch.empty(0, dtype=torch.int64, device="tpu")
    torch.max(a, 1, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([2, 5], [2, 2])
    wrong = torch.zeros(6, device="tpu")
    whole = wrong.untyped_storage().data_ptr()
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.mm(a, a.t(), out=wrong)
    assert wrong.tolist() == [[5, 14], [14, 50]]
    assert wrong.untyped_storage().data_ptr() == whole


def test_out_arguments_are_conjugated_physically() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(2, 3, dtype=torch.complex64)
    factors, pivots = torch.linalg.lu_factor(a)
    expected = torch.linalg.lu_solve(factors, pivots, b, left=False, adjoint=True)
    there = [t.to("tpu") for t in (factors, pivots, b)]
    out = torch.empty(2, 3, dtype=torch.complex64, device="tpu")
    torch.linalg.lu_solve(*there, left=False, adjoint=True, out=out)
    torch.testing.assert_close(out.cpu(), expected.resolve_conj())


def test_in_place_changes_of_shape_change_the_tensor_itself() -> None:
    x = torch.arange(6, device="tpu").view(2, 3)
    assert x.t_().shape == x.shape == (3, 2)
    assert x.unsqueeze_(0).transpose_(0, 2).shape == x.shape == (2, 3, 1)
    assert x.squeeze_().swapaxes_(0, 1).tolist() == x.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert x.as_strided_((2,), (3,)).tolist() == x.tolist() == [0, 3]
    assert x.resize_as_(torch.empty(2, 1, device="tpu")).shape == x.shape == (2, 1)


def test_resize_keeps_the_values_in_storage_order() -> None:
    x = torch.arange(3.0, device="tpu")[1:]
    x.resize_(4)
    assert x[:2].tolist() == [1, 2]
    assert (x.storage_offset(), x.shape) == (1, (4,))
    y = torch.arange(6.0, device="tpu").resize_(2, 2)
    assert y.tolist() == [[0, 1], [2, 3]]
    assert torch.empty(0, device="tpu").set_(y.untyped_storage(), 1, (3,), (1,)).tolist() == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "mixed",
    [
        lambda t, c: t + c,
        lambda t, c: c * t,
        lambda t, c: t @ c,
        lambda t, c: torch.cat([t, c]),
        lambda t, c: t.add_(c),
        lambda t, c: c.add_(t),
        lambda t, c: torch.add(t, t, out=c),
        lambda t, c: F.layer_norm(t, (2,), c[0]),
        lambda t, c: torch.tensor(1.0).add_(t[0, 0]),
        lambda t, c: torch._foreach_add([t], [c]),
    ],
)
def test_mixed_devices_raise_torchs_error(mixed: Op) -> None:
    with pytest.raises(RuntimeError, match="at least two devices, tpu:0 and cpu"):
        mixed(torch.ones(2, 2, device="tpu"), torch.ones(2, 2))


def test_cpu_scalars_and_indices_go_with_the_device() -> None:
    t = torch.arange(4.0, device="tpu")
    assert (t + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert t[torch.tensor([1, 3])].tolist() == [1, 3]
    t[torch.tensor([0])] = 9
    assert t[torch.tensor(0)].item() == 9
    t.copy_(torch.zeros(4))
    assert t.sum().item() == 0


def test_reading_values_and_moving_between_devices() -> None:
    x = torch.tensor([[1, 2], [3, 4]], device="tpu")
    assert x.tolist() == [[1, 2], [3, 4]]
    assert x.sum().item() == 10
    assert x.cpu().numpy().sum() == 10
    assert x.to("cpu", torch.float32).dtype is torch.float32
    assert x.to("tpu") is x
    assert not bool((x > 4).any())
    with pytest.raises(TypeError, match="can't convert tpu:0 device type tensor to numpy"):
        x.numpy()


def test_sparse_and_quantized_tensors_are_refused_clearly() -> None:
    x = torch.eye(2, device="tpu")
    with pytest.raises(NotImplementedError, match=r"no torch\.sparse_coo tensors"):
        x.to_sparse()
    with pytest.raises(NotImplementedError, match=r"no (torch\.)?sparse|sparse_csr"):
        x.to_sparse_csr()


def test_an_operator_of_somebody_else_needs_its_own_kernel() -> None:
    library = torch.library.Library("device_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    x = torch.ones(2)
    assert torch.ops.device_test.twice(x).tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match=r"device_test::twice.*no kernel for the device"):
        torch.ops.device_test.twice(x.to("tpu"))
    library.impl("twice", lambda x: x + x, "PrivateUse1")
    assert torch.ops.device_test.twice(x.to("tpu")).device.type == "tpu"
    library._destroy()
