"""``torch.compile(..., backend="tpu")`` on the simulated device.

AOTAutograd turns the captured function into graphs of ATen operators (forward, backward, or
inference). Each graph goes through `graph_passes` and then to `lower_graph`, which is the one place
that decides how a graph is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from tpu_kernels._compat_torch import aot_backend, register_dynamo_backend
from tpu_kernels.backends.device import auto_install, when_installed, why_not
from tpu_kernels.backends.graphs import CompiledGraph, GraphOptions
from tpu_kernels.compiler.chips import resolve
from tpu_kernels.errors import ArgumentError, DeviceError

NAME = "tpu"
_ENTRY_POINTS = "torch_dynamo_backends"

# Called as `graph_pass(gm, example_inputs)` for every graph of ATen operators before it is lowered,
# in order; a pass edits the graph in place. An override that rewrites graphs adds itself here.
graph_passes: list[Callable[[GraphModule, Sequence[Any]], None]] = []

# Given to AOTAutograd: how an operator is expressed in others before the graphs are made. Empty, so
# that an overridden operator is still one node when `lower_graph` sees it.
decompositions: dict[OpOverload, Callable[..., Any]] = {}

OPTIONS = frozenset({"dump", "target"})

# Options of TorchTPU's backend that change how it compiles, not what is computed; accepted,
# so that a program needs no branch, and change nothing here.
IGNORED_OPTIONS = frozenset(
    {"serializable", "debug_callback", "num_dynamic_buckets", "bucket_size"}
)
_OPTIONS = "tpu_kernels_options"  # key of `GraphModule.meta`


def lower_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Turn one graph of ATen operators into a function of its inputs.

    Args:
        gm: Graph of ATen operators, functional except for copies into mutated inputs.
        example_inputs: Fake tensors and symbolic integers, one for each placeholder.

    Returns:
        A function that takes the graph's inputs and returns its outputs as a list or tuple: JAX
        programs, lowered and compiled at the first call.
    """
    return CompiledGraph(gm, gm.meta.get(_OPTIONS, GraphOptions()))


def tpu(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a captured function for the simulated device: the Dynamo backend ``"tpu"``.

    Args:
        gm: The function that Dynamo captured.
        example_inputs: Its inputs, as fake tensors and symbolic integers.
        options: Options of ``torch.compile``: ``"dump"``, a folder for each program's StableHLO;
            ``"target"``, the chip whose configurations kernels use. Those of TorchTPU's backend
            are accepted.
        mode: Mode of ``torch.compile``; accepted and without effect.

    Returns:
        The compiled function.

    Raises:
        ArgumentError: If an option is not known.
        DeviceError: If neither the simulated nor the real device can be used.

    Example:
        >>> import torch, tpu_kernels.device
        >>> double = torch.compile(lambda x: x * 2, backend="tpu")
        >>> double(torch.ones(2, device="tpu")).tolist()
        [2.0, 2.0]
    """
    if not auto_install():
        return _real_backend()(gm, example_inputs, options=options, mode=mode)  # type: ignore[no-any-return]
    chosen = _read(options or {})

    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for graph_pass in list(graph_passes):
            graph_pass(graph, inputs)
        graph.graph.lint()
        graph.recompile()
        graph.meta[_OPTIONS] = chosen
        with torch.no_grad():
            return lower_graph(graph, inputs)

    return aot_backend(compile_graph, decompositions)(gm, example_inputs)  # type: ignore[no-any-return]


def _read(options: Mapping[str, Any]) -> GraphOptions:
    unknown = sorted(set(options) - IGNORED_OPTIONS - OPTIONS)
    if unknown:
        raise ArgumentError(
            f"torch.compile(backend='tpu') got unknown options {unknown}",
            hint=f"known options: {', '.join(sorted(IGNORED_OPTIONS | OPTIONS))}",
        )
    dump, target = options.get("dump"), options.get("target")
    chip = None if target is None else resolve(target).chip.name
    return GraphOptions(None if dump is None else Path(dump), chip)


def _real_backend() -> Callable[..., Any]:
    """Return TorchTPU's own backend, whose name ours must not hide where the real device is."""
    package = __name__.partition(".")[0]
    for entry in entry_points(group=_ENTRY_POINTS, name=NAME):
        if entry.module.partition(".")[0] != package:
            return entry.load()  # type: ignore[no-any-return]
    raise DeviceError(
        f"torch.compile(backend='tpu') has no device to compile for: {why_not()}",
        hint="call tpu_kernels.device.install() first, to see what is in the way",
    )


def _register_without_entry_point() -> None:
    if not any(entry.name == NAME for entry in entry_points(group=_ENTRY_POINTS)):
        register_dynamo_backend(NAME, tpu)


when_installed(_register_without_entry_point)
