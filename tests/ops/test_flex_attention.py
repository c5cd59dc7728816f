"""FlexAttention against float64 and against PyTorch's own, over mods, masks and gradients."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import tpu_kernels.device  # noqa: F401
from tests.ops.attention_cases import assert_close
from tests.ops.flex_cases import PROBLEMS, Problem, alibi, exact, inputs, normal, results
from tpu_kernels._compat_jax import cpu_device
from tpu_kernels.errors import ArgumentError, TraceError
from tpu_kernels.ops import flex_attention
from tpu_kernels.ops.attention_blocks import FIRST, LAST
from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.flex import flex_attention_kernel
from tpu_kernels.ops.flex_blocks import EMPTY, FULL, Sparsity, kinds_of, lists_of, patterns
from tpu_kernels.ops.flex_call import call_of, wanted_gradients
from tpu_kernels.ops.flex_hop import flex_fallbacks
from tpu_kernels.ops.flex_operands import hoist
from tpu_kernels.ops.flex_plan import keeps_everything
from tpu_kernels.ops.flex_program import parse
from tpu_kernels.ops.flex_trace import trace

SMALL = {"block_q": 128, "block_kv": 128}
BOTH = AuxRequest(lse=True, max_scores=True)


# A kernel compiles for several seconds here; the rest runs with TPU_KERNELS_FLEX=all.
whole = pytest.mark.skipif(os.environ.get("TPU_KERNELS_FLEX") != "all", reason="takes minutes")


def ours(problem: Problem, *, listed: bool = True, **config: Any) -> list[torch.Tensor]:
    """By a BlockMask, or by the mask_mod alone, whose kernel has fewer branches to compile."""
    q, k, v = problem.q, problem.k, problem.v
    mask = {"block_mask": problem.block_mask()} if listed else {"mask_mod": problem.mask_mod}
    out, aux = flex_attention(
        q, k, v, problem.score_mod, enable_gqa=True, return_aux=BOTH, **mask, **config
    )
    return results(out, aux.lse, problem.leaves)


@pytest.mark.parametrize("name", ["dense_bias_in_a_window", "neighbourhood", "pages"])
def test_results_are_as_exact_as_rounding_allows(name: str) -> None:
    problem = PROBLEMS[name]()
    with torch.no_grad():
        assert_close(ours(problem, listed=False, **SMALL), exact(problem), torch.float32)


def test_all_gradients_are_as_exact_as_rounding_allows() -> None:
    problem = PROBLEMS["everything_captured"]()
    assert_close(ours(problem, listed=False, **SMALL), exact(problem), torch.float32)


@whole
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_every_problem_are_as_exact_as_rounding_allows(name: str) -> None:
    problem = PROBLEMS[name]()
    assert_close(ours(problem, **SMALL), exact(problem), torch.float32)


def test_parts_beside_the_diagonal_are_neither_masked_nor_computed() -> None:
    """A block of two parts each way has branches of its own for both sides of a diagonal."""
    q, k, v = inputs(heads=(1, 1), lengths=(400, 400), dtype=torch.bfloat16)
    problem = Problem(q, k, v, mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= 256))
    config = {"block_q": 256, "block_kv": 256, "part_q": 128, "part_kv": 128}
    with torch.no_grad():
        assert_close(ours(problem, **config), exact(problem), torch.bfloat16)


lengths = st.integers(1, 30) | st.integers(120, 280)


# An example costs two compilations, so no shrinking: the first failure is small enough to read.
@settings(max_examples=1, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    lengths=st.tuples(lengths, lengths),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    batch=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    distance=st.integers(-20, 150),
)
def test_any_shape_is_as_exact(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    batch: int,
    dtype: torch.dtype,
    distance: int,
) -> None:
    problem = Problem(
        *inputs(batch, heads, lengths, 24, dtype),
        mask_mod=lambda b, h, q, k: q - k <= distance + 3 * h,
    )
    with torch.no_grad():
        assert_close(ours(problem, listed=False, **SMALL), exact(problem), dtype)


def on_the_device(problem: Problem, *, backend: str | None) -> list[torch.Tensor]:
    """PyTorch's function on the device "tpu"; ALiBi's mods, whose slopes live there."""
    q, k, v, slopes = (x.detach().to("tpu").requires_grad_() for x in problem.leaves)
    mask = create_block_mask(problem.mask_mod, None, None, 150, 150, device="tpu")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch_flex_attention(
            q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i) / 50, mask,
            enable_gqa=True, return_aux=BOTH,
        )  # fmt: skip

    if backend is not None:
        attend = torch.compile(attend, backend=backend, fullgraph=True)
    out, aux = attend(q, k, v)
    assert torch.isfinite(aux.max_scores).all()
    return results(out, aux.lse, [q, k, v, slopes])


def test_pytorchs_function_runs_the_kernels_eager_and_compiled() -> None:
    problem = alibi()
    wanted = exact(problem)
    before = dict(flex_fallbacks()), flex_attention_kernel.stats().launches
    with torch.no_grad():
        assert_close(on_the_device(problem, backend=None), wanted[:2], torch.float32)
    assert_close(on_the_device(problem, backend="tpu"), wanted, torch.float32)
    assert flex_fallbacks() == before[0]
    assert flex_attention_kernel.stats().launches >= before[1] + 2


def test_pytorchs_dense_math_agrees() -> None:
    q, k, v = (x.detach() for x in inputs(batch=2))
    row = normal(2, 150).detach()

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return s * row[b, i].sigmoid()

    mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < 60, None, None, 150, 150, "cpu")
    with torch.no_grad():
        wanted, aux = dense(q, k, v, score_mod, mask)
        got, mine = flex_attention(
            q, k, v, score_mod, mask, enable_gqa=True, return_aux=BOTH, **SMALL
        )
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(mine.lse, aux)


def dense(q: Any, k: Any, v: Any, score_mod: Any, mask: Any) -> tuple[Any, Any]:
    """The function that PyTorch runs on devices without a kernel; its lse is in base 2."""
    from tpu_kernels._compat_torch import flex_dense_math

    scale = 1 / math.sqrt(q.shape[-1])
    out, lse, _ = flex_dense_math()[0](q, k, v, score_mod, mask.as_tuple(), scale, {}, (), ())
    return out, lse * math.log(2)


def test_a_mod_without_a_kernel_falls_back_to_dense_math_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = torch.randn(8, device="tpu")
    q = torch.randn(1, 1, 20, 8, device="tpu")

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return s + table[(s * 0).int()]

    with caplog.at_level(logging.WARNING, "tpu_kernels.flex_attention"):
        out = torch_flex_attention(q, q, q, score_mod)
    reason = "the score_mod computes aten.index.Tensor of the score"
    assert flex_fallbacks()[reason] == 1
    assert reason in caplog.text
    plain = flex_attention(q, q, q, lambda s, b, h, i, j: s + table[0])
    torch.testing.assert_close(out.cpu(), plain.cpu())


def test_the_tpu_interpreter_agrees() -> None:
    q, k, v = inputs(heads=(1, 1), lengths=(130, 130))
    table = normal(130)
    call = call_of(
        lambda s, b, h, i, j: s + table[j], lambda b, h, i, j: i >= j, [], (128, 128), "cpu"
    )
    tensors, buffers, *rest = call.arguments
    wanted = flex_attention_kernel(q, k, v, tensors, buffers, *rest, **SMALL)
    bound = flex_attention_kernel.bind(q, k, v, tensors, buffers, *rest, config=SMALL)
    with jax.default_device(cpu_device()):
        arrays = [jnp.asarray(x.detach().numpy()) for x in bound.tensors]
        got = jax.jit(bound.function(interpret=pltpu.InterpretParams()))(*arrays)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_block_mask_alone_masks() -> None:
    """Without a mask_mod, the blocks that a BlockMask lists are all that is seen."""
    q, k, v = (x.detach() for x in inputs(heads=(1, 1), lengths=(256, 256)))
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, torch.tensor([[[[1, 0], [0, 1]]]]).int())
    out = flex_attention(q, k, v, block_mask=mask)
    other = torch.nn.functional.scaled_dot_product_attention
    wanted = [other(q[:, :, :128], k[:, :, 128:], v[:, :, 128:])]
    wanted.append(other(q[:, :, 128:], k[:, :, :128], v[:, :, :128]))
    torch.testing.assert_close(out, torch.cat(wanted, dim=2))


# What needs no kernel -----------------------------------------------------------------------------


@given(
    lengths=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    blocks=st.sampled_from([(128, 128, 128, 128), (256, 256, 128, 128), (512, 256, 128, 128)]),
    low=st.integers(-300, 300),
    width=st.integers(0, 600),
    size=st.sampled_from([128, 256]),
    by_keys=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_lists_visit_what_the_mask_leaves_and_patterns_hide_nothing(
    lengths: tuple[int, int],
    blocks: tuple[int, int, int, int],
    low: int,
    width: int,
    size: int,
    by_keys: bool,
) -> None:
    queries, keys = lengths
    rows, columns = -(-queries // size), -(-keys // size)
    distance = np.arange(rows * size)[:, None] - np.arange(columns * size)
    keep = (distance >= low) & (distance <= low + width)
    keep &= (np.arange(rows * size)[:, None] < queries) & (np.arange(columns * size) < keys)
    tiles = keep.reshape(rows, size, columns, size).transpose(0, 2, 1, 3).reshape(rows, columns, -1)
    whole, some = tiles.all(-1), tiles.any(-1)

    def listed(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
        return chosen.sum(1).astype(np.int32)[None, None], order[None, None]

    sparsity = Sparsity(*listed(some & ~whole), *listed(whole), (size, size))
    shape, chosen = Shape(1, 1, 1, queries, keys, 16, 16), Blocks(*blocks)
    kinds = kinds_of(sparsity, False, shape, chosen, 128)
    lists = lists_of(kinds, by_keys=by_keys)
    seen = np.zeros((kinds.shape[2] * chosen.q, kinds.shape[3] * chosen.kv), bool)
    outer = (lists.words >> 16) if by_keys else lists.words & 0xFFFF
    for word, flags in zip(lists.words.tolist(), lists.flags.tolist(), strict=True):
        i, j, kind = word & 0xFFFF, word >> 16, (flags & 0xFF) >> 2
        if kind == EMPTY:
            continue
        states = patterns(chosen, 128)[kind - 1].states.repeat(128, 0).repeat(128, 1)
        corner = np.zeros_like(states, dtype=bool)
        part = keep[i * chosen.q : (i + 1) * chosen.q, j * chosen.kv : (j + 1) * chosen.kv]
        corner[: part.shape[0], : part.shape[1]] = part
        assert not (corner & (states == EMPTY)).any()
        exists = np.zeros_like(corner)
        exists[: queries - i * chosen.q] = True
        assert not (~corner & (states == FULL) & exists).any()
        seen[i * chosen.q :, j * chosen.kv :][: chosen.q, : chosen.kv] |= states != EMPTY
    assert not (
        keep & ~np.pad(seen, ((0, size), (0, size)))[: keep.shape[0], : keep.shape[1]]
    ).any()
    assert set(outer.tolist()) == set(range(kinds.shape[3 if by_keys else 2]))
    firsts, lasts = ((lists.flags & bit != 0).tolist() for bit in (FIRST, LAST))
    assert firsts == [True, *(outer[1:] != outer[:-1]).tolist()]
    assert lasts == [*(outer[1:] != outer[:-1]).tolist(), True]


def test_lists_made_at_run_time_are_the_same() -> None:
    kinds = np.random.default_rng(0).integers(0, 3, (2, 4, 3, 5))
    options = {"by_keys": True, "group": 2}
    now = lists_of(kinds, **options)
    with jax.default_device(cpu_device()):
        words, flags, count = jax.jit(lambda kinds: lists_of(kinds, **options)[1:4])(kinds)
    assert int(count) == now.count
    for a, b in ((now.words, words), (now.flags, flags)):
        rows = np.asarray(b).reshape(4, -1)[:, : now.count]
        assert np.array_equal(a.reshape(4, now.count), rows)


def test_what_indices_allow_becomes_a_block_and_the_rest_a_gather() -> None:
    slopes, ids, bias, table = torch.ones(2), torch.ones(9), torch.ones(2, 9, 9), torch.ones(20)

    def kinds(mod: Any) -> list[str]:
        return [x.kind for x in hoist(parse(trace(mod, (), scored=True, device="cpu").text))]

    assert kinds(lambda s, b, h, q, k: s + slopes[h] * (q - k)) == ["number"]
    assert kinds(lambda s, b, h, q, k: s + (ids[q] == ids[k])) == ["row", "column"]
    assert kinds(lambda s, b, h, q, k: s + bias[h, q, k]) == ["matrix"]
    assert kinds(lambda s, b, h, q, k: s + table[q - k]) == ["matrix"]
    assert kinds(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)) == []


def test_control_flow_on_values_is_refused_with_the_mods_name() -> None:
    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(TraceError, match="score_mod cannot be traced"):
        flex_attention(x, x, x, lambda s, b, h, q, k: s if q > k else -s)
    wide = torch.ones(4, dtype=torch.float64)
    with pytest.raises(TraceError, match="float64"):
        flex_attention(x, x, x, lambda s, b, h, q, k: s + wide[q])
    with pytest.raises(ArgumentError, match="enable_gqa"):
        flex_attention(x.expand(1, 2, 4, 8), x, x)


def test_backward_operator_computes_only_the_gradients_that_are_wanted() -> None:
    graph = torch.fx.symbolic_trace(lambda s, b, h, q, k, one, two: (s, b, h, q, k, None, two))
    assert wanted_gradients(graph, [torch.ones(1), torch.ones(1)]) == (1,)
    with pytest.raises(TraceError, match="backward graph"):
        wanted_gradients(torch.fx.symbolic_trace(lambda s: s), [])


def test_a_mask_that_keeps_everything_is_none() -> None:
    everything = trace(lambda b, h, q, k: q.new_ones((), dtype=torch.bool), (), scored=False,
                       device="cpu").text  # fmt: skip
    causal = trace(lambda b, h, q, k: q >= k, (), scored=False, device="cpu").text
    assert keeps_everything(everything)
    assert not keeps_everything(causal)
