"""State in and out of a device: files, copies, random numbers, loaders, text."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.device.models import LanguageModel


def saved(value: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_state_dict_round_trip_through_a_file() -> None:
    model = LanguageModel().to("tpu")
    loaded = torch.load(saved(model.state_dict()), weights_only=True)
    assert all(t.device.type == "tpu" for t in loaded.values())
    other = LanguageModel().to("tpu")
    other.load_state_dict(loaded)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
        assert a.data_ptr() != b.data_ptr()


def test_map_location_both_ways() -> None:
    x = torch.arange(4.0)
    assert torch.load(saved(x), map_location="tpu").device.type == "tpu"
    on_cpu = torch.load(saved(x.to("tpu")), map_location="cpu")
    assert torch.equal(on_cpu, x)


def test_optimizer_state_survives_saving() -> None:
    weight = nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.square().sum().backward()
    optimizer.step()
    state = torch.load(saved(optimizer.state_dict()), weights_only=True)
    optimizer.load_state_dict(state)
    moments = optimizer.state[weight]["exp_avg"]
    assert moments.device.type == "tpu"
    assert moments.tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_deepcopy_keeps_sharing_inside_and_none_outside() -> None:
    x = torch.zeros(4, device="tpu")
    whole, tail = copy.deepcopy([x, x[1:]])
    whole.fill_(3)
    assert tail.tolist() == [3, 3, 3]
    assert x.sum().item() == 0
    model = LanguageModel().to("tpu")
    assert copy.deepcopy(model).head.weight.data_ptr() != model.head.weight.data_ptr()


def test_pickle() -> None:
    x = torch.randn(3, dtype=torch.bfloat16, device="tpu")
    back = pickle.loads(pickle.dumps(x))
    assert back.device.type == "tpu"
    assert torch.equal(back.cpu(), x.cpu())


def test_storages() -> None:
    storage = torch.UntypedStorage(8, device="tpu")
    storage.fill_(3)
    assert storage.device == torch.device("tpu:0")
    assert storage.cpu().tolist() == [3] * 8
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.UntypedStorage(1 << 60, device="tpu")
    with pytest.raises(RuntimeError, match="it is on cpu"):
        torch.empty(0, device="tpu").set_(torch.UntypedStorage(8))


def test_printing() -> None:
    assert repr(torch.arange(3.0, device="tpu")) == "tensor([0., 1., 2.], device='tpu:0')"
    assert f"{torch.tensor(2.5, device='tpu'):.2f}" == "2.50"
    assert "dtype=torch.bfloat16" in repr(torch.ones(1, dtype=torch.bfloat16, device="tpu"))
    assert "device='tpu:0'" in repr(nn.Parameter(torch.ones(1, device="tpu")))


def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(5)
    here = torch.randn(3)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(3, device="tpu").cpu(), here)
    tpu = torch.tpu  # type: ignore[attr-defined]
    tpu.manual_seed(6)
    state = tpu.get_rng_state()
    first = torch.rand(3, device="tpu")
    tpu.set_rng_state(state)
    assert torch.equal(first.cpu(), torch.rand(3, device="tpu").cpu())
    with torch.random.fork_rng(device_type="tpu"):
        torch.rand(1, device="tpu")
    assert sorted(torch.randperm(5, device="tpu").tolist()) == [0, 1, 2, 3, 4]


def test_generators_of_either_device() -> None:
    draws = []
    for device in ("tpu", "cpu"):
        generator = torch.Generator(device=device).manual_seed(3)
        x = torch.randn(2, device="tpu", generator=generator)
        x = x + torch.empty(2, device="tpu").uniform_(generator=generator)
        draws.append(x.cpu() + torch.bernoulli(x.sigmoid(), generator=generator).cpu())
    assert torch.equal(*draws)


# JAX objects to forks, if an earlier test has imported it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_with_pinned_memory(workers: int) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, 4, pin_memory=True, num_workers=workers)
    assert [batch[0].to("tpu").sum().item() for batch in loader] == [6.0, 22.0]


def test_modules_from_meta_and_to_other_dtypes() -> None:
    with torch.device("meta"):
        model = LanguageModel()
    model.to_empty(device="tpu").to(torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"tpu"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
