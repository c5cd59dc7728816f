"""The slow way through an override: results compared with the original's, decisions recorded."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tpu_kernels.registry.overrides.chain import (
    BUSY,
    FLAGS,
    Link,
    Slot,
    current_scope,
    scoped_chain,
    without,
)
from tpu_kernels.registry.overrides.targets import is_mutable, qualified, signature

log = logging.getLogger("tpu_kernels.overrides")


def call(slot: Slot, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the written kernels do, with everything that debug mode and `explain_overrides` add."""
    scope = current_scope()
    # A call from inside an implementation is the implementation's business, not the model's.
    recorder = None if BUSY.overrides else scope.recorder
    chain = without(scoped_chain(slot) if FLAGS.scoped else slot.chain, BUSY.overrides)
    declines: list[tuple[str, str]] = []
    for link in chain:
        reason = _declined(link, slot, args, kwargs)
        if reason is not None:
            declines.append((link.override.impl_name, reason))
            continue
        ran, result = _run(link, slot, keyset, args, kwargs, scope.debug or link.override.debug)
        if ran:
            if recorder is not None:
                recorder.note(slot.site, args, link.override.impl_name, declines)
            _tell(slot, args, link.override.impl_name, declines)
            return result
        declines.append((link.override.impl_name, f"raised: {link.override.last_error}"))
    if recorder is not None:
        recorder.note(slot.site, args, None, declines)
    _tell(slot, args, "the original", declines)
    return slot.original(keyset, *args, **kwargs)


def _tell(slot: Slot, args: tuple[Any, ...], ran: str, declines: list[tuple[str, str]]) -> None:
    if BUSY.overrides or not log.isEnabledFor(logging.DEBUG):
        return
    shapes = ", ".join(str(list(a.shape)) for a in args if isinstance(a, torch.Tensor))
    why = "".join(f"; {name} declined: {reason}" for name, reason in declines)
    log.debug("%s(%s): %s%s", qualified(slot.site.op), shapes, ran, why)


def _declined(link: Link, slot: Slot, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    override = link.override
    always = signature(slot.site.op).keywords  # the tensors to write to: `run` deals with them
    if not override.takes(len(args), {k: v for k, v in kwargs.items() if k not in always}):
        return override.last_decline
    if link.when is None:
        return None
    try:
        verdict = link.when(*args, **kwargs)
    except Exception as error:
        verdict = override.predicate_raised(error)
    return None if override.accepts(verdict) else override.last_decline


def _run(
    link: Link,
    slot: Slot,
    keyset: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compare: bool,
) -> tuple[bool, Any]:
    override = link.override
    override.hits += 1
    busy = BUSY.overrides
    BUSY.overrides = busy | link.skip
    try:
        result = link.run(*args, **kwargs)
    except Exception as error:
        override.implementation_raised(error)
        return False, None
    finally:
        BUSY.overrides = busy
    # An operator that writes into its arguments cannot be run a second time for comparison.
    if compare and not is_mutable(slot.site.op):
        original = _original(slot, keyset, args, kwargs)
        _compare(link, result, original, (*args, *kwargs.values()))
    return True, result


def _original(slot: Slot, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.Tag.nondeterministic_seeded not in slot.site.op.tags:
        return slot.original(keyset, *args, **kwargs)
    with torch.random.fork_rng(devices=[]):  # the comparison must not use up random numbers
        return slot.original(keyset, *args, **kwargs)


def _compare(link: Link, result: Any, original: Any, arguments: tuple[Any, ...]) -> None:
    problems = contract_problems(result, original, arguments)
    if problems:
        override = link.override
        override.errors += 1
        raise override.error(
            "; ".join(problems),
            hint="return what the original returns, or let a predicate (when=) decline this call",
        )


def contract_problems(result: Any, original: Any, arguments: tuple[Any, ...] = ()) -> list[str]:
    """Tell where a result differs from the original's in shape, stride, dtype or device.

    Args:
        result: The implementation's result.
        original: The original's, for the same arguments.
        arguments: The arguments: the result must not lie in their memory where the original's
            does not, or who changes the one changes the other.

    Example:
        >>> contract_problems(torch.ones(2), torch.ones(2, dtype=torch.float64))
        ['dtype torch.float32 instead of torch.float64']
    """
    mine, theirs = _tensors(result), _tensors(original)
    problems: list[str] = []
    given = memory_of(arguments)
    if len(mine) != len(theirs):
        problems.append(f"{len(mine)} results instead of {len(theirs)}")
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        where = f"result {i}: " if len(theirs) > 1 else ""
        for name, x, y in _contract(a, b):
            if x != y:
                problems.append(f"{where}{name} {x} instead of {y}")
        if memory_of((a,)) & given and not memory_of((b,)) & given:
            problems.append(f"{where}it shares the memory of an argument")
    return problems


def memory_of(values: Any) -> set[int]:
    """The addresses of the storages of the dense tensors among nested values."""
    leaves = [leaf for leaf in _tensors(values) if isinstance(leaf, torch.Tensor)]
    dense = [leaf for leaf in leaves if leaf.layout is torch.strided]
    return {leaf.untyped_storage().data_ptr() for leaf in dense} - {0}


def _contract(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return [("type", type(a).__name__, type(b).__name__)]
    return [
        ("shape", list(a.shape), list(b.shape)),
        # The stride along an axis of one element (or of an empty tensor) has no meaning.
        ("stride", _strides(a), _strides(b)),
        ("dtype", a.dtype, b.dtype),
        ("device", a.device, b.device),
    ]


def _strides(tensor: torch.Tensor) -> list[int]:
    if tensor.numel() == 0:
        return []
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def _tensors(result: Any) -> list[Any]:
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in _tensors(item)]
    return [result]
