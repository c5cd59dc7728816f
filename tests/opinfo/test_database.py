"""A sample of the operator database on the simulated device; `make test-ops` runs the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpu_kernels.device  # noqa: F401 - installs the device
from tests.opinfo import database, known, on_device

# Every so-manieth entry, by dtype: 80 entries in all.
EVERY = {
    torch.float32: 16,
    torch.int64: 60,
    torch.complex64: 60,
    torch.bfloat16: 60,
    torch.uint8: 120,
    torch.bool: 120,
}
BY_NAME = {database.name_of(info): info for info in database.entries()}
SAMPLED = [
    pytest.param(info, dtype, id=f"{info.formatted_name}-{str(dtype).removeprefix('torch.')}")
    for place, (dtype, step) in enumerate(EVERY.items())
    for info in database.entries()[5 + place :: step]
    if dtype in info.supported_dtypes("cpu")
    and database.name_of(info) not in known.exceptions("device")
]


@pytest.mark.parametrize(("info", "dtype"), SAMPLED)
def test_operators_and_gradients_are_those_of_the_cpu(info: Any, dtype: torch.dtype) -> None:
    assert [*filter(None, on_device.disagreements(info, dtype, 2))] == []


@pytest.mark.parametrize("name", known.exceptions("device"))
def test_known_exceptions_are_still_refused(name: str) -> None:
    found = list(on_device.disagreements(BY_NAME[name], torch.float32, 1))
    assert found
    assert all("NotImplementedError: the simulated tpu device has no" in (f or "") for f in found)


def test_news_in_either_direction_are_reported() -> None:
    names = {"add", "to_sparse"}
    as_known = {"to_sparse": "no sparse tensors"}
    assert known.changes("device", as_known, names) == []
    assert known.changes("device", {**as_known, "add": "differs"}, names) == ["add: differs"]
    (better,) = known.changes("device", {}, names)
    assert better.startswith("to_sparse agrees now")
