"""`numerics("tpu")`: float32 products rounded as on the MXU, wherever they are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import tpu_kernels as tk
from tests.registry.override_checks import DEVICES, nothing_left, tables
from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.numerics import mxu
from tpu_kernels.registry.numerics.jaxpr import emulated
from tpu_kernels.registry.overrides.checked import contract_problems

clean = pytest.fixture(autouse=True)(nothing_left)

# torch's own deprecated calls, made while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]

# Largest error relative to the largest value, for normal data: (at least, at most). The lower limit
# is what makes sure that something was rounded; measured values stand in docs/numerics.md.
BOUNDS = {"medium": (8e-4, 6e-3), "high": (3e-6, 4e-5), "highest": (0.0, 2e-6)}
PRECISIONS = tuple(BOUNDS)

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def precision_is_restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().cpu().double() - exact).abs().max() / exact.abs().max())


def within(got: Tensor, exact: Tensor, precision: str, slack: float = 1.0) -> None:
    low, high = BOUNDS[precision]
    assert low / slack <= error(got, exact) <= high * slack


# -- what is computed ------------------------------------------------------------------------------


def test_one_pass_gives_the_numbers_reported_from_a_tpu() -> None:
    # From a report against JAX, measured on hardware.
    x = torch.tensor([[0.3744, 0.1656], [0.4707, 0.1663]])
    y = torch.tensor([[0.3946, 0.1186], [0.1569, 0.3145]])
    reported = torch.tensor([[0.17405128, 0.09669876], [0.21180916, 0.10805416]])
    torch.set_float32_matmul_precision("medium")
    with tk.numerics("tpu"):
        torch.testing.assert_close(x @ y, reported, rtol=0, atol=2e-8)
    assert float((x @ y - reported).abs().max()) > 1e-4, "and exactly is something else"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_errors_of_a_product_are_those_of_its_passes(device: str, precision: str) -> None:
    x, y = data(256, 512), data(512, 256, seed=1)
    torch.set_float32_matmul_precision(precision)
    with tk.numerics("tpu"):
        got = x.to(device) @ y.to(device)
    within(got, x.double() @ y.double(), precision)


OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(8, 64), (64, 4)]),
    "mv": (torch.mv, [(8, 64), (64,)]),
    "dot": (torch.dot, [(64,), (64,)]),
    "linear": (F.linear, [(2, 8, 64), (4, 64), (4,)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(4,), (8, 64), (64, 4)]),
    "addmv": (torch.addmv, [(8,), (8, 64), (64,)]),
    "bmm": (torch.bmm, [(3, 8, 64), (3, 64, 4)]),
    "baddbmm": (torch.baddbmm, [(3, 8, 4), (3, 8, 64), (3, 64, 4)]),
    "addbmm": (torch.addbmm, [(8, 4), (3, 8, 64), (3, 64, 4)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(3, 8, 64), (3, 4, 64)]),
    "conv1d": (lambda x, w: F.conv1d(x, w, groups=3), [(2, 12, 16), (6, 4, 3)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 6, 8, 8), (4, 6, 3, 3), (4,)]),
    "conv2d of one": (F.conv2d, [(6, 8, 8), (4, 6, 3, 3), (4,)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [(2, 6, 8, 8), (6, 4, 3, 3), (4,)],
    ),
    "attention": (F.scaled_dot_product_attention, [(2, 4, 16, 32)] * 3),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 16, 32)] * 3,
    ),
    "masked attention": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=(torch.arange(16, device=q.device) % 3 > 0).expand(16, 16)
        ),
        [(2, 4, 16, 32)] * 3,
    ),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 16, 32), (2, 2, 16, 32), (2, 2, 16, 32)],
    ),
    "attention of a transposed query": (
        lambda q, k, v: F.scaled_dot_product_attention(q.transpose(1, 2), k, v),
        [(2, 16, 4, 32), (2, 4, 16, 32), (2, 4, 16, 32)],
    ),
}


def forward_and_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    result = function(*leaves)
    weight = data(*result.shape, seed=9).to(result.device, result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, weight)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_product_of_torch_is_rounded_forward_and_backward(name: str, device: str) -> None:
    function, shapes = OPERATORS[name]
    inputs = [data(*shape, seed=i) for i, shape in enumerate(shapes)]
    exact = forward_and_gradients(function, [t.double() for t in inputs])
    plain = forward_and_gradients(function, [t.to(device) for t in inputs])
    for precision in ("medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        with tk.numerics("tpu"):
            got = forward_and_gradients(function, [t.to(device) for t in inputs])
        assert contract_problems(got, plain) == []
        errors = [error(a, b) for a, b in zip(got, exact, strict=True)]
        # Short sums vary more than the long ones that the bounds are for.
        assert max(errors) <= 3 * BOUNDS[precision][1]
        assert max(errors) >= BOUNDS[precision][0] / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    x = data(16, 16).to(dtype)
    expected = x @ x
    torch.set_float32_matmul_precision("medium")
    with tk.numerics("tpu"):
        assert torch.equal(x @ x, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_infinities_and_nan_stay_what_they_are(precision: str) -> None:
    x = torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0], [3.0, 4.0]])
    y = torch.ones(2, 2)
    torch.set_float32_matmul_precision(precision)
    with tk.numerics("tpu"):
        torch.testing.assert_close(x @ y, torch.mm(x.double(), y.double()).float(), equal_nan=True)
    names = {"medium": "default"}
    dot = emulated(lambda a, b: jnp.dot(a, b, precision=names.get(precision, precision)))
    got = torch.tensor(jax.device_get(jax.jit(dot)(x.numpy(), y.numpy())))
    torch.testing.assert_close(got, (x.double() @ y.double()).float(), equal_nan=True)


@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 70), exponent=st.integers(-30, 30)
)
def test_six_passes_are_as_good_as_float32(m: int, n: int, k: int, exponent: int) -> None:
    x, y = data(m, k) * 2.0**exponent, data(k, n, seed=1)
    exact = x.double() @ y.double()
    scale = (x.double().abs() @ y.double().abs()).max()
    torch.set_float32_matmul_precision("highest")
    got = mxu.product(torch.mm, x, y)
    assert float((got.double() - exact).abs().max()) <= 2e-6 * float(scale)


# -- kernels ---------------------------------------------------------------------------------------


def pallas_mm(x: jax.Array, y: jax.Array, *, precision: str | None = None) -> jax.Array:
    def body(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], precision=precision, preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
    return pl.pallas_call(body, out_shape=shape)(x, y)


@pytest.fixture(scope="module")
def kernel() -> tk.Kernel:
    return tk.tpu_kernel("numerics_test::mm", reference=lambda x, y, precision=None: x @ y)(
        pallas_mm
    )


JAX_NAMES = {"medium": "default", "high": "high", "highest": "highest"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dots_inside_a_pallas_kernel_follow_its_precision(
    kernel: tk.Kernel, precision: str, device: str
) -> None:
    x, y = data(64, 256), data(256, 32, seed=1)
    exact = x.double() @ y.double()
    given = JAX_NAMES[precision]
    plain = kernel(x.to(device), y.to(device), precision=given)
    with tk.numerics("tpu"):
        within(kernel(x.to(device), y.to(device), precision=given), exact, precision)
        within(kernel(x.to(device), y.to(device)), exact, "medium")
    again = kernel(x.to(device), y.to(device), precision=given)
    assert torch.equal(plain, again), "programs of the two modes are kept apart"
    within(again, exact, "highest")


def nested(x: jax.Array, y: jax.Array) -> jax.Array:
    """Dots below a scan, a branch, a loop, a jitted function and a custom derivative."""
    dot = jax.custom_jvp(jnp.dot)
    dot.defjvp(lambda primals, tangents: (dot(*primals), dot(tangents[0], primals[1])))

    def step(total: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + jax.jit(dot)(row[None], y)[0], row

    total, _ = jax.lax.scan(step, jnp.zeros(y.shape[1]), x)
    total = jax.lax.cond(x[0, 0] < 1e9, lambda: total + x[0] @ y, lambda: total)
    return jax.lax.fori_loop(0, 2, lambda i, t: t + x[1] @ y, total)


def test_dots_are_found_at_every_depth() -> None:
    x, y = data(6, 128), data(128, 16, seed=1)
    exact = nested(*(jnp.asarray(t.numpy()) for t in (x, y)))
    got = jax.jit(emulated(nested))(x.numpy(), y.numpy())
    rounded = [t.bfloat16().float().numpy() for t in (x, y)]
    assert float(jnp.abs(got - nested(*map(jnp.asarray, rounded))).max()) < 2e-5
    assert float(jnp.abs(got - exact).max()) > 1e-2


def test_convolutions_and_algorithms_by_name_are_found() -> None:
    x, w = data(1, 8, 16), data(8, 8, 3, seed=1)
    conv = lambda x, w: jax.lax.conv(x, w, (1,), "VALID")  # noqa: E731
    got = torch.tensor(jax.device_get(jax.jit(emulated(conv))(x.numpy(), w.numpy())))
    within(got, F.conv1d(x.double(), w.double()), "medium", slack=2)
    a, b = data(32, 128), data(128, 32, seed=1)
    for preset, precision in (("BF16_BF16_F32", "medium"), ("BF16_BF16_F32_X3", "high")):
        algorithm = getattr(jax.lax.DotAlgorithmPreset, preset)
        dot = emulated(lambda x, y, how=algorithm: jnp.dot(x, y, precision=how))
        got = torch.tensor(jax.device_get(jax.jit(dot)(a.numpy(), b.numpy())))
        within(got, a.double() @ b.double(), precision)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernels_gradient_is_rounded_too_in_autograds_threads(device: str) -> None:
    @tk.tpu_kernel("numerics_test::dot")
    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.dot(x, y)

    x, y = data(32, 128).to(device).requires_grad_(), data(128, 32, seed=1).to(device)
    weight = data(32, 32, seed=2).to(device)
    exact = weight.cpu().double() @ y.cpu().double().t()
    (plain,) = torch.autograd.grad(dot(x, y), x, weight)
    with tk.numerics("tpu"):
        (got,) = torch.autograd.grad(dot(x, y), x, weight)
    within(plain, exact, "highest")
    within(got, exact, "medium")


# -- overrides -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("has_parameter", [True, False])
def test_a_kernel_in_place_of_an_operator_follows_torchs_precision(
    kernel: tk.Kernel, precision: str, has_parameter: bool
) -> None:
    @tk.tpu_kernel("numerics_test::bare")
    def bare(x: jax.Array, y: jax.Array) -> jax.Array:
        return pallas_mm(x, y)

    x, y = data(64, 256), data(256, 32, seed=1)
    torch.set_float32_matmul_precision(precision)
    impl = kernel if has_parameter else bare
    exact = x.double() @ y.double()
    with tk.override("aten::mm", impl, device="cpu") as handle, tk.numerics("tpu"):
        within(torch.mm(x, y), exact, precision)
    assert handle.hits == 1, "an override of a user's comes before the emulation"


def test_a_precision_that_the_kernel_states_is_kept() -> None:
    @tk.tpu_kernel("numerics_test::high", precision="high")
    def high(x: jax.Array, y: jax.Array) -> jax.Array:
        return pallas_mm(x, y)

    x, y = data(64, 256), data(256, 32, seed=1)
    exact = x.double() @ y.double()
    with tk.override("aten::mm", high, device="cpu"), tk.numerics("tpu"):
        within(torch.mm(x, y), exact, "high")


def test_fallback_of_a_users_override_is_the_rounded_product() -> None:
    x, y = data(64, 256), data(256, 32, seed=1)
    torch.set_float32_matmul_precision("medium")

    def through(a: Tensor, b: Tensor, fallback: Any) -> Tensor:
        return fallback(a, b)

    with tk.override("aten::mm", through, device="cpu"), tk.numerics("tpu"):
        within(torch.mm(x, y), x.double() @ y.double(), "medium")


def test_checks_accept_the_rounding_that_was_asked_for_and_say_so(kernel: tk.Kernel) -> None:
    args = (data(16, 128), data(128, 128, seed=1))
    assert "products" not in tk.check(kernel, args, passes=("numerics",)).row("numerics").what
    with tk.numerics("tpu"):
        row = tk.check(kernel, args, passes=("numerics",)).row("numerics")
        assert (row.status, "products at DEFAULT precision" in row.what) == ("ok", True), row.text
        torch.set_float32_matmul_precision("medium")
        report = tk.check(tk.override("aten::mm", kernel, device="cpu"), args)
        assert report.ok, report.text
        torch.set_float32_matmul_precision("highest")
        wrong = tk.override("aten::mm", lambda x, y: kernel(x, y), device="cpu")
        assert tk.check(wrong, args).row("numerics").status == "failed", "it ignores the precision"


# -- scopes ----------------------------------------------------------------------------------------


def is_rounded() -> bool:
    third = torch.full((1, 1), 1 / 3)
    return bool((third @ torch.ones(1, 1)) != third)


def test_scopes_nest_and_leave_the_dispatcher_as_it_was() -> None:
    torch.set_float32_matmul_precision("medium")
    names = ("aten::mm", "aten::convolution", "aten::bmm")
    before = tables(*names)
    with tk.numerics("tpu"):
        assert is_rounded()
        with tk.numerics("exact"):
            assert not is_rounded()
            with tk.numerics("tpu"):
                assert is_rounded()
        assert is_rounded()
    assert not is_rounded()
    assert tables(*names) == before
    assert tk.overrides() == [] or all("numerics" not in r.impl for r in tk.overrides())


def test_a_scope_is_of_its_thread_and_enable_of_all() -> None:
    torch.set_float32_matmul_precision("medium")
    seen: list[bool] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(is_rounded()))
        thread.start()
        thread.join()

    with tk.numerics("tpu"):
        look()
    mode = tk.numerics("tpu").enable()
    try:
        assert is_rounded()
        look()
        with tk.numerics("exact"):
            assert not is_rounded()
    finally:
        mode.disable()
        mode.disable()
    look()
    assert seen == [False, True, False]


def test_it_decorates_and_refuses_other_modes() -> None:
    torch.set_float32_matmul_precision("medium")
    assert tk.numerics("tpu")(is_rounded)()
    assert not is_rounded()
    with pytest.raises(ArgumentError, match="exact"):
        tk.numerics("bf16")  # type: ignore[arg-type]


# -- compiled graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "device"),
    [("aot_eager", "cpu"), ("aot_eager", "tpu"), ("tpu", "tpu"), ("inductor", "cpu")],
)
def test_compiled_graphs_are_rounded_and_recompiled_for_each_mode(
    backend: str, device: str
) -> None:
    torch.compiler.reset()
    torch.set_float32_matmul_precision("medium")
    x, w = data(32, 256).to(device), data(256, 32, seed=1).to(device).requires_grad_()
    exact = (x.cpu().double() @ w.detach().cpu().double()).sin()

    def model(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin()

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        within(compiled(x, w), exact, "highest", slack=20)  # sin of values up to 50
        with tk.numerics("tpu"):
            result = compiled(x, w)
            (gradient,) = torch.autograd.grad(result.sum(), w)
            assert error(result, exact) > 1e-2
            eager = model(x, w)
            torch.testing.assert_close(result, eager, rtol=1e-4, atol=1e-4)
            (expected,) = torch.autograd.grad(eager.sum(), w)
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)
    torch.compiler.reset()
