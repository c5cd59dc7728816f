"""What XLA makes of a kernel's reference: the figure that a kernel has to beat.

The reference is traced to ATen operators, lowered to JAX by the same rules as
``torch.compile(backend="tpu")``, without any override, and compiled for the chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.compile import compile_function
from tpu_kernels.errors import KernelError
from tpu_kernels.registry import reference as references
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning.candidates import named_arguments, one_line
from tpu_kernels.tuning.report import TuneRow

CONFIG = {"implementation": "xla"}
"""The config of the row that stands for no kernel at all."""


def try_reference(
    kernel: Kernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    timeout_s: float,
) -> TuneRow:
    """Compile a kernel's reference for a chip.

    Args:
        kernel: A kernel with a reference.
        args: Positional arguments; of tensors only the type counts.
        kwargs: Arguments by name.
        target: The chip.
        timeout_s: Seconds for the compiler.

    Returns:
        A row with the estimated time in µs, or the reason why there is none.
    """
    if kernel.spec.reference is None:
        return TuneRow(CONFIG, "unsupported", "the kernel has no reference")
    spec = kernel.spec
    values = named_arguments(kernel, args, kwargs)

    def reference(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return references.call(spec, {name: _filled(v, given) for name, v in values.items()})

    try:
        function, structs = _as_jax(reference, _tensors(values), target)
    except (KernelError, NotImplementedError) as error:
        return TuneRow(CONFIG, "unsupported", one_line(str(error)))
    report = compile_function(
        function, structs, target, name=f"{kernel.name} by XLA", timeout_s=timeout_s
    )
    if not report.ok:
        return TuneRow(CONFIG, report.status, one_line(report.error or report.status))
    us = report.estimate.us if report.estimate is not None else None
    if us is None:
        return TuneRow(CONFIG, "unsupported", "the cost model has no estimate of XLA's program")
    return TuneRow(CONFIG, "ok", cost=us, cost_unit="µs (estimated)", seconds=report.seconds)


def _as_jax(function: Any, tensors: Sequence[torch.Tensor], target: Target) -> tuple[Any, Any]:
    import jax

    from tpu_kernels.lowering.capture import capture
    from tpu_kernels.lowering.lowered import Unplannable, lower

    captured = capture(function, tensors)
    engine = Engine(interpret=False, target=target.chip.name)
    try:
        with jax.enable_x64(True):
            lowered = lower(captured.graph, captured.inputs, engine, host_random=False, split=False)
    except Unplannable as error:
        raise NotImplementedError(str(error)) from error
    if lowered.unlowered:
        name, why = next(iter(lowered.unlowered.items()))
        raise NotImplementedError(f"no lowering of {name.target}: {why}")
    (program,) = lowered.programs

    def flat(*arrays: Any) -> Any:
        with jax.enable_x64(True):
            return program.function(*arrays)

    return flat, program.structs


def _tensors(values: Mapping[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in values.values():
        items = value if isinstance(value, list | tuple) else [value]
        found += [item for item in items if isinstance(item, torch.Tensor)]
    return found


def _filled(value: Any, given: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return next(given)
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, given) for item in value)
    return value
