"""Calling a kernel's reference: a torch (or array-agnostic) function with the kernel's
arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.operator import results_of


def call(spec: KernelSpec, values: Mapping[str, Any]) -> Any:
    """Call the reference with a kernel's arguments by name.

    A reference need not know the tunables: it receives the arguments that it names, or, where its
    names differ, the kernel's positional arguments in order. It runs on torch's own operators:
    where the kernel stands in for one of them, the reference means the original.

    Args:
        spec: A kernel with a reference.
        values: Every argument of the kernel by name.

    Returns:
        What the reference returns, in the kernel's result structure.
    """
    if spec.reference is None:
        raise ArgumentError(f"kernel {spec.name!r} has no reference", where=str(spec.source))
    from tpu_kernels.registry.overrides.chain import originals  # it is built on kernels

    with originals():
        return _call(spec, spec.reference, values)


def _call(spec: KernelSpec, reference: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    usable = [p for p in spec.parameters if p.name in values and not p.tunable]
    try:
        accepted = inspect.signature(reference).parameters
    except (TypeError, ValueError):  # a C function such as torch.add
        accepted = None
    if accepted is None:
        return reference(*(values[p.name] for p in usable if p.kind.is_tensor))
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()) or all(
        n in values for n, p in accepted.items() if p.default is inspect.Parameter.empty
    ):
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        return reference(
            **{p.name: values[p.name] for p in usable if takes_any or p.name in accepted}
        )
    positional = [values[p.name] for p in usable if not p.keyword_only][: len(accepted)]
    return reference(*positional)


def results(spec: KernelSpec, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Call the reference of a kernel that may write to its arguments.

    Such a reference returns what the kernel's function returns, or writes into its arguments as
    the operator does; as torch's in-place operators, it may return what it wrote to.

    Args:
        spec: A kernel with a reference.
        values: Every argument of the kernel by name.

    Returns:
        The outputs, and the new values of mutated arguments by name.
    """
    result: Any = call(spec, values)
    mutated = spec.mutates_args
    if not mutated:
        return result, {}
    new: Mapping[str, Any] = values
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, new = result
    elif isinstance(result, Mapping):
        result, new = None, result
    return result if spec.returns.slots else None, {name: new[name] for name in mutated}


def flat_call(spec: KernelSpec, values: Mapping[str, Any]) -> Any:
    """Call the reference and return its result as the operator does."""
    result = call(spec, values)
    return results_of(spec.returns.flatten(result)) if not spec.mutates_args else result
