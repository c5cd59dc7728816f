"""Donated arguments: refused where they are still needed, dead after the call.

On a TPU the operator may write its results into a donated argument's memory. Here nothing is
reused, but the rules are the same, so that a program tested on CPU does not break on the chip: what
would be unsafe raises before the launch, and a donated tensor raises on every later use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.layout import tensors_of

if TYPE_CHECKING:
    from tpu_kernels.registry.operator import Operator


when_donated: list[Callable[[torch.Tensor], object]] = []
"""Called with each tensor that is given away: backends drop what they keep of its memory."""


class DonatedTensor(torch.Tensor):
    """What a tensor becomes when it is donated: every operation on it raises."""

    _donated_as: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse, naming the argument and the operator that it was donated to."""
        for item in [*args, *(kwargs or {}).values()]:
            for tensor in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(tensor, DonatedTensor):
                    raise RuntimeError(tensor.__dict__["_donated_as"])
        raise RuntimeError("a donated tensor was used")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.__dict__['_donated_as']}>"


def guarded(
    operator: Operator, donated: Sequence[str], implementation: Callable[..., Any]
) -> Callable[..., Any]:
    """An implementation that checks donated arguments before the launch and kills them after it.

    Args:
        operator: The operator.
        donated: Names of the donated parameters.
        implementation: What runs it.
    """
    parameters = operator.definition.parameters

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = operator.arguments(args, kwargs)
        everything = [
            (p.name, tensor)
            for p, argument in zip(parameters, arguments, strict=True)
            if p.kind.is_tensor
            for tensor in tensors_of(argument)
        ]
        given_away = [(n, t) for n, t in everything if n in donated]
        for name, tensor in given_away:
            _check(operator, name, tensor, everything)
        result = implementation(*args, **kwargs)
        for name, tensor in given_away:
            _kill(operator, name, tensor)
        return result

    return run


def _check(
    operator: Operator, name: str, tensor: torch.Tensor, everything: list[tuple[str, torch.Tensor]]
) -> None:
    storage = tensor.untyped_storage()
    problem = None
    if tensor.numel() * tensor.element_size() != storage.nbytes() or tensor._base is not None:
        problem = "is a view; others may see the same memory"
    else:
        sharing = [
            n
            for n, t in everything
            if t is not tensor and t.untyped_storage().data_ptr() == storage.data_ptr()
        ]
        twice = sum(t is tensor for _, t in everything) > 1
        if (sharing or twice) and storage.nbytes():
            problem = f"shares its memory with argument {sharing[0] if sharing else name!r}"
    if problem is not None:
        definition = operator.definition
        raise ArgumentError(
            f"kernel {definition.kernel!r}: argument {name!r} is donated, but it {problem}",
            where=definition.where,
            hint=f"pass {name}.clone()",
        )


def _kill(operator: Operator, name: str, tensor: torch.Tensor) -> None:
    # Give the memory back first: a donated tensor must not keep it alive.
    for forget in when_donated:
        forget(tensor)
    tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[call-overload]
    tensor.__class__ = DonatedTensor
    tensor.__dict__["_donated_as"] = f"tensor {name!r} was donated to {operator.definition.name}"
