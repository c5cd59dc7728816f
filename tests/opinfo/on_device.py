"""The operator database on the simulated device against the CPU: one entry, compared.

Both run the same kernels on the same numbers, so results are compared bit by bit: values, shapes,
strides and dtypes, of the operator, of its in-place variant, and of its gradients. Only LAPACK may
round differently, whose loops depend on where memory happens to lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.opinfo import database
from tests.opinfo.database import Call

DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
_LAPACK = ("linalg.", "cholesky", "lu", "svd", "pca_lowrank", "pinverse", "ormqr", "geqrf", "qr")


def disagreements(info: Any, dtype: torch.dtype, count: int) -> Iterator[str | None]:
    """Compare the samples of an entry.

    Yields:
        For each sample, None if the device agrees with the CPU, else what differs.
    """
    exact = _exactness(info.name)
    try:
        samples = database.pairs(info, dtype, count)
        differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        grown = database.pairs(info, dtype, count, requires_grad=True) if differentiable else []
    except Exception as error:  # the device cannot make them
        yield from [_said("the sample", error)] * len(database.calls(info, dtype, count))
        return
    for i, (on_cpu, on_tpu) in enumerate(samples):
        found = _compared(_run, on_cpu, on_tpu, exact)
        if found is None and _has_in_place(info, on_cpu):
            found = _compared(_runner_in_place(info), on_cpu, on_tpu, exact)
        if found is None and i < len(grown):
            found = _compared(_gradients, *grown[i], exact)
        yield found


def _exactness(name: str) -> bool | None:
    """Whether values must be the same to the bit; None where they are undefined."""
    if name in database.UNDEFINED:
        return None
    return not name.startswith(_LAPACK)


def _has_in_place(info: Any, call: Call) -> bool:
    return info.inplace_variant is not None and not call.broadcasts


def _run(call: Call) -> Any:
    return call.function(*call.args, **call.kwargs)


def _runner_in_place(info: Any) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        first, *rest = call.args
        copied = [t.clone() for t in first] if isinstance(first, (list, tuple)) else first.clone()
        return copied, info.inplace_variant(copied, *rest, **call.kwargs)

    return run


def _gradients(call: Call) -> Any:
    outputs = [
        t
        for t in tree_leaves(call.process(_run(call)))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    inputs = [
        t
        for t in tree_leaves((call.args, call.kwargs))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not outputs:
        return None
    # Not all ones: a gradient of a sum hides transpositions and is zero for a softmax.
    seeds = [
        torch.linspace(0.5, 1.5, t.numel(), device=t.device).to(t.dtype).reshape(t.shape)
        for t in outputs
    ]
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


def _compared(
    run: Callable[[Call], Any], here: Call, there: Call, exact: bool | None
) -> str | None:
    expected, found = _outcome(run, here), _outcome(run, there)
    if isinstance(expected, Exception):
        if isinstance(found, type(expected)):
            return None  # neither takes this call
        expected = _said("the CPU", expected)
        return f"{expected}; the device: {found if isinstance(found, Exception) else 'a result'}"
    if isinstance(found, Exception):
        return _said("the device", found)
    device = str(there.kwargs.get("device") or "tpu").partition(":")[0]
    return _difference(found, expected, device, exact)


def _outcome(run: Callable[[Call], Any], call: Call) -> Any:
    database.seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(call)
        except Exception as error:
            return error


def _said(who: str, error: Exception) -> str:
    return f"{who}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _difference(found: Any, expected: Any, device: str, exact: bool | None) -> str | None:
    got, wanted = tree_leaves(found), tree_leaves(expected)
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    for a, b in zip(got, wanted, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b and not (a != a and b != b):  # NaN agrees with NaN
                return f"{a!r} instead of {b!r}"
            continue
        if not isinstance(a, torch.Tensor) or a.device.type != device:
            return f"a result on {getattr(a, 'device', 'no device')}"
        if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
            return f"{_described(a)} instead of {_described(b)}"
        if exact is None:
            continue
        bounds = {"rtol": 0.0, "atol": 0.0} if exact else {}
        try:
            torch.testing.assert_close(a.cpu(), b, equal_nan=True, **bounds)
        except AssertionError as error:
            return " ".join(str(error).split())[:200]
    return None


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}"
