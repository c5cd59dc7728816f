"""The operator database lowered to programs against eager: one call, compared."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.opinfo import database
from tpu_kernels.backends.graphs import CompiledGraph, GraphOptions

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
LEFT = "torch runs "
_NOT_COMPARED = database.UNDEFINED | database.UP_TO_SIGN


@dataclasses.dataclass
class Outcome:
    """What became of one sample.

    Attributes:
        status: ``"agrees"``, ``"differs"``, ``"left"`` (agrees, partly outside of programs),
            ``"untraceable"`` (torch cannot trace it) or ``"fails"``.
        detail: Operators that were left, or the difference.
    """

    status: str
    detail: str = ""


# A result may differ in the last bits: XLA's elementary functions are good to a few units in the
# last place, sums are added in another order, and a chain in half precision is rounded once where
# eager rounds at every step.
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.complex64: (2e-5, 2e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


def graph_of(function: Any, args: Any, kwargs: Any) -> tuple[GraphModule, list[torch.Tensor]]:
    """The functional ATen graph of a call, and its tensor arguments."""
    flat, spec = tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        positional, named = tree_unflatten(filled, spec)
        return function(*positional, **named)

    tensors = [flat[place].detach() for place in places]
    with torch.no_grad():
        graph = make_fx(of_tensors, tracing_mode="fake")(*tensors)
        # In two steps: functionalisation does not see into composite operators.
        functional = torch.func.functionalize(graph, remove="mutations_and_views")
        return make_fx(functional, tracing_mode="fake")(*tensors), tensors


def outcome(function: Any, args: Any, kwargs: Any, *, compare: bool = True) -> Outcome:
    """Lower and run one call, and compare it with eager."""
    try:
        graph, tensors = graph_of(function, args, kwargs)
    except Exception as error:
        return Outcome("untraceable", f"{type(error).__name__}: {str(error)[:80]}")
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            expected = graph(*[t.clone() for t in tensors])
    except RuntimeError as error:  # some samples only mean something with their strides
        return Outcome("untraceable", f"{type(error).__name__}: {str(error)[:80]}")
    compiled = CompiledGraph(graph, GraphOptions())
    torch.manual_seed(0)
    try:
        found = compiled(*tensors)
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {str(error)[:300]}")
    left = compiled.unlowered()
    if compare:
        difference = _difference(found, expected)
        if difference is not None:
            return Outcome("differs", difference)
    return Outcome("left", ", ".join(sorted(left))) if left else Outcome("agrees")


def _difference(found: Any, expected: Any) -> str | None:
    got, wanted = tree_flatten(found)[0], tree_flatten(expected)[0]
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    for a, b in zip(got, wanted, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"{a!r} instead of {b!r}"
            continue
        if b.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if _steps(a) != _steps(b) and b.is_contiguous():
            return f"strides {a.stride()} instead of {b.stride()}"
        rtol, atol = TOLERANCE.get(b.dtype, (0.0, 0.0))
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())[:200]
    return None


def _steps(tensor: torch.Tensor) -> list[int]:
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def disagreements(info: Any, dtype: torch.dtype, count: int) -> Iterator[str | None]:
    """Lower the samples of an entry.

    Yields:
        For each sample, None if it was lowered whole and agrees with eager, else what became of it.
    """
    for call in database.calls(info, dtype, count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its deprecated operators
            compare = info.name not in _NOT_COMPARED
            found = outcome(call.function, call.args, call.kwargs, compare=compare)
        if found.status == "agrees":
            yield None
        else:
            yield (
                LEFT + found.detail if found.status == "left" else f"{found.status}: {found.detail}"
            )
