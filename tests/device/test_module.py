"""``torch.tpu`` and ``torch.accelerator``: what a program asks a device."""

from __future__ import annotations

import pytest
import torch

from tpu_kernels.config import settings
from tpu_kernels.errors import DeviceError

tpu = torch.tpu  # type: ignore[attr-defined]


def test_the_name_says_simulated_and_which_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_KERNELS_SIM_CHIP", "v5p")
    settings.cache_clear()
    try:
        assert tpu.get_device_name() == "Simulated TPU v5p (host memory)"
        assert tpu.get_device_properties().chip == "v5p"
        assert tpu.get_device_properties(0).simulated
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_there_is_one_device() -> None:
    assert tpu.is_available()
    assert tpu.device_count() == 1
    assert tpu.current_device() == 0
    tpu.set_device("tpu:0")
    with tpu.device(0):
        tpu.synchronize()
    with pytest.raises(DeviceError, match="tpu:1 does not exist"):
        tpu.set_device(1)
    with pytest.raises(DeviceError, match="expected a tpu device"):
        tpu.synchronize("cpu")


def test_the_accelerator_api_finds_the_device() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    held = torch.zeros(1000, device="tpu")
    assert torch.accelerator.memory_allocated() == before + held.nbytes
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total
    assert torch.accelerator.current_stream() == tpu.current_stream()
    with torch.accelerator.device_index(0):
        assert torch.ones(1, device="tpu").item() == 1


def test_events_measure_host_time() -> None:
    start, end = tpu.Event(enable_timing=True), tpu.Event(enable_timing=True)
    with pytest.raises(DeviceError, match="two recorded events"):
        start.elapsed_time(end)
    start.record()
    end.record(tpu.current_stream())
    end.synchronize()
    end.wait()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(DeviceError, match="enable_timing=True"):
        tpu.Event().elapsed_time(end)


def test_methods_and_contexts_know_the_device() -> None:
    assert torch.ones(2).tpu().is_tpu
    assert torch.nn.Linear(2, 2).tpu().weight.device.type == "tpu"
    with torch.device("tpu"):
        assert torch.zeros(2).device.type == "tpu"
        assert torch.nn.Linear(2, 2).weight.device.type == "tpu"
    torch.set_default_device("tpu")
    try:
        assert torch.arange(3).device.type == "tpu"
    finally:
        torch.set_default_device(None)


def test_dtypes_of_autocast_and_capability() -> None:
    assert tpu.get_amp_supported_dtype() == [torch.bfloat16, torch.float16]
    assert tpu.is_bf16_supported()
    assert torch.bfloat16 in tpu.get_device_capability()["supported_dtypes"]
