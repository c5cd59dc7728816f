"""From a JAX function to something that TorchTPU runs, in one of two ways.

``fast`` puts a cache of our own in front of TorchTPU's ``call_custom_kernel``; it needs three
private functions. ``public`` goes through ``torch.tpu.pallas.jax_op`` and costs ten times as much
per call.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tpu_kernels import _compat_torch_tpu as compat
from tpu_kernels.compiler.chips import Target
from tpu_kernels.dsl import dtypes

NAMESPACE = "tpu_kernels_jax_op"
_numbers = itertools.count()


class Program(Protocol):
    """Computes the flat outputs of an operator's program."""

    def __call__(self, *, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run it, queue it, or put it into the module that is being built."""
        ...


Maker = Callable[
    [str, Callable[..., Any], Sequence[Any], Target, bool], tuple[Program, list[torch.dtype]]
]
"""``make(name, function, avals, target, x64)``: a program, and the dtypes of its outputs."""


def fast(
    name: str, function: Callable[..., Any], avals: Sequence[Any], target: Target, x64: bool
) -> tuple[Program, list[torch.dtype]]:
    """Trace a function, register its module with TorchTPU, and return the call of it.

    Args:
        name: Name of the operator.
        function: JAX function of flat arrays that returns a tuple of arrays.
        avals: Shape and dtype of each argument.
        target: The chip that a kernel sees when it asks.
        x64: Whether 64-bit types keep their width.

    Returns:
        The program and the dtypes of its outputs.
    """
    from tpu_kernels import _compat_jax
    from tpu_kernels.compiler.lowering import target_scope

    with target_scope(target):
        exported = _compat_jax.export_for_tpu(function, avals, x64=x64)
    # Without source locations: moving a kernel in its file must not compile it again.
    module = _compat_jax.parse_module(exported.mlir_module())
    text = str(module.operation.get_asm(enable_debug_info=False))
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    register, _, call = compat.kernel_functions()
    kernel = f"tpu_kernels::{name}"
    register(kernel, key, serialized_mlir_module=exported.mlir_module_serialized)
    made = [dtypes.to_torch(aval.dtype) for aval in exported.out_avals]
    placeholders = [
        torch.empty(tuple(aval.shape), dtype=dtype, device="meta")
        for aval, dtype in zip(exported.out_avals, made, strict=True)
    ]
    return functools.partial(call, kernel, key, output_shapes=placeholders), made


def public(
    name: str, function: Callable[..., Any], avals: Sequence[Any], target: Target, x64: bool
) -> tuple[Program, list[torch.dtype]]:
    """As `fast`, through ``torch.tpu.pallas.jax_op``."""
    import jax

    from tpu_kernels.compiler.lowering import target_scope

    with target_scope(target), jax.enable_x64(x64):
        outputs = jax.eval_shape(function, *avals)
    made = [dtypes.to_torch(aval.dtype) for aval in outputs]

    def flat(*arrays: Any) -> Any:
        with jax.enable_x64(x64):
            results = function(*arrays)
        return results if len(results) > 1 else results[0]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f"a{i}", kind, annotation=jax.Array) for i in range(len(avals))],
        return_annotation=jax.Array
        if len(made) == 1
        else types.GenericAlias(tuple, (jax.Array,) * len(made)),
    )
    flat.__name__ = flat.__qualname__ = function.__name__
    opname = f"{name.replace('::', '_')}_{next(_numbers)}"
    device_module: Any = torch.tpu  # type: ignore[attr-defined]
    op = device_module.pallas.jax_op(f"{NAMESPACE}::{opname}", flat)

    def program(*, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        # It traces at the first call, and again whenever it finds no kernel.
        with target_scope(target):
            results = op(*inputs)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    return program, made
