"""The rules against eager, operator by operator: torch's own samples, and random operands."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.opinfo.database import UNDEFINED, UP_TO_SIGN, calls, entries
from tests.opinfo.on_lowering import Outcome, outcome
from tpu_kernels.dsl import dtypes
from tpu_kernels.lowering import decompositions, rules
from tpu_kernels.lowering.values import result_type

# `make test-ops` runs all entries; here every so-manieth, by dtype.
EVERY = {torch.float32: 14, torch.bfloat16: 45, torch.int64: 40, torch.bool: 60}
SAMPLED = [
    pytest.param(info, dtype, id=f"{info.formatted_name}-{str(dtype).removeprefix('torch.')}")
    for dtype, step in EVERY.items()
    for info in entries()[3::step]
    if dtype in info.supported_dtypes("cpu") and info.name not in UNDEFINED | UP_TO_SIGN
]


@pytest.mark.parametrize(("info", "dtype"), SAMPLED)
def test_samples_of_the_operator_database(info: Any, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its deprecated operators
        for call in calls(info, dtype, 2):
            found = outcome(call.function, call.args, call.kwargs)
            assert found.status in ("agrees", "left", "untraceable"), found


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
SHAPES = ((), (1,), (3,), (2, 1), (2, 3), (0, 3))
BINARY = ("add", "sub", "mul", "div", "maximum", "lt", "eq", "pow", "atan2", "bitwise_and", "where")
operands = st.one_of(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 5)),
    st.sampled_from([2, 3, True, 1.5, -0.5]),
)


def tensor_of(described: Any) -> Any:
    if not isinstance(described, tuple):
        return described
    shape, dtype, seed = described
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(name=st.sampled_from(BINARY), first=operands, second=operands)
def test_promotion_and_broadcasting_are_those_of_torch(name: str, first: Any, second: Any) -> None:
    a, b = tensor_of(first), tensor_of(second)
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        a = torch.tensor(a)
    function: Any = getattr(torch, name)
    if name == "where":
        function = lambda x, y: torch.where(torch.ones(3, dtype=torch.bool), x, y)  # noqa: E731
    try:
        function(a, b)
    except (RuntimeError, TypeError):
        return  # torch refuses this combination
    assert outcome(function, (a, b), {}) == Outcome("agrees")


@given(first=operands, second=operands)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_result_type_is_that_of_torch(first: Any, second: Any) -> None:
    made = [tensor_of(first), tensor_of(second)]
    arrays = [
        np.zeros(v.shape, dtypes.to_jax(v.dtype)) if isinstance(v, torch.Tensor) else v
        for v in made
    ]
    with jax.enable_x64(True):
        assert result_type(*arrays) is torch.result_type(*made)


def test_core_aten_is_covered() -> None:
    """Every operator that torch calls core has a rule or a decomposition into some that have."""
    # Sizes that depend on values, and factorisations of the forward of an embedding bag.
    without = {"_embedding_bag", "nonzero", "_local_scalar_dense", "_pdist_forward"}
    missing = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if name.startswith("__") or not hasattr(packet, "overloads"):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if torch.Tag.core not in op.tags or op._schema.is_mutable or "out" in overload:
                continue
            if any("sym_" in part for part in (name,)):
                continue
            if rules.find(op) is None and op not in decompositions.table():
                missing.add(name)
    assert missing <= without
