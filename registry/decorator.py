"""`@tpu_kernel`: from a function to a registered kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from tpu_kernels import _compat_helion
from tpu_kernels.dsl import jax_frontend
from tpu_kernels.dsl.jax_frontend import Options
from tpu_kernels.registry.kernel import Kernel, register


@overload
def tpu_kernel(name: Callable[..., Any], /) -> Kernel: ...


@overload
def tpu_kernel(
    name: str | None = None,
    *,
    mutates_args: Sequence[str] = ...,
    donate_args: Sequence[str] = ...,
    dynamic_args: Sequence[str] = ...,
    backward: str | None = ...,
    vmap: str | None = ...,
    autocast: torch.dtype | None = ...,
    sharding: Any = ...,
    int64: str | None = ...,
    flops: Callable[..., int] | None = ...,
    configs: Any = ...,
    constraints: Any = ...,
    bucket: Callable[..., Any] | None = ...,
    reference: Callable[..., Any] | None = ...,
    precision: str | None = ...,
    cache_dir: Any = ...,
    replace: bool = ...,
) -> Callable[[Callable[..., Any]], Kernel]: ...


def tpu_kernel(
    name: str | Callable[..., Any] | None = None,
    *,
    mutates_args: Sequence[str] = (),
    donate_args: Sequence[str] = (),
    dynamic_args: Sequence[str] = (),
    backward: str | None = "jax",
    vmap: str | None = "jax",
    autocast: torch.dtype | None = None,
    sharding: Any = None,
    int64: str | None = None,
    flops: Callable[..., int] | None = None,
    configs: Any = None,
    constraints: Any = None,
    bucket: Callable[..., Any] | None = None,
    reference: Callable[..., Any] | None = None,
    precision: str | None = None,
    cache_dir: Any = None,
    replace: bool = False,
) -> Any:
    """Turn a JAX or Pallas function into a complete torch operator.

    Args:
        name: ``"namespace::op"``; the function's own name in namespace ``tpu`` by default. The
            decorator can also be used bare.
        mutates_args: Tensor arguments that the operator writes to. The function stays pure: it
            returns ``{argument: new value}``, or ``(outputs, {argument: new value})``.
        donate_args: Tensor arguments whose memory the operator may reuse; callers must not touch
            them again.
        dynamic_args: Numbers that enter as 0-d arrays: one program for all values.
        backward: ``"jax"`` differentiates the function with `jax.vjp` and saves residuals,
            ``"recompute"`` computes them again in the backward, ``"reference"`` differentiates the
            reference, None is no backward. `Kernel.backward` defines one by hand.
        vmap: ``"jax"`` batches with `jax.vmap`; None leaves it to torch's loop.
        autocast: dtype that floating inputs are cast to under `torch.autocast`.
        sharding: How the operator is distributed, an einsum-like string.
        int64: Policy for 64-bit inputs: None refuses them, ``"narrow_checked"`` passes integers
            that fit as 32 bits and widens declared 64-bit outputs back, ``"exact"`` computes in 64
            bits.
        flops: ``flops(*shapes)`` for torch's FLOP counter.
        configs: The tunable parameters and their candidates: a dict of lists, a list of dicts, or a
            function.
        constraints: Predicate that a configuration must satisfy.
        bucket: Maps the arguments to a key under which tuned configurations are shared.
        reference: A torch function that computes the same; used for checks and for empty inputs.
        precision: Default precision of the kernel's matrix products, as
            `jax.default_matmul_precision` takes it ("default", "high", "highest").
        cache_dir: Folder of the kernel's compiled CPU programs; that of the settings by default
            (``TPU_KERNELS_CACHE_DIR``).
        replace: Take the name over from another definition.

    Returns:
        A `Kernel`.

    Raises:
        SignatureError: The signature cannot become a schema; says which parameter, where, and what
            is supported.
        NameClashError: Another place defines a kernel of this name.

    Example:
        >>> import jax, torch
        >>> import tpu_kernels as tk
        >>> @tk.tpu_kernel("doc::scale_add")
        ... def scale_add(x: jax.Array, y: jax.Array, alpha: float = 1.0) -> jax.Array:
        ...     return x + alpha * y
        >>> scale_add(torch.ones(2), torch.ones(2), alpha=2.0)
        tensor([3., 3.])
        >>> torch.ops.doc.scale_add.default._schema
        doc::scale_add(Tensor x, Tensor y, float alpha=1.) -> Tensor
    """
    options = Options(
        mutates_args=_names(mutates_args),
        donate_args=_names(donate_args),
        dynamic_args=_names(dynamic_args),
        backward=backward,
        vmap=vmap,
        autocast=autocast,
        sharding=sharding,
        int64=int64,
        flops=flops,
        configs=configs,
        constraints=constraints,
        bucket=bucket,
        reference=reference,
        precision=precision,
        cache_dir=cache_dir,
    )
    caller_locals = dict(sys._getframe(1).f_locals)

    def decorate(fn: Callable[..., Any]) -> Kernel:
        own_name = name if isinstance(name, str) else None
        if _compat_helion.is_kernel(fn):
            from tpu_kernels.dsl import helion_frontend

            spec = helion_frontend.from_kernel(fn, own_name, options, caller_locals)
        else:
            spec = jax_frontend.from_function(fn, own_name, options, caller_locals)
        return register(spec, replace=replace)

    return decorate(name) if callable(name) else decorate


def _names(option: Sequence[str]) -> tuple[str, ...]:
    """Names that an option lists; a string is one name, not its letters."""
    return (option,) if isinstance(option, str) else tuple(dict.fromkeys(option))
