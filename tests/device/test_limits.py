"""Where the device meets what it does not have: other layouts, other devices, other processes."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from tpu_kernels.errors import DeviceError


# torch's own, of layouts that it is about to change.
@pytest.mark.filterwarnings("ignore:.*(sparse|Sparse|quantize_per_tensor|nested) .*:UserWarning")
def test_layouts_of_no_tpu_are_refused_by_every_way_in() -> None:
    x = torch.ones(2, 2, device="tpu")
    ways: list[tuple[str, Any]] = [
        ("sparse_coo", lambda: torch.eye(2).to_sparse().to("tpu")),
        ("sparse_coo", lambda: torch.sparse_coo_tensor(x[:1].long(), x[0])),
        ("sparse_csr", lambda: torch.eye(2).to_sparse_csr().to("tpu") @ x),
        ("quantized", lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        ("nested", lambda: torch.nested.nested_tensor([x, x]) * 2),
    ]
    for layout, way in ways:
        with pytest.raises(NotImplementedError, match=f"no .*{layout} tensors, as TPUs have none"):
            way()


def test_indices_on_the_device_need_a_tensor_there() -> None:
    with pytest.raises(RuntimeError, match="either on cpu or on the same device"):
        torch.ones(3)[torch.zeros(1, dtype=torch.int64, device="tpu")]


def test_dlpack_between_torch_tensors_shares_memory() -> None:
    x = torch.zeros(3, device="tpu")
    other = torch.from_dlpack(x)
    other += 1
    assert (other.device.type, x.tolist()) == ("tpu", [1, 1, 1])
    assert torch.zeros(1).__dlpack_device__()[0] == torch.utils.dlpack.DLDeviceType.kDLCPU


def test_events_of_torch_itself_are_timed() -> None:
    start, end = (torch.Event(device="tpu", enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(100, 100, device="tpu").exp()
    end.record()
    end.synchronize()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 60_000
    assert start.elapsed_time(start) == 0


def test_the_accelerator_says_its_dtypes() -> None:
    found = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.bfloat16, torch.float32, torch.int64} <= found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_tensors_go_to_other_processes_as_copies(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1], [2, 3]]).to(dtype).to("tpu").t()
    with pytest.warns(UserWarning, match="goes to another process as a copy"):
        sent = ForkingPickler.dumps(x)
    back = pickle.loads(sent)
    assert (back.device.type, back.dtype) == ("tpu", dtype)
    assert torch.equal(back.cpu(), x.cpu())
    assert back.data_ptr() != x.data_ptr()


def test_parameters_stay_parameters_and_graphs_stay_here() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="tpu"))
    with pytest.warns(UserWarning, match="as a copy"):
        back = pickle.loads(ForkingPickler.dumps(weight))
    assert isinstance(back, torch.nn.Parameter)
    assert back.requires_grad
    with pytest.raises(RuntimeError, match="non-leaf"):
        ForkingPickler.dumps(weight * 2)
    with pytest.raises(DeviceError, match="storage on tpu cannot go"):
        ForkingPickler.dumps(weight.detach().untyped_storage())
    assert torch.equal(pickle.loads(ForkingPickler.dumps(torch.ones(2))), torch.ones(2))


def _double(pipe: Any) -> None:
    pipe.send(pipe.recv() * 2)


@pytest.mark.filterwarnings("ignore:a tensor on tpu goes:UserWarning")
def test_a_process_that_has_no_device_yet_gets_one() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_double, args=(there,))
    child.start()
    here.send(torch.arange(3, device="tpu"))
    assert here.poll(240), "the child has not answered"
    answer = here.recv()
    child.join(60)
    assert (answer.device.type, answer.tolist()) == ("tpu", [0, 2, 4])
