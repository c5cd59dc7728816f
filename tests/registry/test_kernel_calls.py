"""Calling kernels: values, layouts, dtypes, structure, devices, errors; eager, fake and compiled
agree."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import tpu_kernels as tk

DEVICES = ["cpu", "tpu"]


@tk.tpu_kernel("calls::axpy", reference=lambda x, y, alpha=1.0: alpha * x + y)
def axpy(x: jax.Array, y: jax.Array, alpha: float = 1.0) -> jax.Array:
    return alpha * x + y


@tk.tpu_kernel("calls::everything", dynamic_args=("shift",))
def everything(
    xs: list[jax.Array],
    bias: jax.Array | None = None,
    shift: float = 0.0,
    axis: int = 0,
    *,
    both: bool = False,
) -> tuple[jax.Array, tuple[jax.Array | None, list[jax.Array]]]:
    total = jnp.concatenate(xs, axis) + shift
    if bias is not None:
        total = total + bias
    return total, (total.sum() if both else None, [x * 2 for x in xs])


@tk.tpu_kernel("calls::pallas_add_one")
def pallas_add_one(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + jnp.ones((), x_ref.dtype)

    spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    grid = tuple(pl.cdiv(d, b) for d, b in zip(x.shape, (8, 128), strict=True))
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset(),
    )


def fake_of(call: Any, *tensors: torch.Tensor) -> Any:
    with torch._subclasses.FakeTensorMode() as mode:
        return call(*(mode.from_tensor(t) for t in tensors))


@pytest.mark.parametrize("device", DEVICES)
def test_values_on_every_device(device: str) -> None:
    x, y = torch.randn(5, 7, device=device), torch.randn(5, 7, device=device)
    result = axpy(x, y, 3.0)
    torch.testing.assert_close(result, 3 * x + y)
    assert result.device.type == device
    torch.testing.assert_close(torch.ops.calls.axpy(x, y, alpha=3.0), result, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_pallas_kernels_without_interpret_parameter_run_on_cpu(device: str) -> None:
    x = torch.randn(20, 200, device=device)
    torch.testing.assert_close(pallas_add_one(x), x + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_lists_optionals_and_nested_results(device: str) -> None:
    xs = [torch.ones(2, 3, device=device), torch.ones(1, 3, device=device)]
    total, (summed, doubled) = everything(xs, torch.ones(3, device=device), 0.5, both=True)
    assert total.shape == (3, 3)
    assert float(summed) == 9 * 2.5
    assert [float(d.sum()) for d in doubled] == [12.0, 6.0]
    total, (summed, _) = everything(xs)
    assert summed is None
    assert float(total.sum()) == 9.0


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[1:, ::2],
    "offset": lambda t: t.reshape(-1)[1:-1].reshape(1, -1),
    "expanded": lambda t: t[:1].expand(4, -1),
    "negated": torch._neg_view,
    "flipped": lambda t: t.flip(0),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[0, 0],
    "requires grad": lambda t: t.clone().requires_grad_(),
}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8]),
    device=st.sampled_from(DEVICES),
)
def test_eager_fake_and_plain_torch_agree_for_every_layout(
    rows: int, columns: int, layout: str, dtype: torch.dtype, device: str
) -> None:
    if layout == "requires grad" and not dtype.is_floating_point:
        dtype = torch.float32
    base = (
        torch.arange((rows + 1) * (columns + 1)).reshape(rows + 1, columns + 1).to(dtype).to(device)
    )
    x = LAYOUTS[layout](base)
    before = x.detach().clone()
    real = pallas_or_plain(x)
    fake = fake_of(pallas_or_plain, x)
    assert describe(real) == describe(fake)
    assert real.is_contiguous()
    torch.testing.assert_close(real.detach(), (x + x).detach().contiguous(), rtol=0, atol=0)
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)


def pallas_or_plain(x: torch.Tensor) -> torch.Tensor:
    return double(x)


@tk.tpu_kernel("calls::double")
def double(x: jax.Array) -> jax.Array:
    return x + x


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "aot_eager"), ("tpu", "aot_eager"), ("tpu", "tpu")]
)
def test_compiled_equals_eager_with_one_graph_for_all_sizes(device: str, backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda a, b: axpy(a, b, 2.0) + 1, backend=counter, fullgraph=True, dynamic=True
    )
    for n in (3, 5, 9):
        x, y = torch.randn(n, 4, device=device), torch.randn(n, 4, device=device)
        torch.testing.assert_close(compiled(x, y), 2 * x + y + 1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_never_alias_inputs_or_each_other(device: str) -> None:
    x = torch.arange(64.0, device=device)
    outputs = same_twice(x)
    pointers = {t.untyped_storage().data_ptr() for t in (x, *outputs)}
    assert len(pointers) == 3
    outputs[0].zero_()
    assert float(x.sum()) == float(outputs[1].sum()) == 2016.0


@tk.tpu_kernel("calls::same_twice")
def same_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


def test_aligned_contiguous_inputs_are_not_copied() -> None:
    from tpu_kernels.backends.bridge import ALIGNMENT, Bridge

    bridge = Bridge("cpu")
    x = torch.randn(64, 64)
    assert x.data_ptr() % ALIGNMENT == 0
    array = bridge.to_jax(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    assert bridge.to_jax(x) is array
    assert bridge.to_torch(array).data_ptr() == x.data_ptr()
    x.add_(1)
    assert float(bridge.to_jax(x)[0, 0]) == float(x[0, 0])
    x.set_(torch.zeros(64, 64))
    assert float(bridge.to_jax(x).sum()) == 0.0


def test_zero_copy_on_the_simulated_device() -> None:
    from tpu_kernels.backends.bridge import Bridge
    from tpu_kernels.backends.device.capsule import mark_cpu, mark_tpu

    bridge = Bridge("tpu", mark_cpu, mark_tpu)
    x = torch.randn(64, 64, device="tpu")
    assert bridge.to_jax(x).unsafe_buffer_pointer() == x.data_ptr()
    assert bridge.to_torch(bridge.to_jax(x)).data_ptr() == x.data_ptr()


def test_remembered_arrays_die_with_their_tensors() -> None:
    from tpu_kernels.backends.bridge import Bridge

    bridge = Bridge("cpu")
    for _ in range(50):
        bridge.to_jax(torch.randn(32, 32))
    assert not bridge._remembered


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.uint64, torch.complex128])
def test_64_bit_inputs_are_refused_by_name(dtype: torch.dtype) -> None:
    x = torch.ones(2).to(dtype)
    for call in (lambda: double(x), lambda: fake_of(double, x)):
        with pytest.raises(
            tk.DTypeError, match=r"'x' is torch\..*64|'x' is torch\.complex128"
        ) as error:
            call()
        assert isinstance(error.value, TypeError)


def test_mixed_devices_name_each_argument() -> None:
    for x, y in (
        (torch.ones(2), torch.ones(2, device="tpu")),
        (torch.ones(2, device="tpu"), torch.ones(2)),
    ):
        with pytest.raises(tk.DeviceError, match=r"'x' on .*, 'y' on "):
            axpy(x, y)
        axpy(x, x)
        with pytest.raises(tk.DeviceError, match=r"'x' on .*, 'y' on "):
            axpy(x, y)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: axpy(x, x, torch.tensor(1.0)),
            ["'alpha'", "takes float", "got a tensor", ".item()"],
        ),
        (lambda x: axpy(x, x, "two"), ["'alpha'", "takes float", "'two'"]),
        (lambda x: tiled(x, (1, 2, 3)), ["'block'", "expected 2 values, got 3"]),
        (lambda x: tiled(x, 4), ["'block'"]),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Any, words: list[str]) -> None:
    with pytest.raises(tk.ArgumentError) as error:
        call(torch.ones(2))
    for word in words:
        assert word in str(error.value)


@tk.tpu_kernel("calls::tiled")
def tiled(x: jax.Array, block: tuple[int, int] = (8, 128)) -> jax.Array:
    return x + block[0]


@tk.tpu_kernel("calls::broken")
def broken(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] + 1)  # the author's mistake


def test_errors_while_tracing_show_the_authors_line() -> None:
    for call in (lambda: broken(torch.ones(4)), lambda: fake_of(broken, torch.ones(4))):
        with pytest.raises(tk.TraceError) as error:
            call()
        first, second, *_ = str(error.value).split("\n")
        assert "calls::broken" in first
        assert __file__ in second
        assert "the author's mistake" in str(error.value)
        assert error.value.__cause__ is not None


def test_results_that_do_not_fit_the_annotation_are_errors() -> None:
    @tk.tpu_kernel("calls::liar")
    def liar(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x  # type: ignore[return-value]

    with pytest.raises(tk.TraceError, match="should be a tuple of 2 values"):
        liar(torch.ones(2))


def test_programs_are_keyed_by_static_values() -> None:
    @tk.tpu_kernel("calls::keyed")
    def keyed(x: jax.Array, s: float) -> jax.Array:
        return x * s

    x = torch.ones(2)
    for s in (1.0, 2.0, float("nan"), float("nan"), 0.0, -0.0, 1.0):
        keyed(x, s)
    stats = keyed.stats()
    # Other tests may have left such a program on disk.
    assert stats.kernel_compilations + stats.disk_cache_hits == 5
    assert keyed.stats().launches == 7
    assert torch.signbit(keyed(x, -0.0)).all()


def test_dynamic_scalars_share_one_program_and_change_no_dtype() -> None:
    @tk.tpu_kernel("calls::dynamic", dynamic_args=("s", "n"))
    def dynamic(x: jax.Array, s: float, n: int = 1) -> jax.Array:
        return x * s + n

    x = torch.ones(4, dtype=torch.bfloat16)
    for i in range(5):
        result = dynamic(x, 0.5 * i, i)
        assert result.dtype is torch.bfloat16
        assert float(result[0]) == 1.5 * i
    assert dynamic.stats().kernel_compilations == 1


def test_empty_outputs_launch_nothing_and_empty_inputs_reduce() -> None:
    @tk.tpu_kernel("calls::column_sums")
    def column_sums(x: jax.Array) -> jax.Array:
        return x.sum(0)

    assert pallas_add_one(torch.ones(0, 128)).shape == (0, 128)
    assert pallas_add_one.spec.name == "calls::pallas_add_one"
    launches = column_sums.stats().launches
    assert column_sums(torch.ones(3, 0)).shape == (0,)
    assert column_sums.stats().launches == launches
    assert column_sums(torch.ones(0, 3)).tolist() == [0.0, 0.0, 0.0]


def test_the_reference_answers_for_empty_inputs_that_the_kernel_cannot_run_on() -> None:
    @tk.tpu_kernel("calls::blocked_sum", reference=lambda x: x.sum(0, keepdim=True))
    def blocked_sum(x: jax.Array) -> jax.Array:
        def body(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...].sum(0, keepdims=True)

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype))(x)

    assert blocked_sum(torch.ones(2, 3)).tolist() == [[2.0] * 3]
    assert blocked_sum(torch.ones(0, 3)).tolist() == [[0.0] * 3]
    assert blocked_sum.stats().reference_fallbacks == 1


def test_kernels_compose_inside_jax() -> None:
    result = jax.jit(lambda a: axpy(a, a, 2.0).sum())(jnp.ones(3))
    assert float(result) == 9.0


def test_opcheck_passes_for_every_shape_of_signature() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    assert set(torch.library.opcheck(axpy.op, (x, x, 2.0)).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(pallas_add_one.op, (x.detach(),)).values()) == {"SUCCESS"}


@tk.tpu_kernel("calls::listed")
def listed(
    x: jax.Array,
    xs: list[jax.Array],
    holes: list[jax.Array | None] = (),  # type: ignore[assignment]
    names: tuple[str, ...] = ("a",),
) -> jax.Array:
    return x + len(xs) + len(holes) + len(names)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: listed(x, x), ["'xs' takes list[jax.Array]", "got a tensor"]),
        (lambda x: listed(x, [x, 1.0]), ["'xs'", "got list of Tensor, float"]),
        (lambda x: listed(x, [None]), ["'xs'", "got list [None]"]),
        (lambda x: listed(x, [], [], "abc"), ["'names'", "got str 'abc'"]),
        (lambda x: tiled(x, (1, 2.5)), ["'block'", "got tuple (1, 2.5)"]),
        (lambda x: counted(x, 2**63), ["'n' takes int", "got int 9223372036854775808"]),
        (lambda x: counted(x, 2**31), ["'n' is 2147483648, out of the range of int32"]),
    ],
)
def test_elements_and_ranges_are_refused_by_name(call: Any, words: list[str]) -> None:
    for _ in range(2):  # the first call compiles, the second finds a program
        with pytest.raises(tk.ArgumentError) as error:
            call(torch.ones(2))
        for word in words:
            assert word in str(error.value)
        assert float(counted(torch.ones(2), -(2**31))[0]) == -(2.0**31)


@tk.tpu_kernel("calls::counted", dynamic_args=("n",))
def counted(x: jax.Array, n: int) -> jax.Array:
    return x + n


def test_lists_have_their_defaults_and_may_be_empty() -> None:
    x = torch.zeros(1)
    assert listed(x, []).tolist() == [1.0]
    assert listed(x, [x], [None, x]).tolist() == [4.0]

    @tk.tpu_kernel("calls::total")
    def total(xs: list[jax.Array]) -> jax.Array:
        return sum(xs, jnp.zeros(2))

    assert total([]).tolist() == [0.0, 0.0]
    assert total([torch.ones(2, device="tpu")]).device.type == "tpu"


def test_numbers_of_numpy_are_numbers() -> None:
    x = torch.ones(2)
    assert counted(x, np.int64(2)).tolist() == [3.0, 3.0]
    assert axpy(x, x, np.float32(2)).tolist() == [3.0, 3.0]
    assert tiled(x, (np.int32(3), 4)).tolist() == [4.0, 4.0]
    assert axpy.bind(x, x, 2).static == {"alpha": 2.0}
    assert isinstance(axpy.bind(x, x, 2).static["alpha"], float)


def test_calls_with_too_few_arguments_name_the_kernel() -> None:
    with pytest.raises(TypeError, match=r"axpy\(\) missing 2 required positional arguments"):
        axpy()


def test_statics_reach_the_kernel_beside_jax_arrays_as_beside_tensors() -> None:
    class Side(enum.Enum):
        LEFT = 1
        RIGHT = 2

    @tk.tpu_kernel("calls::statics")
    def statics(x: jax.Array, side: Side = Side.LEFT, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return (x * (2 if side is Side.LEFT else 3)).astype(dtype)

    for side in (Side.LEFT, Side.RIGHT, "RIGHT"):
        found = jax.jit(lambda a, side=side: statics(a, side, jnp.bfloat16))(jnp.ones(1))
        expected = statics(torch.ones(1), side, jnp.bfloat16)
        assert (float(found[0]), found.dtype.name) == (float(expected[0]), "bfloat16")


@pytest.mark.parametrize("wrong", [0, 1])
def test_real_meta_and_fake_tensors_of_other_devices_do_not_mix(wrong: int) -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    tensors[wrong] = tensors[wrong].to("meta")
    with pytest.raises(tk.DeviceError, match=r"on cpu.* on meta|on meta.* on cpu"):
        axpy(*tensors)
    tensors[wrong] = torch.ones(2, device="tpu")
    with pytest.raises(tk.DeviceError, match=r"on cpu.* on tpu|on tpu.* on cpu"):
        fake_of(axpy, *tensors)


def test_tensors_that_are_not_dense_are_refused_by_name() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()):
        with pytest.raises(
            tk.ArgumentError, match=r"'x' is torch\.\w+; kernels take dense"
        ) as error:
            double(tensor)
        assert "x.to_dense()" in str(error.value)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_results_beside_others_have_torchs_strides(device: str) -> None:
    xs = [torch.ones(0, 3, device=device), torch.ones(2, 3, device=device)]
    for _ in range(2):
        found = everything(xs)
        assert describe(found[1][1][0]) == describe(torch.empty(0, 3, device=device))
        assert describe(fake_of(lambda a, b: everything([a, b])[1][1][0], *xs)) == describe(
            found[1][1][0]
        )


def test_outputs_alias_nothing_under_disable_jit() -> None:
    x = torch.arange(64.0)
    with jax.disable_jit():
        outputs = same_twice(x)
    assert len({t.data_ptr() for t in (x, *outputs)}) == 3


def test_a_parameter_may_be_called_self() -> None:
    @tk.tpu_kernel("calls::own_self")
    def own_self(x: jax.Array, *, self: int = 1) -> jax.Array:
        return x * self

    assert own_self(torch.ones(2), self=3).tolist() == [3.0, 3.0]
    assert own_self.bind(torch.ones(2), self=3).static["self"] == 3


@tk.tpu_kernel("calls::add_residual", mutates_args=("residual",))
def add_residual(x: jax.Array, residual: jax.Array | None = None):
    return {"residual": None if residual is None else residual + x}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager", "tpu"])
def test_an_optional_argument_can_be_written_to_or_left_out(
    device: str, backend: str | None
) -> None:
    torch._dynamo.reset()
    call = add_residual
    if backend is not None:
        call = torch.compile(lambda *a: add_residual(*a), backend=backend, fullgraph=True)
    x, base = torch.ones(2, device=device), torch.zeros(6, device=device)
    version = base._version
    assert call(x, base[2:4]) is None
    assert base.tolist() == [0, 0, 1, 1, 0, 0]
    assert base._version > version
    assert call(x) is None
    assert call(x, None) is None
