"""``torch.tpu.precision``: how exact float32 products are to be, for a block of code."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.engine import mode_scope


class Precision(enum.Enum):
    """The precision of a float32 product, with StableHLO's names.

    Attributes:
        DEFAULT: One pass of bfloat16: ``torch.set_float32_matmul_precision("medium")``.
        HIGH: Three passes: ``"high"``.
        HIGHEST: Six passes: ``"highest"``.
    """

    DEFAULT = "medium"
    HIGH = "high"
    HIGHEST = "highest"


@contextlib.contextmanager
def precision(mode: Precision) -> Iterator[None]:
    """Override `torch.set_float32_matmul_precision` for a block, for this thread.

    What it changes: products under `tpu_kernels.numerics` ``("tpu")``, and kernels that stand in
    for an operator of torch. Without ``numerics("tpu")`` the CPU's own products are exact.

    Args:
        mode: The precision.

    Raises:
        ArgumentError: If it is no `Precision`.

    Example:
        >>> import torch, tpu_kernels as tk, tpu_kernels.device
        >>> third = torch.full((1, 1), 1 / 3, device="tpu")
        >>> with tk.numerics("tpu"), torch.tpu.precision(torch.tpu.Precision.DEFAULT):
        ...     (third @ torch.ones(1, 1, device="tpu")).item()
        0.333984375
    """
    if not isinstance(mode, Precision):
        raise ArgumentError(
            f"a precision is a torch.tpu.Precision, not {mode!r}",
            hint="torch.tpu.Precision.DEFAULT, HIGH or HIGHEST",
        )
    with mode_scope(products=mode.value):
        yield
