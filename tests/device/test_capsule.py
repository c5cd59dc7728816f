"""One piece of memory as a CPU tensor and as a device tensor."""

from __future__ import annotations

import gc

import pytest
import torch

from tpu_kernels._compat_torch import from_dlpack, to_dlpack
from tpu_kernels.backends.device import mark_cpu, mark_tpu, to_cpu, to_tpu
from tpu_kernels.errors import DeviceError

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_directions_share_memory_and_keep_metadata(dtype: torch.dtype) -> None:
    base = torch.arange(48).remainder(2).to(dtype).reshape(6, 8)
    for source in (base, base.t(), base[1:, ::3], base[2], base[:0], base[3, 3]):
        there = to_tpu(source)
        back = to_cpu(there)
        assert (there.device.type, back.device.type) == ("tpu", "cpu")
        for tensor in (there, back):
            assert tensor.dtype is source.dtype
            assert tensor.shape == source.shape
            assert tensor.stride() == source.stride()
            assert tensor.data_ptr() == source.data_ptr()


def test_a_write_on_either_side_is_seen_on_the_other() -> None:
    source = torch.zeros(3, 4)
    there = to_tpu(source)
    there[1] += 2
    source[:, 0] = 7
    assert there.cpu().tolist() == source.tolist() == [[7, 0, 0, 0], [7, 2, 2, 2], [7, 0, 0, 0]]


def test_the_memory_outlives_the_tensor_that_it_came_from() -> None:
    there = to_tpu(torch.full((1 << 16,), 3.0))
    gc.collect()
    torch.full((1 << 16,), 9.0)  # would reuse the memory, had it been freed
    assert (there == 3).all().item()


def test_the_alias_stays_valid_when_the_tensor_gets_other_memory() -> None:
    for move in ("set_", "data", "resize_"):
        there = torch.full((1 << 12,), 3.0, device="tpu")
        alias = to_cpu(there)
        if move == "set_":
            there.set_(torch.ones(1, device="tpu"))
        elif move == "data":
            there.data = torch.ones(1, device="tpu")
        else:
            there.resize_(1 << 13)
        gc.collect()
        torch.full((1 << 12,), 9.0)  # would reuse the memory, had it been freed
        assert (alias == 3).all().item()


def test_expanded_tensors_keep_their_zero_strides() -> None:
    assert to_tpu(torch.ones(3, 1).expand(3, 5)).stride() == (1, 0)


def test_lazy_conjugation_and_negation_travel_along() -> None:
    source = torch.randn(5, dtype=torch.complex64)
    assert torch.equal(to_tpu(source.conj()).cpu(), source.conj())
    assert torch.equal(to_tpu(source.conj().imag).cpu(), -source.imag)
    there = to_tpu(source)
    assert torch.equal(to_cpu(there.conj()), source.conj())
    assert torch.equal(to_cpu(there.conj().imag), -source.imag)


def test_gradients_do_not_cross() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not to_tpu(leaf).requires_grad
    assert not to_cpu(torch.ones(2, device="tpu", requires_grad=True) * 2).requires_grad


def test_a_tensor_on_the_right_side_passes_as_it_is() -> None:
    on_cpu, on_tpu = torch.ones(2), torch.ones(2, device="tpu")
    assert to_cpu(on_cpu) is on_cpu
    assert to_tpu(on_tpu) is on_tpu


def test_marks_rewrite_a_capsule_in_place() -> None:
    source = torch.arange(3.0)
    exported = to_dlpack(source)
    mark_tpu(exported)
    there = from_dlpack(exported)
    assert there.device == torch.device("tpu:0")
    exported = to_dlpack(there)
    mark_cpu(exported)
    assert from_dlpack(exported).data_ptr() == source.data_ptr()


def test_marks_refuse_memory_of_another_device() -> None:
    with pytest.raises(DeviceError, match="device type 1"):
        mark_cpu(to_dlpack(torch.ones(1)))
    with pytest.raises(DeviceError, match="device type 12"):
        mark_tpu(to_dlpack(torch.ones(1, device="tpu")))
