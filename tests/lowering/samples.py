"""torch's operator database against the lowering: one sample, lowered, run, and compared.

``python -m tests.lowering.samples [NAMES] [--dtype float32] [--samples 4]`` runs the whole of it
and prints what disagrees and what did not lower.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tpu_kernels.backends.graphs import CompiledGraph, GraphOptions

# Results that no two implementations share: memory that nobody wrote, factors up to a sign.
UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
UP_TO_SIGN = frozenset(
    {"linalg.eig", "linalg.eigh", "linalg.svd", "svd", "svd_lowrank", "pca_lowrank"}
)


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


def samples(info: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    """The first samples of an operator's database entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = info.sample_inputs("cpu", dtype, requires_grad=False)
            yield from itertools.islice(found, count)
        except (RuntimeError, NotImplementedError, ImportError):
            return


def entries() -> list[Any]:
    """The entries of torch's operator database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def calls(info: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[Any, Any, Any]]:
    """Function and arguments of the samples of an entry."""
    for sample in samples(info, dtype, count):
        yield info.op, (sample.input, *sample.args), sample.kwargs


def main() -> None:
    """Run the database and print a summary."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description="torch's operator database against the lowering")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--part", default="0/1")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    statuses: collections.Counter[str] = collections.Counter()
    by_entry: dict[str, list[Outcome]] = {}
    part, parts = map(int, options.part.split("/"))
    for info in entries()[part::parts]:
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        if options.names and info.name not in options.names and name not in options.names:
            continue
        if dtype not in info.supported_dtypes("cpu"):
            continue
        for function, args, kwargs in calls(info, dtype, options.samples):
            compare = info.name not in UNDEFINED and info.name not in UP_TO_SIGN
            args = tree_map(lambda x: x, args)
            result = outcome(function, args, kwargs, compare=compare)
            statuses[result.status] += 1
            by_entry.setdefault(name, []).append(result)
    for name, results in by_entry.items():
        for result in {(r.status, r.detail) for r in results if r.status != "agrees"}:
            print(f"{result[0]:12} {name:40} {result[1]}", flush=True)
    whole = sum(all(r.status == "agrees" for r in rs) for rs in by_entry.values())
    right = sum(all(r.status in ("agrees", "left") for r in rs) for rs in by_entry.values())
    print(f"{options.dtype}: {len(by_entry)} entries, {whole} lowered whole and agree, "
          f"{right} agree; samples {dict(statuses)}")  # fmt: skip


if __name__ == "__main__":
    main()
