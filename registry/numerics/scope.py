"""`numerics`: which of the two arithmetics holds, for a block or for the process."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Literal, Self

from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.engine import Mode, change_process_mode, mode_scope
from tpu_kernels.registry.numerics import operators

Numerics = Literal["exact", "tpu"]
NUMERICS = ("exact", "tpu")


class numerics(contextlib.ContextDecorator):
    """How float32 matrix products are rounded: as on a TPU, or not at all.

    The MXU multiplies bfloat16 only. Under ``"tpu"`` the products of torch on CPU tensors and on
    the simulated device (``mm``, ``addmm``, ``bmm``, convolutions, attention and what is made of
    them), eager and compiled, forward and backward, are rounded as
    `torch.get_float32_matmul_precision` says: ``"medium"`` in one pass of bfloat16, ``"high"`` in
    three, ``"highest"`` (torch's default) in six. Products inside of kernels, Pallas bodies
    included, follow the ``precision`` that the kernel states, and JAX's default of one pass where
    it states none. ``"exact"``, the default, leaves everything to the CPU, which ignores precision.

    Use it in a ``with`` block or as a decorator (this thread, and the backward passes that it
    starts), or by `enable` for every thread.

    Args:
        mode: ``"tpu"`` or ``"exact"``.

    Raises:
        ArgumentError: The mode is another.

    Example:
        >>> import torch
        >>> third = torch.full((1, 1), 1 / 3)
        >>> before = torch.get_float32_matmul_precision()
        >>> torch.set_float32_matmul_precision("medium")
        >>> with numerics("tpu"):
        ...     (third @ torch.ones(1, 1)).item()
        0.333984375
        >>> torch.set_float32_matmul_precision(before)
    """

    def __init__(self, mode: Numerics) -> None:
        if mode not in NUMERICS:
            raise ArgumentError(
                f"numerics({mode!r}): there is no such mode", hint='pass "tpu" or "exact"'
            )
        self.mode = mode
        self._entered = threading.local()
        self._before: Mode | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.mode == "tpu":
                for override in operators.overrides():
                    stack.enter_context(override)
            stack.enter_context(mode_scope(numerics=self.mode))
            self._entered.__dict__.setdefault("stack", []).append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.stack.pop().close()

    def enable(self) -> Self:
        """Put the mode in force for every thread that is in no block; returns itself."""
        with _lock:
            if self._before is None:
                self._before = change_process_mode(numerics=self.mode)
                _use(self.mode)
        return self

    def disable(self) -> None:
        """Go back to the mode before `enable`; nothing happens if it was not called."""
        with _lock:
            if self._before is not None:
                change_process_mode(numerics=self._before.numerics)
                _use(self._before.numerics)
                self._before = None

    def __repr__(self) -> str:
        return f"numerics({self.mode!r})"


_lock = threading.RLock()


def _use(mode: str) -> None:
    for override in operators.overrides():
        override.enable() if mode == "tpu" else override.disable()
