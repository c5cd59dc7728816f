"""The demands of Pallas calls, against grids that are walked step by step."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.compiler.chips import resolve
from tpu_kernels.compiler.cost.figures import ModuleEstimate
from tpu_kernels.compiler.pallas_grid import argument_of, grid_calls
from tpu_kernels.compiler.pallas_model import PallasModel, pallas_models
from tpu_kernels.compiler.report import CompileReport
from tpu_kernels.tuning.objective import CostModel, Evidence, Roofline

V6E = resolve("v6e").chip
MIB = 1 << 20


def model_of(fn, *shapes: tuple[int, ...], dtype: str = "float32") -> PallasModel:
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    (model,) = pallas_models(jax.make_jaxpr(fn)(*arrays))
    return model


def matmul(block: tuple[int, int, int], *, scratch: bool = False, limit: int | None = None):
    bm, bn, bk = block

    def body(a, b, o, *acc):
        o[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def fn(x, y):
        (m, k), n = x.shape, y.shape[1]
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
            grid=(pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, step: (i, step)),
                pl.BlockSpec((bk, bn), lambda i, j, step: (step, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, step: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)] if scratch else [],
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
        )(x, y)

    return fn


@settings(max_examples=25, deadline=None)
@given(
    steps=st.tuples(*[st.integers(1, 4)] * 3),
    block=st.tuples(*[st.sampled_from([128, 256])] * 3),
)
def test_fetches_are_the_changes_of_the_block_index(
    steps: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    m, n, k = (s * b for s, b in zip(steps, block, strict=True))
    model = model_of(matmul(block), (m, k), (k, n))
    maps = [lambda i, j, step: (i, step), lambda i, j, step: (step, j), lambda i, j, step: (i, j)]
    for window, index_map in zip(model.windows, maps, strict=True):
        walk = [index_map(*at) for at in itertools.product(*map(range, steps))]
        changes = 1 + sum(a != b for a, b in itertools.pairwise(walk))
        assert window.fetches == changes
        assert window.buffers == (2 if len(set(walk)) > 1 else 1)
        assert window.bytes == 4 * math.prod(window.shape)
    assert model.steps == math.prod(steps)
    assert model.flops == {"float32": 2.0 * m * n * k}


def test_scratch_and_limits_count() -> None:
    plain = model_of(matmul((256, 256, 256)), (512, 512), (512, 512))
    model = model_of(matmul((256, 256, 256), scratch=True, limit=MIB), (512, 512), (512, 512))
    assert model.scratch_bytes == 256 * 256 * 4
    assert model.vmem_bytes == plain.vmem_bytes + model.scratch_bytes
    assert plain.overflow(V6E) is None
    assert "vmem_limit_bytes is 1.0 MiB" in str(model.overflow(V6E))


def test_an_overflow_names_kernel_figures_and_line() -> None:
    model = model_of(matmul((4096, 4096, 2048)), (4096, 4096), (4096, 4096), dtype="bfloat16")
    text = str(model.overflow(V6E))
    assert "'body' needs at least 128.0 MiB" in text
    assert "32.0 MiB" in text
    assert "test_pallas_model.py" in text
    raised = model_of(
        matmul((2048, 2048, 1024), limit=120 * MIB), (4096, 4096), (4096, 4096), dtype="bfloat16"
    )
    assert raised.overflow(V6E) is None
    assert "v5p has 64.0 MiB" in str(
        model_of(matmul((4096, 4096, 2048), limit=999 * MIB), (4096, 4096), (4096, 4096)).overflow(
            resolve("v5p").chip
        )
    )


def test_prefetched_indices_may_change_at_every_step_and_buffers_can_be_set() -> None:
    def body(table, x, o, counter):
        o[...] = x[...]

    def fn(table, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4, 2),
            in_specs=[
                pl.BlockSpec(
                    (None, 128, 128), lambda i, j, t: (t[i], 0, 0), pipeline_mode=pl.Buffered(3)
                )
            ],
            out_specs=pl.BlockSpec((None, 128, 128), lambda i, j, t: (i, 0, 0)),
            scratch_shapes=[pltpu.SMEM((8,), jnp.int32)],
        )
        return pl.pallas_call(body, grid_spec=spec, out_shape=x)(table, x)

    arrays = [jax.ShapeDtypeStruct((4,), "int32"), jax.ShapeDtypeStruct((4, 128, 128), "float32")]
    (model,) = pallas_models(jax.make_jaxpr(jax.jit(fn))(*arrays))
    source, result = model.windows
    assert (source.buffers, source.fetches) == (3, 8)
    assert (result.buffers, result.fetches) == (2, 4)
    assert model.scratch_bytes == 0


def test_calls_in_scans_count_their_trips_and_nested_dots_are_found() -> None:
    def body(x, o):
        def step(i, acc):
            return acc + jnp.dot(x[...], x[...], preferred_element_type=jnp.float32)

        o[...] = jax.lax.fori_loop(0, 3, step, jnp.zeros((128, 128), jnp.float32))

    def once(x):
        return pl.pallas_call(body, out_shape=x)(x)

    def fn(x):
        return jax.lax.scan(lambda c, _: (once(c), None), x, None, length=5)[0]

    model = model_of(fn, (128, 128))
    assert model.calls == 5
    assert model.flops == {"float32": 3 * 2.0 * 128**3}
    alone = model_of(once, (128, 128))
    assert model.cycles(V6E) == pytest.approx(5 * alone.cycles(V6E))


def test_the_roofline_is_peak_time_plus_steps() -> None:
    model = model_of(matmul((1024, 1024, 1024)), (4096, 4096), (4096, 4096), dtype="bfloat16")
    matrix = 2 * 4096**3 / 920e12 * V6E.clock_hz
    memory = model.hbm_bytes / 1640e9 * V6E.clock_hz
    assert model.cycles(V6E) == pytest.approx(max(matrix, memory) + 64 * 100)
    wide = model_of(matmul((1024, 1024, 1024)), (4096, 4096), (4096, 4096))
    assert wide.cycles(V6E) > model.cycles(V6E)


def test_objectives_fall_back_to_what_is_known() -> None:
    model = model_of(matmul((256, 256, 256)), (512, 512), (512, 512))
    known = Evidence(V6E, [model])
    roofline_us = 1e6 * model.cycles(V6E) / V6E.clock_hz
    assert CostModel().figure(known) == Roofline().figure(known) == roofline_us
    assert Roofline().figure(Evidence(V6E, [])) is None
    report = CompileReport("ok", "v6e", "k", bundles=9000)
    per_bundle = 1e6 / V6E.clock_hz
    assert CostModel().figure(Evidence(V6E, [model], report)) == pytest.approx(72000 * per_bundle)
    assert CostModel().figure(Evidence(V6E, [], report)) == pytest.approx(9000 * per_bundle)
    few = CompileReport("ok", "v6e", "k", bundles=1)
    assert CostModel().figure(Evidence(V6E, [model], few)) == roofline_us
    assert CostModel().figure(Evidence(V6E, [], CompileReport("ok", "v6e", "k"))) is None
    estimate = ModuleEstimate(3.5, None, (), "v6e", "simulated", "c", None)
    told = CompileReport("ok", "v6e", "k", bundles=9000, estimate=estimate)
    assert CostModel().figure(Evidence(V6E, [model], told)) == 3.5
    bound = CostModel().lower_bound(known)
    assert bound is not None
    assert 0 < bound < roofline_us


def test_no_schedule_beats_the_floor_on_a_device_of_two_cores() -> None:
    model = model_of(matmul((1024, 1024, 1024)), (4096, 4096), (4096, 4096), dtype="bfloat16")
    v5p = resolve("v5p").chip
    # Both cores at their peak: 459 Top/s, as published for the chip.
    assert model.floor_s(v5p) == pytest.approx(2 * 4096**3 / 459e12, rel=0.01)
    memory_s = model.hbm_bytes / V6E.hbm_bytes_per_s
    assert model.floor_s(V6E) == pytest.approx(max(2 * 4096**3 / 920e12, memory_s), rel=0.01)


def test_subbyte_dtypes_take_their_bits() -> None:
    def fn(x):
        return pl.pallas_call(lambda a, o: None, out_shape=x)(x)

    (model,) = pallas_models(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((64, 256), jnp.int4)))
    assert model.windows[0].bytes == 64 * 256 // 2
    (narrow,) = pallas_models(jax.make_jaxpr(fn)(np.zeros((64, 3), np.int8)))
    assert narrow.windows[0].bytes == 64 * 128


def test_buffers_are_listed_with_their_padding_and_scalar_memory_is_counted() -> None:
    def body(scalars, a, o, counter, row):
        o[...] = a[...] + scalars[0]

    def fn(indices, x):
        block = pl.BlockSpec((16, 100), lambda i, s: (i, 0))
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[block],
            out_specs=block,
            scratch_shapes=[pltpu.SMEM((10,), jnp.int32), pltpu.VMEM((8, 128), jnp.float32)],
        )
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, grid_spec=spec, out_shape=shape)(indices, x)

    arrays = [jax.ShapeDtypeStruct((50,), "int32"), jax.ShapeDtypeStruct((64, 100), "float32")]
    (model,) = pallas_models(jax.make_jaxpr(fn)(*arrays))
    assert model.smem_bytes == 50 * 4 + 10 * 4
    assert model.buffers() == [
        # Pallas counts the prefetched operand as input 0.
        "input 1 of pallas_call: 2 buffers of float32[16, 100], padded to [16, 128]: 16.0 KiB",
        "the output of pallas_call: 2 buffers of float32[16, 100], padded to [16, 128]: 16.0 KiB",
        "scratch: 4.0 KiB",
    ]
    calls = grid_calls(jax.make_jaxpr(fn)(*arrays))
    assert [argument_of(calls, position) for position in range(3)] == [None, 1, None]
