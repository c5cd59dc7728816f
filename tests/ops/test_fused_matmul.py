"""What is fused to matrix products: values and gradients against float64, pieces, chips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

import tpu_kernels as tk
from tpu_kernels._compat_jax import cpu_device
from tpu_kernels.ops import bmm, gated_matmul, matmul, matmul_blocks
from tpu_kernels.ops.epilogue import ACTIVATIONS
from tpu_kernels.ops.matmul import gated_reference, reference
from tpu_kernels.ops.matmul_blocks import heuristic_blocks, pieces, vmem_need
from tpu_kernels.ops.matmul_gradients import product
from tpu_kernels.ops.matmul_plan import Operands, Plan

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CHIPS = ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(out: torch.Tensor, exact: torch.Tensor, factor: float = 1.0) -> None:
    """Within what sums in float32 and one rounding to the output's dtype explain, normwise.

    Data are normal and K at most 300: a sum is off by at most 300 eps32 of the sum of magnitudes,
    which is below 20 times the norm of the result; activations have slopes up to 2 (and "relu2"
    2 |z|), `factor` is for what they do to gradients.
    """
    assert out.shape == exact.shape
    error = (out.double() - exact).norm() / exact.norm().clamp_min(1e-3)
    allowed = factor * 1e-5 + torch.finfo(out.dtype).eps
    assert error <= allowed, f"{error:.2g} instead of {allowed:.2g}"


sizes = st.integers(1, 40) | st.integers(100, 200)


# An example costs a compilation, so no shrinking: the first failure is small enough to read.
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    shape=st.tuples(sizes, sizes, sizes),
    dtypes=st.tuples(*[st.sampled_from([F32, BF16, F16])] * 2),
    flags=st.tuples(st.booleans(), st.booleans()),
    bias=st.sampled_from([None, "row", "line", "column", "all", "one"]),
    residual=st.sampled_from([None, "all", "row"]),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    factors=st.sampled_from([(1.0, 1.0), (-0.5, 2.0)]),
)
@example((130, 20, 150), (BF16, BF16), (False, True), "row", "all", "gelu", (1.0, 1.0))
@example((20, 130, 150), (F32, BF16), (True, False), "column", "row", "silu", (-0.5, 2.0))
def test_what_is_fused_is_what_float64_computes(
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    flags: tuple[bool, bool],
    bias: str | None,
    residual: str | None,
    activation: str | None,
    factors: tuple[float, float],
) -> None:
    m, n, k = shape
    shapes = {"row": (n,), "line": (1, n), "column": (m, 1), "all": (m, n), "one": ()}
    x = normal(*((k, m) if flags[0] else (m, k)), dtype=dtypes[0])
    y = normal(*((n, k) if flags[1] else (k, n)), dtype=dtypes[1], seed=1)
    added = [
        None if kind is None else normal(*shapes[kind], dtype=dtypes[0], seed=i)
        for i, kind in enumerate((bias, residual))
    ]
    options = {
        "transpose_x": flags[0],
        "transpose_y": flags[1],
        "activation": activation,
        "alpha": factors[0],
        "beta": factors[1],
    }
    out = matmul(x, y, *added, **options, block_k=128, precision="highest")
    assert out.dtype == torch.promote_types(*dtypes)
    wide = [None if a is None else a.double() for a in (x, y, *added)]
    # float16 is split in two bfloat16, whose low x low products are lost.
    assert_close(out, reference(*wide, **options), factor=8.0 if F16 in dtypes else 2.0)


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Value, gradients, and gradients of the gradients' squared norm."""
    leaves = [v.detach().clone().requires_grad_() for v in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    first = torch.autograd.grad((out * weights).sum(), leaves, create_graph=True)
    norm = sum((g * g).sum() for g in first)
    second = torch.autograd.grad(norm, leaves, materialize_grads=True)
    return [out.detach(), *first, *second]


@pytest.mark.parametrize("activation", ["gelu", None])
def test_first_and_second_derivatives_match_float64(activation: str | None) -> None:
    inputs = [normal(20, 30), normal(25, 30, seed=1), normal(25), normal(20, 25, seed=2)]
    options = {"transpose_y": True, "activation": activation, "alpha": 0.5, "beta": 2.0}
    got = gradients(lambda *a: matmul(*a, **options), *inputs)
    wanted = gradients(lambda *a: reference(*a, **options), *(v.double() for v in inputs))
    for ours, exact in zip(got, wanted, strict=True):
        assert_close(ours.detach(), exact.detach(), factor=10.0)


def test_a_gated_product_and_its_derivatives_match_float64() -> None:
    inputs = [normal(20, 30), normal(25, 30, seed=1), normal(25, 30, seed=2), normal(1, 25)]
    options = {"transpose_y": True, "activation": "silu"}
    got = gradients(lambda *a: gated_matmul(*a, **options), *inputs)
    wanted = gradients(lambda *a: gated_reference(*a, **options), *(v.double() for v in inputs))
    for ours, exact in zip(got, wanted, strict=True):
        assert_close(ours.detach(), exact.detach(), factor=10.0)


def test_the_gradients_of_a_batch_in_three_passes() -> None:
    inputs = [normal(2, 30, 20), normal(2, 30, 25, seed=1), normal(2, 1, 25), normal(20, 1)]
    leaves = [v.requires_grad_() for v in inputs]
    wide = [v.detach().double().requires_grad_() for v in inputs]
    options = {"transpose_x": True, "activation": "relu"}
    bmm(*leaves, **options, precision="high").square().sum().backward()
    reference(*wide, **options).square().sum().backward()
    for leaf, exact in zip(leaves, wide, strict=True):
        # Each pass drops 3 x 2^-16 of a product at most, and two of them follow each other.
        assert_close(leaf.grad, exact.grad, factor=10.0)


def test_a_gradient_has_the_dtype_and_shape_of_its_operand() -> None:
    x, y = normal(16, 24, dtype=BF16), normal(24, 8)
    bias, residual = normal(8, dtype=BF16), normal(16, 1)
    leaves = [v.requires_grad_() for v in (x, y, bias, residual)]
    matmul(*leaves, activation="tanh").sum().backward()
    for leaf in leaves:
        assert (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape)


def test_nothing_to_add_up_leaves_the_epilogue() -> None:
    bias = torch.tensor([-1.0, 2.0])
    out = matmul(torch.ones(3, 0), torch.ones(0, 2), bias, activation="relu")
    assert torch.equal(out, torch.relu(bias).expand(3, 2))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((torch.ones(2, 3), torch.ones(3, 4), torch.ones(3)), {}, "'bias' [3] does not broadcast"),
        (
            (torch.ones(2, 3), torch.ones(3, 4), None, torch.ones(1, 2, 4)),
            {},
            "'residual' [1, 2, 4]",
        ),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"activation": "elu"}, "'gelu_tanh'"),
    ],
)
def test_a_wrong_call_is_refused_with_the_reason(
    arguments: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(tk.ArgumentError, match="tpu::matmul") as caught:
        matmul(*arguments, **options)
    assert words in str(caught.value)


def test_two_right_operands_must_agree() -> None:
    with pytest.raises(tk.ArgumentError, match="two right operands"):
        gated_matmul(torch.ones(2, 3), torch.ones(3, 4), torch.ones(3, 5))


def test_the_operator_passes_opcheck() -> None:
    inputs = [v.requires_grad_() for v in (normal(10, 6), normal(9, 6), normal(9), normal(10, 9))]
    torch.library.opcheck(
        matmul.op,
        inputs,
        {"transpose_y": True, "activation": "silu"},
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# Pieces and interpreters --------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of everyday sizes are computed in several pieces, as large ones are."""
    monkeypatch.setattr(matmul_blocks, "_PIECE", 8.0)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")  # the TPU interpreter asks JAX for its devices
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("interpret", "gated"), [(True, True), ("tpu", False)])
def test_pieces_make_the_block_in_both_interpreters(interpret: Any, gated: bool) -> None:
    """The TPU's fills what lies outside an array with NaN: it sees every mask that is missing."""
    m, n, k = 80, 500, 300
    x, y, up = normal(m, k), normal(n, k, seed=1), normal(n, k, seed=2)
    bias, residual = normal(n), normal(m, n, seed=3)
    plan = Plan(
        "tpu::matmul",
        False,
        True,
        jnp.dtype("float32"),
        blocks=(64, 256, 128),
        activation="silu",
        interpret=pltpu.InterpretParams() if interpret == "tpu" else interpret,
    )
    arrays = [x, y, up if gated else None, None if gated else bias, residual]
    operands = Operands(*(None if a is None else a.numpy() for a in arrays))
    piece = pieces(operands, plan, matmul_blocks.choose_blocks(operands, plan))
    assert (piece.m, piece.n) == (16 if gated else 32, 128)
    with jax.default_device(cpu_device()):
        out = jax.jit(lambda *a: product(Operands(*a), plan))(*operands)
    if gated:
        exact = gated_reference(
            x.double(), y.double(), up.double(), residual.double(), transpose_y=True
        )
    else:
        exact = reference(
            *(v.double() for v in (x, y, bias, residual)), transpose_y=True, activation="silu"
        )
    assert_close(torch.from_numpy(np.array(out)), exact, factor=2.0)


# Chips --------------------------------------------------------------------------------------------

anything = st.integers(1, 20_000)


@settings(max_examples=40)
@given(
    shape=st.tuples(anything, anything, anything),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    flags=st.tuples(st.booleans(), st.booleans()),
    precision=st.sampled_from([None, "high", "highest"]),
    gated=st.booleans(),
    kind=st.sampled_from(CHIPS),
)
def test_the_heuristic_fits_the_chip_and_cuts_whole_tiles(
    shape: tuple[int, int, int],
    dtype: str,
    flags: tuple[bool, bool],
    precision: str | None,
    gated: bool,
    kind: str,
) -> None:
    m, n, k = shape
    x = jax.ShapeDtypeStruct((k, m) if flags[0] else (m, k), dtype)
    y = jax.ShapeDtypeStruct((n, k) if flags[1] else (k, n), dtype)
    operands = Operands(x, y, y if gated else None)
    plan = Plan("tpu::matmul", *flags, jnp.dtype(dtype), precision)
    chip = matmul_blocks._machine(kind)
    blocks = heuristic_blocks(operands, plan, chip)
    assert vmem_need(operands, plan, blocks) <= chip.vmem
    multiples = plan.multiples(x, y)
    for block, size, multiple in zip(blocks, shape, multiples, strict=True):
        assert block == size or (block < size and block % multiple == 0)
    piece = pieces(operands, plan, blocks, chip)
    for part, block, multiple in zip(piece, blocks, multiples, strict=True):
        assert block % part == 0
        assert part == block or part % multiple == 0


def test_a_larger_chip_gets_larger_blocks() -> None:
    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    plan = Plan("tpu::matmul", False, False, jnp.dtype("bfloat16"))
    need = {
        kind: vmem_need(
            Operands(x, x),
            plan,
            heuristic_blocks(Operands(x, x), plan, matmul_blocks._machine(kind)),
        )
        for kind in (None, *CHIPS)
    }
    assert need[None] < need["TPU v6 lite"]
    assert need["TPU7x"] < need["TPU v6 lite"]


@pytest.mark.libtpu
def test_every_generation_compiles_what_is_fused() -> None:
    x, y, bias = normal(300, 700, dtype=BF16), normal(520, 700, dtype=BF16), normal(520, dtype=BF16)
    residual = normal(300, 520, dtype=BF16)
    chips = ["v5e", "v5p", "v6e", "tpu7x"]
    options = {"transpose_y": True, "block_m": 128, "block_k": 256}
    fused = tk.compile(matmul, (x, y, bias, residual), chips, activation="gelu", **options)
    gated = tk.compile(gated_matmul, (x, y, y, residual), chips, **options)
    refused = [r.text for reports in (fused, gated) for r in reports.values() if not r.ok]
    assert not refused, "\n".join(refused)
