"""Operators made by `tpu_kernel` inside a lowered graph: their JAX program, inlined."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_kernels.dsl import dtypes
from tpu_kernels.lowering.rules import Unlowered
from tpu_kernels.lowering.values import torch_dtype
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import fill, split
from tpu_kernels.registry.operator import Operator, results_of
from tpu_kernels.registry.shapes import Meta


def inline(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], engine: Engine
) -> Any:
    """Call an operator's JAX program on the arrays of the program that is being traced.

    Args:
        operator: A kernel's operator, or one of its derivatives.
        args: Its arguments, arrays for tensors.
        kwargs: Its keyword arguments.
        engine: How to trace Pallas calls, and whose configurations apply.

    Returns:
        What the operator returns.

    Raises:
        Unlowered: The operator writes to its arguments, checks values, or has empty tensors.
    """
    definition = operator.definition
    if definition.mutated:
        raise Unlowered("it writes to its arguments")
    layout, arrays, dynamics = split(definition.parameters, operator.arguments(args, dict(kwargs)))
    if any(0 in array.shape for array in arrays):
        raise Unlowered("a kernel on empty tensors")
    metas = [Meta(tuple(array.shape), torch_dtype(array)) for array in arrays]
    if any(meta.dtype in dtypes.WIDE for meta in metas):
        if definition.int64 != "exact":
            raise Unlowered("a kernel that checks the values of 64-bit integers")
        engine = dataclasses.replace(engine, x64=True)
    function = operator.jax_function(operator.call_of(layout, metas), engine)
    numbers = [_argument(number, wide=engine.x64) for number in dynamics]
    slots = function(*fill(layout, arrays), *numbers)
    results = [list(s) if isinstance(s, tuple) else s for s in slots]
    return results_of(results[: len(definition.returns)])


def _argument(number: Any, *, wide: bool) -> Any:
    """A dynamic number as the kernel's own program sees it: a value, nothing to specialise on.

    As a constant, XLA would compute with it: ``x + 0`` becomes ``x``, which for -0.0 is wrong.
    """
    if not isinstance(number, (bool, int, float)):
        return number
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(wide):
        try:
            array = jnp.asarray(number)
        except OverflowError as error:
            raise Unlowered(f"{number} does not fit an argument of a kernel") from error
        return jax.lax.optimization_barrier(array)
