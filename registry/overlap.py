"""Arguments that an operator writes to: refused before the launch where the write would be wrong.

They must not share memory with each other or with themselves. A kernel is a pure function: its new
values are written back one after the other, so that with shared memory the last one would win,
silently. Reading and writing the same memory is fine: the kernel is over before anything is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.layout import tensors_of

if TYPE_CHECKING:
    from tpu_kernels.registry.operator import Operator


def guarded(
    operator: Operator, mutated: Sequence[str], implementation: Callable[..., Any]
) -> Callable[..., Any]:
    """An implementation that refuses overlapping mutated arguments before the launch.

    Args:
        operator: The operator.
        mutated: Names of the mutated parameters.
        implementation: What runs it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        check(operator, mutated, operator.arguments(args, kwargs))
        return implementation(*args, **kwargs)

    return run


def check(operator: Operator, mutated: Sequence[str], arguments: Sequence[Any]) -> None:
    """Refuse mutated arguments that share memory, or that torch does not let be written to.

    Args:
        operator: The operator.
        mutated: Names of the mutated parameters.
        arguments: One argument per parameter in schema order; tensors may be fake.

    Raises:
        ArgumentError: Names both arguments, or the one that overlaps itself.
    """
    definition = operator.definition
    named: list[tuple[str, torch.Tensor]] = []
    for p, argument in zip(definition.parameters, arguments, strict=True):
        if p.name in mutated:
            tensors = tensors_of(argument)
            several = p.kind.is_list
            named += [(f"{p.name}[{i}]" if several else p.name, t) for i, t in enumerate(tensors)]
    problem = None
    for i, (name, tensor) in enumerate(named):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            problem = f"argument {name!r} is written to, but is an inference tensor"
        elif _overlaps_itself(tensor):
            problem = f"argument {name!r} is written to, but several of its elements share memory"
        for other, earlier in named[:i]:
            if overlap(earlier, tensor):
                problem = f"arguments {other!r} and {name!r} are written to, but share memory"
        if problem is not None:
            raise ArgumentError(
                f"kernel {definition.kernel!r}: {problem}",
                where=definition.where,
                hint=f"pass {name}.clone()",
            )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have a byte of memory in common (symbolic sizes: False).

    Example:
        >>> x = torch.zeros(6)
        >>> overlap(x[:4], x[3:]), overlap(x[::2], x[1::2])
        (True, False)
    """
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not (_known(a) and _known(b)):
        return False
    (start_a, end_a), (start_b, end_b) = _extent(a), _extent(b)
    if end_a <= start_b or end_b <= start_a:
        return False
    start = min(start_a, start_b)
    touched = np.zeros(max(end_a, end_b) - start, bool)
    _bytes(touched, a, start)[...] = True
    return bool(_bytes(touched, b, start).any())


def _known(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(type(n) is int for n in numbers)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the storage that a tensor uses, and the one after its last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return start, start
    last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _bytes(buffer: np.ndarray[Any, Any], tensor: torch.Tensor, start: int) -> Any:
    """The part of a byte map (of a storage from byte ``start`` on) that a tensor covers."""
    size = tensor.element_size()
    return np.lib.stride_tricks.as_strided(
        buffer[tensor.storage_offset() * size - start :],
        (*tensor.shape, size),
        (*(s * size for s in tensor.stride()), 1),
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if not _known(tensor) or tensor.is_contiguous() or tensor.numel() < 2:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                break
            reach += (size - 1) * stride
    else:
        return False  # each dimension steps over everything that the smaller ones reach
    start, end = _extent(tensor)
    touched = np.zeros(end - start, bool)
    _bytes(touched, tensor, start)[...] = True
    return int(touched.sum()) < tensor.numel() * tensor.element_size()
