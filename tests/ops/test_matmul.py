"""`tpu::matmul` and `tpu::bmm` against float64, over shapes, dtypes, orientations and blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

import tpu_kernels as tk
from tpu_kernels._compat_jax import cpu_device
from tpu_kernels.ops import bmm, matmul
from tpu_kernels.ops.matmul_blocks import bucket, choose_blocks, fits, vmem_need
from tpu_kernels.ops.matmul_plan import Operands, Plan
from tpu_kernels.ops.tiles import DEFAULT_VMEM, LANES, sublanes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLAGS = (False, True)
ORIENTATIONS = list(itertools.product(FLAGS, FLAGS))


def operands(
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    flags: tuple[bool, bool] = (False, False),
    batch: tuple[int, ...] = (),
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal data for x [M, K] and y [K, N], stored as the flags say."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, *((k, m) if flags[0] else (m, k)), generator=generator)
    y = torch.randn(*batch, *((n, k) if flags[1] else (k, n)), generator=generator)
    return x.to(dtypes[0]), y.to(dtypes[1])


def assert_product(
    out: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    flags: tuple[bool, bool] = (False, False),
    *,
    split: bool = False,
) -> None:
    """Compare with float64, element by element, within what rounding can explain.

    The products of bfloat16 or float16 operands are exact in float32. Adding K of them in float32,
    in any order, is off by at most K eps32 times the sum of their absolute values (Higham, Accuracy
    and Stability, 3.1), and rounding to the output's dtype adds half an eps of that. Split operands
    ("high", and float16) lose the low x low product and what two bfloat16 do not hold, together
    less than 3 x 2^-16 of each product, and have three times the additions.
    """
    left = x.double().mT if flags[0] else x.double()
    right = y.double().mT if flags[1] else y.double()
    exact, magnitude = left @ right, left.abs() @ right.abs()
    terms = left.shape[-1] * (3 if split else 1)
    relative = terms * torch.finfo(torch.float32).eps + (3 * 2**-16 if split else 0)
    bound = relative * magnitude + torch.finfo(out.dtype).eps * exact.abs() / 2
    # Half an eps does not hold below the smallest normal number, where float16 has fewer bits.
    bound += torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    excess = ((out.double() - exact).abs() - bound).max().item()
    assert excess <= 0, f"beyond the bound by {excess:.3g}"


sizes = st.integers(1, 40) | st.integers(100, 300)
blocks = st.sampled_from([None, 128, 256])


# An example costs two compilations, so no shrinking: the first failure is small enough to read.
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    shape=st.tuples(sizes, sizes, sizes),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    flags=st.sampled_from(ORIENTATIONS),
    precision=st.sampled_from([None, "high", "highest"]),
    block=st.tuples(blocks, blocks, blocks),
)
@example((130, 300, 200), (torch.float32,) * 2, (False, False), None, (128, 128, 128))
@example((130, 300, 200), (torch.bfloat16,) * 2, (True, True), None, (128, 128, 128))
@example((1, 1, 1), (torch.bfloat16, torch.float32), (False, True), "high", (None, None, None))
def test_a_product_is_as_exact_as_float32_sums_are(
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    flags: tuple[bool, bool],
    precision: str | None,
    block: tuple[int | None, int | None, int | None],
) -> None:
    x, y = operands(shape, dtypes, flags)
    out = matmul(
        x,
        y,
        transpose_x=flags[0],
        transpose_y=flags[1],
        precision=precision,
        block_m=block[0],
        block_n=block[1],
        block_k=block[2],
    )
    assert out.dtype == torch.promote_types(*dtypes)
    split = torch.float16 in dtypes or (out.dtype == torch.float32 and precision == "high")
    assert_product(out, x, y, flags, split=split)


@pytest.mark.parametrize("flags", ORIENTATIONS)
def test_a_batch_is_multiplied_matrix_by_matrix(flags: tuple[bool, bool]) -> None:
    x, y = operands((20, 150, 12), flags=flags, batch=(3,))
    options = {"transpose_x": flags[0], "transpose_y": flags[1], "block_k": 128}
    assert_product(bmm(x, y, **options), x, y, flags)


def gradients(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """First derivatives of a weighted sum, and second ones: those of the first's squared norm."""
    leaves = [v.detach().clone().requires_grad_() for v in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    first = torch.autograd.grad((out * out * weights).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((g * g).sum() for g in first), leaves)
    return [*first, *second]


@pytest.mark.parametrize("flags", ORIENTATIONS)
def test_first_and_second_derivatives_match_float64(flags: tuple[bool, bool]) -> None:
    x, y = operands((20, 140, 30), flags=flags)

    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.mT if flags[0] else a) @ (b.mT if flags[1] else b)

    ours = gradients(
        lambda a, b: matmul(a, b, transpose_x=flags[0], transpose_y=flags[1], block_k=128), x, y
    )
    for got, wanted in zip(ours, gradients(exact, x.double(), y.double()), strict=True):
        # Up to four products in a row, of at most 140 terms each: normwise 4 x 140 x eps32 = 7e-5.
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 7e-5


def test_a_gradient_has_the_dtype_of_its_input() -> None:
    x, y = operands((16, 24, 8), (torch.bfloat16, torch.float32))
    x.requires_grad_(), y.requires_grad_()
    matmul(x, y).sum().backward()
    assert (x.grad.dtype, y.grad.dtype) == (torch.bfloat16, torch.float32)
    assert_product(y.grad, x.detach(), torch.ones(16, 8), (True, False))


def test_nothing_to_add_up_gives_zeros() -> None:
    x, y = torch.ones(3, 0, requires_grad=True), torch.ones(0, 4, requires_grad=True)
    out = matmul(x, y)
    assert torch.equal(out, torch.zeros(3, 4))
    out.sum().backward()
    assert (x.grad.shape, y.grad.shape) == ((3, 0), (0, 4))


def test_an_empty_output_launches_nothing() -> None:
    before = matmul.stats().launches
    assert matmul(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)
    assert bmm(torch.ones(0, 2, 3), torch.ones(0, 3, 4)).shape == (0, 2, 4)
    assert matmul.stats().launches == before


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_infinities_and_nans_come_out_as_float32_has_them(precision: str) -> None:
    x, y = torch.ones(8, 4), torch.full((4, 3), 2.0)
    x[0, 1], x[1, 2], x[2, 0] = torch.inf, -torch.inf, torch.nan
    y[0, 1] = torch.inf
    assert torch.equal(
        matmul(x, y, precision=precision).nan_to_num(nan=7.5), (x @ y).nan_to_num(nan=7.5)
    )


def test_views_are_read_through_their_strides() -> None:
    x, y = operands((24, 40, 16))
    wide = torch.randn(40, 33)
    assert_product(matmul(x.t().contiguous().t(), wide[:, 1:17]), x, wide[:, 1:17])
    assert_product(matmul(x, y[:, :1].expand(40, 5)), x, y[:, :1].expand(40, 5))


@pytest.fixture
def only_cpu() -> Iterator[None]:
    """JAX with no platform but the CPU, for what asks JAX for a device and so starts every one."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("only_cpu")
@pytest.mark.parametrize("flags", [(False, False), (True, True)])
def test_the_tpu_interpreter_agrees(flags: tuple[bool, bool]) -> None:
    """It fills what lies outside an array with NaN, so it sees every mask that is missing."""
    x, y = operands((24, 300, 140), flags=flags)
    bound = matmul.bind(
        x, y, transpose_x=flags[0], transpose_y=flags[1], config={"block_n": 128, "block_k": 128}
    )
    with jax.default_device(cpu_device()):
        (out,) = jax.tree.leaves(
            jax.jit(bound.function(interpret=pltpu.InterpretParams()))(x.numpy(), y.numpy())
        )
    assert_product(torch.from_numpy(np.array(out)), x, y, flags)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.ones(2, 3), torch.ones(4, 5)), {}, tk.ArgumentError, "[2, 3]"),
        ((torch.ones(2, 3), torch.ones(3)), {}, tk.ArgumentError, "'y' has 1 dimensions"),
        ((torch.ones(2, 3).int(), torch.ones(3, 4)), {}, tk.DTypeError, "'x' is int32"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"precision": "best"}, tk.ArgumentError, "'high'"),
        (
            (torch.ones(2, 300), torch.ones(300, 4)),
            {"block_k": 100},
            tk.ConfigError,
            "multiple of 128",
        ),
    ],
)
def test_a_wrong_call_is_refused_with_the_reason(
    arguments: tuple[torch.Tensor, torch.Tensor],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match="tpu::matmul") as caught:
        matmul(*arguments, **options)
    assert words in str(caught.value)


def test_the_operators_pass_opcheck() -> None:
    x, y = operands((10, 6, 9))
    torch.library.opcheck(matmul.op, (x.requires_grad_(), y.requires_grad_()))
    x, y = operands((10, 6, 9), (torch.bfloat16,) * 2, (False, True), batch=(2,))
    torch.library.opcheck(bmm.op, (x.requires_grad_(), y), {"transpose_y": True})


def test_the_simulated_device_computes_what_the_cpu_does() -> None:
    x, y = operands((20, 40, 30))
    out = torch.ops.tpu.matmul(x.to("tpu"), y.to("tpu"))
    assert out.device.type == "tpu"
    assert torch.equal(out.cpu(), matmul(x, y))


# Blocks -------------------------------------------------------------------------------------------

anything = st.integers(1, 20_000)


@given(
    shape=st.tuples(anything, anything, anything),
    dtypes=st.tuples(st.sampled_from(["bfloat16", "float32"]), st.just("float32"))
    | st.just(("bfloat16", "bfloat16")),
    flags=st.sampled_from(ORIENTATIONS),
    precision=st.sampled_from([None, "high", "highest"]),
)
def test_the_heuristic_makes_whole_tiles_that_fit_every_chip(
    shape: tuple[int, int, int],
    dtypes: tuple[str, str],
    flags: tuple[bool, bool],
    precision: str | None,
) -> None:
    m, k, n = shape
    x = jax.ShapeDtypeStruct((k, m) if flags[0] else (m, k), dtypes[0])
    y = jax.ShapeDtypeStruct((n, k) if flags[1] else (k, n), dtypes[1])
    out = "bfloat16" if dtypes == ("bfloat16", "bfloat16") else "float32"
    plan = Plan("tpu::matmul", *flags, np.dtype(jax.numpy.dtype(out)), precision)
    chosen = choose_blocks(Operands(x, y), plan)
    cut = {  # (array, dtype) -> (block rows, rows, block columns, columns)
        (dtypes[0], x.shape): (chosen.k, chosen.m) if flags[0] else (chosen.m, chosen.k),
        (dtypes[1], y.shape): (chosen.n, chosen.k) if flags[1] else (chosen.k, chosen.n),
        (out, (m, n)): (chosen.m, chosen.n),
    }
    for (dtype, whole), (rows, columns) in cut.items():
        assert rows == whole[0] or rows % sublanes(jax.numpy.dtype(dtype)) == 0
        assert columns == whole[1] or columns % LANES == 0
    assert vmem_need(Operands(x, y), plan, chosen) <= DEFAULT_VMEM


def test_constraints_say_why_a_config_is_not_worth_trying() -> None:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert fits(x, x, 512, 1024, 512) is True
    assert fits(x, x, None, None, None) is True
    assert "MiB" in str(fits(x, x, 4096, 4096, 1024))
    assert "multiple" in str(fits(x, x, 100, 1024, 512)) or "tiles" in str(
        fits(x, x, 100, 128, 128)
    )
    assert "same" in str(fits(x[:64], x, 1024, 1024, 512))
    assert bucket(x[:600], x[:, :1]) == (1024, 4096, 4096, 128)


# The real compiler --------------------------------------------------------------------------------


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("dtypes", "flags", "options"),
    [
        ((torch.bfloat16, torch.bfloat16), (False, True), {}),
        ((torch.bfloat16, torch.float32), (True, False), {"precision": "highest", "block_k": 128}),
        ((torch.float16, torch.float16), (True, True), {}),  # goes through "high"
    ],
)
def test_every_generation_compiles_it(
    dtypes: tuple[torch.dtype, torch.dtype], flags: tuple[bool, bool], options: dict[str, Any]
) -> None:
    x, y = operands((300, 700, 260), dtypes, flags)
    reports = tk.compile(
        matmul,
        (x, y),
        ["v4", "v5e", "v5p", "v6e", "tpu7x"],
        transpose_x=flags[0],
        transpose_y=flags[1],
        **options,
    )
    refused = [report.text for report in reports.values() if not report.ok]
    assert not refused, "\n".join(refused)
