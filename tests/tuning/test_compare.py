"""Comparison of a candidate's result with the reference's."""

from __future__ import annotations

import pytest
import torch

from tpu_kernels.dsl.dtypes import from_bytes, to_numpy
from tpu_kernels.tuning.compare import change, difference, leaves

NAN, INF = float("nan"), float("inf")


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rounding_passes_and_a_wrong_value_does_not(dtype: torch.dtype) -> None:
    exact = torch.linspace(-3, 3, 101, dtype=torch.float64)
    rounded = exact.to(dtype, copy=True)
    assert difference([rounded], [exact]) is None
    rounded[7] += 0.5
    assert "largest error" in str(difference([rounded], [exact]))


def test_nan_and_infinity_have_to_stand_at_the_same_places() -> None:
    good = tensor(1, NAN, INF, -INF)
    assert difference([good.clone()], [good]) is None
    assert "NaN" in str(difference([tensor(1, 2, INF, -INF)], [good]))
    assert "infinities" in str(difference([tensor(1, NAN, -INF, -INF)], [good]))
    assert difference([tensor(INF, NAN, INF, -INF)], [good]) is not None


def test_integers_are_compared_exactly_and_shapes_and_counts_too() -> None:
    ints = torch.arange(4)
    assert difference([ints.to(torch.int32)], [ints]) is None
    assert "1 of 4" in str(difference([torch.tensor([0, 1, 2, 4])], [ints]))
    assert "shape" in str(difference([ints.reshape(2, 2)], [ints]))
    assert "1 outputs" in str(difference([ints], [ints, ints]))
    assert difference([torch.empty(0)], [torch.empty(0)]) is None


def test_a_tolerance_of_ones_own_decides() -> None:
    assert difference([tensor(1.0)], [tensor(1.01)], tolerance=0.05) is None
    assert difference([tensor(1.0)], [tensor(1.01)], tolerance=0.001) is not None
    assert "reference is 0" in str(difference([tensor(1.0)], [tensor(0.0)]))


def test_leaves_of_nested_results() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    assert leaves((a, [None, b])) == [a, b]
    assert leaves(3)[0].item() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_tensors_survive_the_way_to_a_worker_and_back(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = torch.rand(shape).mul(4).to(dtype)
    value = value.T if value.ndim == 2 else value
    array = to_numpy(value)
    assert array.shape == tuple(value.shape)
    back = from_bytes(array.tobytes(), array.shape, array.dtype.name)
    assert back.dtype == dtype
    assert torch.equal(back.to(torch.float64), value.to(torch.float64))


def test_another_shape_or_dtype_than_the_operators_is_a_change() -> None:
    usual = [torch.empty(2, 3, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")]
    same = [torch.zeros(2, 3), torch.zeros(1, dtype=torch.int32)]  # widened back by the operator
    assert change(same, usual) is None
    assert change([*same, torch.zeros(9)], usual) is None  # a written argument
    assert change(same, None) is None
    changed = "output 0: bfloat16[2, 3], the config in force gives float32[2, 3]"
    assert change([same[0].bfloat16(), same[1]], usual) == changed
    assert "output 1: int32[2]" in str(change([same[0], torch.zeros(2, dtype=torch.int32)], usual))
