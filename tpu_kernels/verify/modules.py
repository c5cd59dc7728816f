"""Torch modules and functions in the form that the TPU compiler takes: one program for all of it.

Kernels in them are Mosaic calls, parameters are inputs of the program, and every operation knows
the submodule that it came from.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tpu_kernels.backends import device as simulated
from tpu_kernels.compiler import CompileReport, Target
from tpu_kernels.compiler.report import mib
from tpu_kernels.dsl import source
from tpu_kernels.lowering.capture import Captured, capture
from tpu_kernels.lowering.plan import calls
from tpu_kernels.lowering.whole import WholeGraph
from tpu_kernels.registry.engine import Engine

_LISTED = 8  # values that the text names


@dataclasses.dataclass(frozen=True)
class ModelReport(CompileReport):
    """The outcome of compiling a torch module or function for one target.

    Attributes:
        hbm_limit_bytes: High-bandwidth memory of the device.
        parameter_bytes: Parameters and buffers of the module.
        nodes: Operators in its graph.
        inlined: The kernels of `tpu_kernel` in the program.
        unlowered: For each operator without a lowering, why. The program has zeros in place of its
            results, so its figures are only a part of the whole.
    """

    hbm_limit_bytes: int = 0
    parameter_bytes: int = 0
    nodes: int = 0
    inlined: list[str] = dataclasses.field(default_factory=list)
    unlowered: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def hbm_bytes(self) -> int | None:
        """What the program occupies of HBM: arguments, outputs, temporaries and code."""
        parts = (
            self.hbm_argument_bytes,
            self.hbm_output_bytes,
            self.hbm_temp_bytes,
            self.code_bytes,
        )
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    @property
    def fits(self) -> bool | None:
        """Whether the program fits into the device's HBM; None if that is not known."""
        if self.hbm_bytes is None:
            return False if "HBM" in (self.error or "") else None
        return self.hbm_bytes <= self.hbm_limit_bytes

    @property
    def text(self) -> str:
        """The report for people."""
        lines = _shortened(super().text.splitlines())
        if self.hbm_bytes is not None:
            free = self.hbm_limit_bytes - self.hbm_bytes
            verdict = f"fits, {mib(free)} to spare" if free >= 0 else f"{mib(-free)} too much"
            lines.append(f"  HBM of the device: {mib(self.hbm_limit_bytes)}; {verdict}")
        lines.append(f"  {self.nodes} operators, parameters {mib(self.parameter_bytes)}")
        if self.inlined:
            lines.append(f"  kernels in it: {', '.join(self.inlined)}")
        for op, why in self.unlowered.items():
            lines.append(f"  not in the program: {op}: {why}")
        if self.buffers:
            lines.append("  largest values in HBM:")
        for buffer in self.buffers[:_LISTED]:
            where = buffer["where"] or buffer["opcode"]
            lines.append(f"    {mib(buffer['bytes']):>10}  {buffer['what']}  {where}")
        return "\n".join(lines)


def _shortened(lines: list[str]) -> list[str]:
    """A model has hundreds of fusions; the text tells of the dearest."""
    parts = [line for line in lines if line.startswith("    ")]
    left_out = frozenset(parts[_LISTED:])
    kept = [line for line in lines if line not in left_out]
    if left_out:
        place = kept.index(parts[_LISTED - 1]) + 1
        kept.insert(place, f"    and {len(parts) - _LISTED} more")
    return kept


@dataclasses.dataclass(frozen=True)
class TorchProgram:
    """A torch module or function, traced and ready to be lowered.

    Attributes:
        name: Name for reports.
        where: ``file:line`` of its definition.
        captured: Its graph.
        whole: The graph as a function of arrays.
    """

    name: str
    where: str | None
    captured: Captured
    whole: WholeGraph

    def function_for(self, target: Target) -> Callable[..., Any]:
        """The program as a target sees it."""
        engine = Engine(interpret=False, target=target.chip.name)

        def program(*arrays: Any) -> Any:
            return self.whole.trace(engine, *arrays)

        program.__name__ = program.__qualname__ = self.name
        return program

    def finished(self, report: CompileReport, target: Target) -> ModelReport:
        """The report, with what only the graph knows."""
        known = {f.name: getattr(report, f.name) for f in dataclasses.fields(CompileReport)}
        state = [
            tensor
            for name, tensor in zip(self.captured.names, self.captured.inputs, strict=True)
            if name in self.captured.state
        ]
        return ModelReport(
            **known,
            hbm_limit_bytes=target.chip.hbm_bytes * target.chip.cores_per_device,
            parameter_bytes=sum(t.numel() * t.element_size() for t in state),
            nodes=len(calls(self.captured.graph)),
            inlined=list(self.whole.inlined),
            unlowered=dict(self.whole.unlowered),
        )


def torch_program(
    function: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    backward: bool = False,
) -> TorchProgram:
    """Trace a module or function of torch tensors; nothing is computed, and no weight is read.

    Args:
        function: The module or function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        backward: Whether to trace the gradients of its parameters too.

    Returns:
        The program.

    Raises:
        TraceError: torch cannot trace it.
    """
    device = "tpu" if simulated.is_installed() else "cpu"
    captured = capture(function, args, kwargs, backward=backward, device=device)
    whole = WholeGraph(captured.graph, captured.inputs)
    subject = type(function) if isinstance(function, nn.Module) else function
    name = getattr(subject, "__name__", type(subject).__name__)
    return TorchProgram(name, _place(subject), captured, whole)


def _place(subject: Any) -> str | None:
    if inspect.isclass(subject):
        try:
            file, (_, line) = inspect.getsourcefile(subject), inspect.getsourcelines(subject)
        except (OSError, TypeError):
            return None
        return f"{file}:{line}"
    place = source.locate(subject)
    return f"{place.file}:{place.line}" if place.line else None


def is_module(function: Any) -> bool:
    """Whether something is certainly torch code: a module, or a method of one."""
    return isinstance(function, nn.Module) or isinstance(
        getattr(function, "__self__", None), nn.Module
    )


def has_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there are torch tensors among arguments."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)
