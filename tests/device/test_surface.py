"""``torch.tpu`` against the public names of TorchTPU 0.2.0, and what ours do."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.errors import ArgumentError, DeviceError

tpu: Any = torch.tpu  # type: ignore[attr-defined]

NAMES_IN_TORCH_TPU = """
tpu.EagerMode tpu.Event tpu.Precision tpu.Stream tpu.allow_excess_precision tpu.current_device
tpu.current_stream tpu.default_generators tpu.default_stream tpu.device tpu.device_count
tpu.device_of tpu.eager_mode tpu.get_amp_supported_dtype tpu.get_device_name
tpu.get_device_properties tpu.get_rng_state tpu.initial_seed tpu.is_available tpu.is_initialized
tpu.manual_seed tpu.manual_seed_all tpu.precision tpu.set_device tpu.set_eager_mode
tpu.set_rng_state tpu.set_stream tpu.stream tpu.synchronize tpu.topology_aware_mesh
tpu.compiler.custom_compiler_options
tpu.distributed.set_tpu_launch_env tpu.distributed.spmd_safe tpu.distributed.topology_aware_mesh
tpu.distributed.window_num_stripes tpu.distributed.window_stripe_chunk_mb
tpu.ops.align_jagged_to_multiple tpu.ops.all_gather_dim tpu.ops.max_pool1d
tpu.ops.max_pool1d_backward tpu.ops.max_pool2d tpu.ops.max_pool2d_backward tpu.ops.max_pool3d
tpu.ops.max_pool3d_backward tpu.ops.optimization_barrier tpu.ops.ragged_all_to_all
tpu.ops.ragged_dot tpu.ops.ragged_dot_weight_grad tpu.ops.recv tpu.ops.reduce_scatter_dim
tpu.ops.send tpu.ops.sparse_dense_matmul tpu.ops.sparse_dense_matmul_activation_unstack
tpu.ops.sparse_dense_matmul_grad_with_adagrad tpu.ops.sparse_dense_matmul_grad_with_adam
tpu.ops.sparse_dense_matmul_grad_with_sgd tpu.ops.sparse_dense_matmul_gradient_stack
tpu.ops.sparse_gather tpu.ops.sparse_gather_backward tpu.ops.sparse_iota tpu.ops.sparse_map_row
tpu.ops.splash_sdpa tpu.ops.strip_jagged_padding
tpu.optimizers.AdamW tpu.optimizers.Muon tpu.optimizers.Optimizer tpu.optimizers.Sgd
tpu.optimizers.SingleTraceTrainer
tpu.pallas.get_pallas_mesh tpu.pallas.jax_op
tpu.profiler.TpuProfilerConfig
"""

NOT_APPLICABLE = {
    "tpu.distributed.": "launches and schedules processes on several TPUs; the simulation is one",
    "tpu.ops.sparse_": "SparseCore, which the simulation does not have",
    "tpu.ops.all_gather_dim": "a collective between TPUs",
    "tpu.ops.ragged_all_to_all": "a collective between TPUs",
    "tpu.ops.reduce_scatter_dim": "a collective between TPUs",
    "tpu.ops.recv": "a collective between TPUs",
    "tpu.ops.send": "a collective between TPUs",
    "tpu.ops.max_pool": "torch.nn.functional.max_pool1d and its like run on both",
    "tpu.ops.ragged_dot": "torch's grouped products run on both",
    "tpu.ops.splash_sdpa": "tpu_kernels.ops.attention, which runs on both, is ours",
    "tpu.ops.align_jagged_to_multiple": "belongs to TorchTPU's own jagged tensors",
    "tpu.ops.strip_jagged_padding": "belongs to TorchTPU's own jagged tensors",
    "tpu.optimizers.": "TorchTPU's fused optimisers; those of torch.optim run on both",
    "tpu.profiler.": "profiles the TPU's hardware",
}


def find(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch)


@pytest.mark.parametrize("name", NAMES_IN_TORCH_TPU.split())
def test_every_public_name_is_there_or_has_a_reason_not_to_be(name: str) -> None:
    reasons = [why for start, why in NOT_APPLICABLE.items() if name.startswith(start)]
    try:
        find(name)
    except AttributeError:
        assert reasons, f"torch.{name} is missing"
    else:
        assert not reasons, f"torch.{name} is there: strike it off the list"


def test_eager_modes_have_the_names_and_scopes_of_torch_tpu() -> None:
    public = {m.name for m in tpu.EagerMode if not m.name.startswith("_")}
    assert public == {"DEFER_AND_FUSE", "DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING"}
    modes = tpu.EagerMode
    assert tpu.eager_mode is modes.DEFER_NEVER
    with tpu.set_eager_mode(modes.DEFER_AND_FUSE):
        assert tpu.eager_mode is modes.DEFER_AND_FUSE
        with tpu.set_eager_mode(modes.DEFER_NEVER):
            assert tpu.eager_mode is modes.DEFER_NEVER
        assert tpu.eager_mode is modes.DEFER_AND_FUSE
    assert tpu.eager_mode is modes.DEFER_NEVER
    tpu.eager_mode = modes.DEFER_NEVER_AND_LAUNCH_BLOCKING
    try:
        assert tpu.eager_mode is modes.DEFER_NEVER_AND_LAUNCH_BLOCKING
    finally:
        tpu.eager_mode = modes.DEFER_NEVER
    with pytest.raises(ArgumentError, match="not 'fast'"):
        tpu.eager_mode = "fast"
    with (
        pytest.raises(ArgumentError, match=r"inside of torch\.compile"),
        tpu.set_eager_mode(modes._INTERNAL_COMPILE_FX_GRAPH),
    ):
        pass


def test_precision_overrides_the_setting_of_torch_in_a_block() -> None:
    third = torch.full((1, 1), 1 / 3, device="tpu")
    one = torch.ones(1, 1, device="tpu")
    found = {}
    with tk.numerics("tpu"):
        for precision in tpu.Precision:
            with tpu.precision(precision):
                found[precision.name] = abs((third @ one).item() - 1 / 3)
    assert set(found) == {"DEFAULT", "HIGH", "HIGHEST"}
    assert found["DEFAULT"] > 1e-4 > found["HIGH"] > found["HIGHEST"]
    with pytest.raises(ArgumentError, match=r"a torch\.tpu\.Precision"), tpu.precision("high"):
        pass


def test_streams_and_events_are_complete() -> None:
    stream = tpu.Stream()
    assert isinstance(stream, torch.Stream)
    assert stream.device.type == "tpu"
    event = stream.record_event(tpu.Event(enable_timing=True))
    with tpu.stream(stream):
        assert tpu.current_stream() == tpu.default_stream()
    later = tpu.Event(enable_timing=True).record(stream)
    stream.wait_event(event)
    stream.wait_stream(tpu.default_stream())
    stream.synchronize()
    assert stream.query()
    assert event.elapsed_time(later) >= 0
    with pytest.raises(DeviceError, match="stream of the tpu device"):
        tpu.set_stream(torch.Stream(device="cpu"))


def test_memory_counts_each_storage_once_and_remembers_the_peak() -> None:
    before = tpu.memory_allocated()
    x = torch.zeros(1000, device="tpu")
    view = x[::2]
    assert tpu.memory_allocated() == before + 4000
    assert tpu.memory_stats()["allocated_bytes.all.current"] == before + 4000
    del x
    assert tpu.memory_allocated() == before + 4000
    del view
    assert tpu.memory_allocated() == before
    assert tpu.max_memory_allocated() >= before + 4000
    tpu.reset_peak_memory_stats()
    assert tpu.max_memory_allocated() == tpu.max_memory_reserved() == tpu.memory_reserved()


def test_the_properties_are_those_of_the_chip() -> None:
    properties = tpu.get_device_properties()
    assert properties.total_memory > 2**30
    assert properties.multi_processor_count == 1
    state = tpu.get_rng_state()
    first = torch.rand(3, device="tpu")
    tpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="tpu"))
    assert tpu.default_generators[0].initial_seed() == tpu.initial_seed()


def test_options_and_barriers_change_nothing() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    with tpu.compiler.custom_compiler_options({"xla_optimization_level": "O1"}):
        (y,) = tpu.ops.optimization_barrier([x * 2])
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    with (
        pytest.raises(ArgumentError, match="dict of strings"),
        tpu.compiler.custom_compiler_options({"xla": 1}),
    ):
        pass
    assert tpu.allow_excess_precision is False
    with pytest.raises(DeviceError, match="one chip"):
        tpu.topology_aware_mesh((2,))
