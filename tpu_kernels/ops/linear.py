"""Linear layers with what follows them fused, and PyTorch's matrix products by `tpu::matmul`.

`linear` and `gated_linear` are for models that are written for them; `use_matmul` is for those that
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.ops.matmul import bmm, gated_matmul, matmul
from tpu_kernels.registry.numerics.mxu import jax_precision
from tpu_kernels.registry.overrides import override
from tpu_kernels.registry.overrides.group import OverrideGroup

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# Functions ----------------------------------------------------------------------------------------


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear`, an activation and a residual connection in one kernel.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features].
        activation: As in `matmul`.
        residual: [..., out_features], added last.
        precision: As in `matmul`; by default `torch.set_float32_matmul_precision` decides.

    Returns:
        [..., out_features].

    Example:
        >>> x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
        >>> out = linear(x, weight, torch.zeros(4), activation="relu")
        >>> torch.allclose(out, torch.relu(x @ weight.T), atol=1e-5)
        True
    """
    rows = x.reshape(-1, x.shape[-1])
    flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
    matrix, transposed = _stored(weight)
    out: torch.Tensor = matmul(
        rows,
        matrix,
        bias,
        flat,
        transpose_y=not transposed,
        activation=activation,
        precision=_precision(precision, x, weight),
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str | None = "silu",
    residual: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """``activation(x @ gate.T) * (x @ up.T) + residual`` in one kernel: SwiGLU, GeGLU and the like.

    Args:
        x: [..., in_features].
        gate: [out_features, in_features].
        up: [out_features, in_features].
        activation: As in `matmul`.
        residual: [..., out_features], added last.
        precision: As in `linear`.

    Returns:
        [..., out_features].

    Example:
        >>> x, gate, up = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4, 8)
        >>> wanted = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
        >>> torch.allclose(gated_linear(x, gate, up), wanted, atol=1e-4)
        True
    """
    out: torch.Tensor = gated_matmul(
        x.reshape(-1, x.shape[-1]),
        gate,
        up,
        None if residual is None else residual.reshape(-1, residual.shape[-1]),
        transpose_y=True,
        activation=activation,
        precision=_precision(precision, x, gate),
    )
    return out.reshape(*x.shape[:-1], gate.shape[0])


def _precision(asked: str | None, *operands: torch.Tensor) -> str | None:
    if asked is not None or all(x.dtype is not torch.float32 for x in operands):
        return asked
    return jax_precision()


def _stored(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A matrix as it lies in memory, and whether that is its transpose: then nothing is copied."""
    if not x.is_contiguous() and x.mT.is_contiguous():
        return x.mT, True
    return x, False


# The operators of ATen ----------------------------------------------------------------------------


def _product(
    kernel: Callable[..., Any],
    a: torch.Tensor,
    b: torch.Tensor,
    added: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> torch.Tensor:
    (x, transpose_x), (y, transpose_y) = _stored(a), _stored(b)
    out: torch.Tensor = kernel(
        x,
        y,
        added if beta != 0 else None,  # it may hold NaN, which does not count then
        transpose_x=transpose_x,
        transpose_y=transpose_y,
        alpha=float(alpha),
        beta=float(beta),
        precision=_precision(None, a),
    )
    return out


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _product(matmul, a, b)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _product(bmm, a, b)


def _addmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _product(matmul, a, b, added, alpha, beta)


def _baddbmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _product(bmm, a, b, added, alpha, beta)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return linear(x, weight, bias)


# Predicates ---------------------------------------------------------------------------------------


def suits(
    rank: int, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None = None
) -> bool | str:
    """Whether the kernels compute a product of ATen's.

    Args:
        rank: Number of dimensions that both operands must have.
        a: Left operand.
        b: Right operand.
        added: What is added to the product.

    Returns:
        True, or why not in a few words, for an override's ``when``.

    Example:
        >>> x = torch.ones(2, 2, dtype=torch.float64)
        >>> suits(2, x, x)
        'torch.float64 is not a dtype of the kernel'
    """
    operands = [x for x in (a, b, added) if x is not None]
    if any(x.layout is not torch.strided for x in operands):
        return "a sparse tensor"
    if any(x.dtype is not a.dtype for x in operands):
        return "several dtypes"
    if a.dtype not in _DTYPES:
        return f"{a.dtype} is not a dtype of the kernel"
    if a.dim() != rank or b.dim() != rank:
        return f"{a.dim()}-d and {b.dim()}-d operands"
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return "shapes that do not fit"
    if any(0 in x.shape for x in operands):
        return "an empty tensor"
    if added is not None:
        if added.dim() > rank:
            return f"{added.dim()}-d tensor to add to"
        result = (*a.shape[:-1], b.shape[-1])
        behind = result[rank - added.dim() :]
        if any(s not in (1, r) for s, r in zip(added.shape, behind, strict=True)):
            return "a tensor to add to that does not fit"
    return True


PLAIN = "a plain product, which XLA computes as fast"
"""Why `use_matmul` leaves what the kernel does not compute faster than XLA."""


def _wins(a: torch.Tensor) -> bool | str:
    """Whether the kernel is better than XLA's own product where it fuses nothing.

    It is in three passes of float32, whose halves it rounds where XLA cuts them.
    """
    return True if a.dtype is torch.float32 and jax_precision() == "high" else PLAIN


def _plain(rank: int, everything: bool) -> Callable[..., bool | str]:
    def when(a: torch.Tensor, b: torch.Tensor) -> bool | str:
        fitting = suits(rank, a, b)
        return fitting if fitting is not True or everything else _wins(a)

    return when


def _adding(rank: int) -> Callable[..., bool | str]:
    def when(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool | str:
        return suits(rank, a, b, added)

    return when


def _suits_linear(everything: bool) -> Callable[..., bool | str]:
    def when(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool | str:
        if weight.dim() != 2 or x.dim() == 0:
            return f"{x.dim()}-d and {weight.dim()}-d operands"
        if bias is not None and bias.dim() > 1:
            return f"{bias.dim()}-d bias"
        if 0 in x.shape:
            return "an empty tensor"
        line = x.reshape(-1, x.shape[-1]) if x.layout is torch.strided else x
        fitting = suits(2, line, weight.t(), bias)
        return fitting if fitting is not True or everything or bias is not None else _wins(x)

    return when


class MatmulOverrides(OverrideGroup):
    """The overrides that `use_matmul` makes, as one: a context manager and a switch."""


def use_matmul(*, plain: bool = False, device: str = "tpu", priority: int = 0) -> MatmulOverrides:
    """Let `tpu::matmul` and `tpu::bmm` answer PyTorch's matrix products.

    That is `mm`, `addmm`, `bmm`, `baddbmm` and `linear`, with what is made of them (`nn.Linear`,
    `matmul`, `einsum`, ...), eager and compiled, forward and backward; float32 follows
    `torch.set_float32_matmul_precision`. Products with nothing to fuse are left to XLA, which
    computes them as fast, but for float32 at ``"high"``; what the kernels do not compute (float64,
    integers, several dtypes, ...) is left as well. The reasons are counted.

    Args:
        plain: Take all products, also those with nothing to fuse.
        device: ``"tpu"`` or ``"cpu"``.
        priority: Among several overrides; see `override`.

    Returns:
        Inactive overrides: enter them by ``with`` (this thread), or call ``enable()``.

    Example:
        >>> import tpu_kernels.device
        >>> layer = torch.nn.Linear(8, 4).to("tpu")
        >>> with use_matmul() as overrides:
        ...     out = layer(torch.ones(2, 8, device="tpu"))
        >>> overrides.hits
        1
    """
    parts: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "aten::mm": (_mm, _plain(2, plain)),
        "aten::addmm": (_addmm, _adding(2)),
        "aten::bmm": (_bmm, _plain(3, plain)),
        "aten::baddbmm": (_baddbmm, _adding(3)),
        "aten::linear": (_linear, _suits_linear(plain)),
    }
    return MatmulOverrides(
        {
            name: override(name, impl, when=when, device=device, priority=priority)
            for name, (impl, when) in parts.items()
        }
    )
