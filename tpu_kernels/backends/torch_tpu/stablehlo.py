"""The StableHLO that TorchTPU makes of torch code, without compiling or running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_torch_tpu as compat
from tpu_kernels.backends.torch_tpu import detection
from tpu_kernels.backends.torch_tpu.tracing import lowering_for
from tpu_kernels.compiler.chips import Target
from tpu_kernels.errors import ArgumentError, DeviceError

DEVICE = "tpu"


def lower(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
) -> str:
    """Lower a module or a torch function for a chip, as TorchTPU would for its compile backend.

    Args:
        function: A `torch.nn.Module`, or a function of torch tensors. Every tensor that it reads
            must be an argument; parameters and buffers of a module are.
        args: Its arguments. Tensors on any device; their values do not count, whether they require
            a gradient does.
        kwargs: Its arguments by name.
        target: The chip whose configurations the kernels of this package take.

    Returns:
        One StableHLO module as text, with source locations.

    Raises:
        DeviceError: TorchTPU does not own the device in this process.
        ArgumentError: The function returns no tensor, reads a tensor that is no argument, or wants
            to know a value.
    """
    if not detection.owns_device():
        raise DeviceError(
            "this is not a process of TorchTPU, so TorchTPU cannot lower a program in it",
            hint="start it with `tpu-kernels run --torch-tpu program.py`",
        )
    state = _state_of(function)
    leaves, tree = torch.utils._pytree.tree_flatten((state, tuple(args), dict(kwargs)))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    placeholders = [_placeholder(leaves[i]) for i in positions]
    with compat.tracing_mode(), lowering_for(target):
        filled = list(leaves)
        for position, placeholder in zip(positions, placeholders, strict=True):
            # A clone: what is written to an argument must not become the argument.
            clone = placeholder.clone()
            filled[position] = clone.requires_grad_() if _wants(leaves[position]) else clone
        values, positional, named = torch.utils._pytree.tree_unflatten(filled, tree)
        try:
            result = _call(function, values, positional, named)
            outputs = [
                leaf
                for leaf in torch.utils._pytree.tree_leaves(result)
                if isinstance(leaf, torch.Tensor)
            ]
            if not outputs:
                raise ArgumentError(f"{name_of(function)} returns no tensor to compile for")
            return compat.stablehlo_text(outputs, placeholders)
        except RuntimeError as error:
            raise _explained(function, error) from error


def name_of(function: Callable[..., Any]) -> str:
    """What to call a module or function in reports."""
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    return str(getattr(function, "__name__", type(function).__name__))


def place_of(function: Callable[..., Any]) -> str | None:
    """``file:line`` of a function, or of a module's class."""
    subject: Any = type(function) if isinstance(function, torch.nn.Module) else function
    try:
        return f"{inspect.getsourcefile(subject)}:{inspect.getsourcelines(subject)[1]}"
    except (OSError, TypeError):
        return None


def _state_of(function: Callable[..., Any]) -> dict[str, torch.Tensor]:
    if not isinstance(function, torch.nn.Module):
        return {}
    return {**dict(function.named_parameters()), **dict(function.named_buffers())}


def _wants(tensor: torch.Tensor) -> bool:
    # A module's forward is wanted, not its derivative: parameters are constants here.
    return tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)


def _placeholder(tensor: torch.Tensor) -> Any:
    like = tensor.detach()
    if like.device.type != DEVICE:
        like = torch.empty(tuple(like.shape), dtype=like.dtype, device=DEVICE)
    return compat.placeholder_like(like)


def _call(
    function: Callable[..., Any],
    state: dict[str, torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    if isinstance(function, torch.nn.Module):
        return torch.func.functional_call(function, state, tuple(args), dict(kwargs))
    return function(*args, **kwargs)


def _explained(function: Callable[..., Any], error: RuntimeError) -> RuntimeError | ArgumentError:
    """TorchTPU's errors about what a program may not do, in the user's terms."""
    text, where = str(error), place_of(function)
    if "argument that was not provided" in text:
        shape = text.rpartition("provided:")[2].strip()
        return ArgumentError(
            f"{name_of(function)} reads a tensor ({shape}) that is not among its arguments",
            where=where,
            hint="pass it as an argument, or pass the torch.nn.Module that holds it",
        )
    if "during an FX trace" in text:
        return ArgumentError(
            f"{name_of(function)} asks for a tensor's value, which a program has none of",
            where=where,
            hint="leave .item(), bool() and printing out of it",
        )
    return error
