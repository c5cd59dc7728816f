"""torch's own operator database (OpInfo): entries, and deterministic samples on any device.

This is the only file of the tests that imports `torch.testing._internal`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

# Results that no two runs share: memory that nobody wrote.
UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
# Factors that are only determined up to a sign or a phase.
UP_TO_SIGN = frozenset(
    {"linalg.eig", "linalg.eigh", "linalg.svd", "svd", "svd_lowrank", "pca_lowrank"}
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One sample of an entry.

    Attributes:
        function: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        process: Makes of a result what gradients are taken of.
        broadcasts: Whether the first argument is smaller than the result.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[..., Any]
    broadcasts: bool


def entries() -> list[Any]:
    """The entries of the operator database, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(info: Any) -> str:
    """An entry's name with its variant, such as ``"mean"`` or ``"std.unbiased"``."""
    variant = info.variant_test_name
    return f"{info.name}.{variant}" if variant else str(info.name)


def seed() -> None:
    """Fix every source of random numbers that samples and operators draw from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def calls(
    info: Any,
    dtype: torch.dtype,
    count: int,
    *,
    device: str = "cpu",
    requires_grad: bool = False,
) -> list[Call]:
    """The first samples of an entry.

    Args:
        info: The entry.
        dtype: Dtype of its samples.
        count: The most samples to return.
        device: Where their tensors are made; the values are the same everywhere.
        requires_grad: Whether gradients will be asked for.

    Returns:
        The samples, fewer where the database has fewer; none where making them needs a package that
        is absent.
    """
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(_samples(info, dtype, count, device, requires_grad))
        except ImportError:  # scipy, for some references
            return []
    return found


def _samples(
    info: Any, dtype: torch.dtype, count: int, device: str, requires_grad: bool
) -> Iterator[Call]:
    made = info.sample_inputs(device, dtype, requires_grad=requires_grad)
    for sample in itertools.islice(made, count):
        yield Call(
            info.op,
            (sample.input, *sample.args),
            sample.kwargs,
            sample.output_process_fn_grad or (lambda result: result),
            bool(sample.broadcasts_input),
        )


def pairs(
    info: Any, dtype: torch.dtype, count: int, *, requires_grad: bool = False
) -> list[tuple[Call, Call]]:
    """The first samples of an entry, each on the CPU and the same on the simulated device.

    The database makes its samples on the device itself, where lengths and indices are where the
    operator wants them. Where it makes other samples there, those of the CPU are moved.
    """
    here = calls(info, dtype, count, requires_grad=requires_grad)
    there = calls(info, dtype, count, device="tpu", requires_grad=requires_grad)
    if len(here) != len(there) or not all(map(_same, here, there)):
        there = [_moved(call) for call in here]
    return list(zip(here, there, strict=True))


def _same(one: Call, other: Call) -> bool:
    values, others = ([*tree_leaves((c.args, c.kwargs))] for c in (one, other))
    return len(values) == len(others) and all(map(_equal, values, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        facts = [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (one, other)]
        return facts[0] == facts[1] and one.detach().equal(other.detach().cpu())
    if isinstance(one, str | torch.device) and str(one).startswith("cpu"):
        return str(other).startswith(("cpu", "tpu"))
    return type(one) is type(other) and (one == other or one != one or callable(one))


def _moved(call: Call) -> Call:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="tpu")
        return there.copy_(value.detach()).requires_grad_(value.requires_grad)

    args, kwargs = tree_map(move, (call.args, call.kwargs))
    return dataclasses.replace(call, args=args, kwargs=kwargs)
