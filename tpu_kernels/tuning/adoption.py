"""Turning the results of other tuners into records of ours, bound to a kernel as it is now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels.compiler.chips import resolve
from tpu_kernels.errors import ArgumentError, KernelError
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning import lookup
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.foreign import ForeignResult


@dataclass(frozen=True)
class Adopted:
    """What became of foreign results.

    Attributes:
        written: How many are records now.
        refused: Why each of the others is not.
    """

    written: int
    refused: tuple[str, ...]


def adopt(
    kernel: Kernel,
    results: Iterable[ForeignResult],
    target: str,
    cache: TuningCache,
    *,
    rename: Mapping[str, str] | None = None,
    origin: str = "",
) -> Adopted:
    """Store foreign results as records of a kernel.

    Args:
        kernel: Ours.
        results: Theirs.
        target: The chip that they were measured on.
        cache: Where to keep the records.
        rename: Our name by theirs, for arguments and config parameters that are called otherwise.
        origin: Where the results come from, kept in the records.

    Returns:
        How many records were written, and why the others were not.
    """
    names = dict(rename or {})
    refused, written = [], 0
    for result in results:
        try:
            store_config(
                kernel,
                _call(kernel, result, names),
                {names.get(k, k): v for k, v in result.config.items() if v is not None},
                target,
                cache,
                time_us=result.time_us,
                origin=origin,
            )
        except KernelError as error:
            refused.append(str(error).splitlines()[0])
        else:
            written += 1
    return Adopted(written, tuple(refused))


def store_config(
    kernel: Kernel,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    config: Mapping[str, Any],
    target: str,
    cache: TuningCache,
    *,
    time_us: float | None = None,
    origin: str = "",
) -> None:
    """Store a config found elsewhere for one call of a kernel.

    Args:
        kernel: The kernel.
        call: Positional and keyword arguments; tensors may be on the meta device.
        config: Values by parameter name.
        target: The chip that it is for.
        cache: Where to keep it.
        time_us: Its time in µs, if known.
        origin: Where it comes from.

    Raises:
        KernelError: The arguments or the config do not fit the kernel.
    """
    args, kwargs = call
    bound = kernel.bind(*args, config=config, **kwargs)
    chosen = {name: bound.static[name] for name in config}
    request = kernel.bind(*args, **kwargs).request(resolve(target).chip.name)
    lookup.store(request, cache, chosen, time_us, objective="imported", origin=origin)


def _call(
    kernel: Kernel, result: ForeignResult, names: Mapping[str, str]
) -> tuple[list[Any], dict[str, Any]]:
    """Their arguments as ours: by name where a name fits, tensors else in their order."""
    ours = {p.name: p for p in kernel.spec.op_parameters}
    tensors = {names.get(n, n): _tensor(*found) for n, found in result.arrays.items()}
    tunables = kernel.spec.tunables
    values = {
        name: value
        for theirs, value in result.values.items()
        if (name := names.get(theirs, theirs)) in ours and name not in tunables
    }
    if all(name in ours for name in tensors):
        return [], {**tensors, **values}
    return list(tensors.values()), values


def _tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ArgumentError(f"{dtype!r} is no dtype of torch")
    return torch.empty(shape, dtype=kind, device="meta")
