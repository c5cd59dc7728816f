"""How an operator is differentiated in reverse mode: the interface of all rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tpu_kernels.registry.autograd import Run


class Rule:
    """What a forward saves, and what a backward makes of it.

    Attributes:
        wants_outputs: Whether the outputs are saved.
    """

    wants_outputs = False

    def forward(self, run: Run) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Result slots and extra tensors to save; called below autograd. Inputs are saved
        anyway."""
        return run.call_operator(), ()

    def backward(
        self, run: Run, saved: Sequence[torch.Tensor], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """A gradient, or None, for each flat input that needs one."""
        raise NotImplementedError

    def destroy(self) -> None:
        """Take the rule's own operators, if any, out of torch."""
