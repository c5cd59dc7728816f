"""Whether a candidate computes what the reference computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Error relative to the largest magnitude of the reference: a few rounding steps of the narrowest
# dtype involved, times what reordering a long sum costs. A wrong block or mask is off by orders
# more.
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
_COARSE = 0.15  # float8 and smaller


def leaves(value: Any) -> list[torch.Tensor]:
    """List the tensors of a nested result in order, holes (None) left out.

    Example:
        >>> [t.item() for t in leaves((torch.tensor(1), [None, {"a": torch.tensor(2)}]))]
        [1, 2]
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [leaf for item in value for leaf in leaves(item)]
    return [] if value is None else [torch.as_tensor(value)]


def difference(
    got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float | None = None
) -> str | None:
    """Say how results differ, or None if they agree.

    Args:
        got: The candidate's outputs.
        wanted: The reference's outputs, same shapes; dtypes may differ (the coarser one decides).
        tolerance: Largest error accepted, relative to the largest magnitude of the reference
            output; by default by dtype.

    Returns:
        One line on the first output that differs.

    Example:
        >>> difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])])
        'output 0: largest error 0.5, 2e-01 of the largest value; accepted is 1e-04'
    """
    if len(got) != len(wanted):
        return f"{len(got)} outputs, the reference has {len(wanted)}"
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if reason := _difference(a.detach().cpu(), b.detach().cpu(), tolerance):
            return f"output {index}: {reason}"
    return None


def change(got: Sequence[torch.Tensor], usual: Sequence[torch.Tensor] | None) -> str | None:
    """Say which output has another shape or dtype than the operator's, or None.

    A config may change how a result is computed, not what it is: callers and compiled graphs rely
    on that.

    Args:
        got: The candidate's outputs.
        usual: Those of the config in force now (meta tensors will do), None if it has none.

    Example:
        >>> change([torch.zeros(2).bfloat16()], [torch.zeros(2, device="meta")])
        'output 0: bfloat16[2], the config in force gives float32[2]'
    """
    if usual is None:
        return None
    for index, (a, b) in enumerate(zip(got, usual, strict=False)):  # written arguments follow
        if _kind(a) != _kind(b):
            return f"output {index}: {_kind(a)}, the config in force gives {_kind(b)}"
    return None


def _kind(tensor: torch.Tensor) -> str:
    # A candidate's process gives what JAX computed, before 64-bit results are widened again.
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    dtype = str(narrow.get(tensor.dtype, tensor.dtype)).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}"


def _difference(a: torch.Tensor, b: torch.Tensor, tolerance: float | None) -> str | None:
    if a.shape != b.shape:
        return f"shape {list(a.shape)}, the reference has {list(b.shape)}"
    if a.numel() == 0:
        return None
    inexact = [t.dtype for t in (a, b) if t.is_floating_point() or t.is_complex()]
    if not inexact:
        wrong = int((a.to(torch.int64) != b.to(torch.int64)).sum())
        return f"{wrong} of {a.numel()} values differ" if wrong else None
    limit = tolerance if tolerance is not None else max(map(_tolerance, inexact))
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    if int((strange := x.isnan() ^ y.isnan()).sum()):
        return f"{int(strange.sum())} of {a.numel()} values are NaN on one side only"
    finite = ~(y.isnan() | y.isinf())
    if not bool((x == y)[y.isinf()].all()):
        return "infinities differ"
    error = float((x - y)[finite].abs().max()) if bool(finite.any()) else 0.0
    scale = float(y[finite].abs().max()) if bool(finite.any()) else 0.0
    if error <= limit * max(scale, torch.finfo(torch.float32).tiny):
        return None
    share = f"{error / scale:.0e} of the largest value" if scale else "where the reference is 0"
    return f"largest error {error:.2g}, {share}; accepted is {limit:.0e}"


def _tolerance(dtype: torch.dtype) -> float:
    if dtype.is_complex:
        dtype = dtype.to_real()
    return _TOLERANCE.get(dtype, _COARSE)
