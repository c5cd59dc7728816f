"""Runs the captured call of a Helion kernel on JAX values: its host code and its launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kernels import _compat_helion, _compat_jax
from tpu_kernels.dsl import dtypes
from tpu_kernels.dsl.helion_capture import Launch, launch_of, launch_operator
from tpu_kernels.errors import TraceError
from tpu_kernels.lowering.evaluate import Evaluator, constant
from tpu_kernels.lowering.fakes import Sizes, placeholders
from tpu_kernels.lowering.overriding import Overrides
from tpu_kernels.registry.engine import Engine

_INTERPRETED_AS = "TPU v6 lite"


class _NoOverrides(Overrides):
    """A kernel's host code computes what its author wrote."""

    def concern(self, op: Any) -> bool:
        """Never."""
        return False


def vmem_of_target() -> int | None:
    """The VMEM of the chip that is traced for in bytes, None where there is none."""
    from jax.experimental.pallas import tpu as pltpu

    mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "abstract_device", None) is None:
        return None
    return int(pltpu.get_tpu_info().vmem_capacity_bytes)


def evaluate(graph: torch.fx.GraphModule, arrays: Sequence[Any], interpret: Any, where: str) -> Any:
    """Run a captured call while JAX traces.

    Args:
        graph: Its graph.
        arrays: A value for each placeholder.
        interpret: False, True or `pltpu.InterpretParams`.
        where: ``file:line`` of the kernel.

    Returns:
        What the graph returns.

    Raises:
        TraceError: The host code does what no program can, such as reading a value.
    """
    evaluator = Evaluator(Engine(interpret=interpret), Sizes(), _NoOverrides(), named=False)
    values: dict[Node, Any] = dict(zip(placeholders(graph), arrays, strict=True))
    result: Any = None
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            values[node] = constant(getattr(graph, node.target))
        elif node.op == "output":
            result = map_arg(node.args[0], values.__getitem__)
        elif node.target is launch_operator():
            inputs, index = map_arg(node.args, values.__getitem__)
            values[node] = launch(launch_of(index), inputs, interpret)
        elif node.op == "call_function":
            evaluator.run([node], values)
            if node in evaluator.unlowered:
                raise TraceError(
                    f"the kernel's host code calls {node.target}, which has no place in a program: "
                    f"{evaluator.unlowered[node]}",
                    where=where,
                    hint="compute it outside of the kernel and pass it as an argument",
                )
    return result


def plainly(graph: torch.fx.GraphModule, arrays: Sequence[Any], where: str) -> Any:
    """Run a captured call in Pallas's plain interpreter while JAX traces, if that takes it.

    Args:
        graph: Its graph.
        arrays: A value for each placeholder.
        where: ``file:line`` of the kernel.

    Returns:
        What the graph returns.

    Raises:
        Exception: The interpreter lacks something that the kernel needs. Some of that shows up as
            late as in lowering, so the call is lowered here, alone, to find out.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    structure = []

    def run(*values: Any) -> Any:
        flat, spec = tree_flatten(evaluate(graph, values, True, where))
        structure.append(spec)
        return flat

    with jax.default_device(_compat_jax.cpu_device()):
        traced = jax.jit(run).trace(*avals)
        traced.lower(lowering_platforms=("cpu",))
    flat = jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*arrays)
    return tree_unflatten(flat, structure[0])


@contextlib.contextmanager
def tpu_interpreter() -> Iterator[Any]:
    """Let Pallas calls that are traced in this scope be run by JAX's TPU interpreter.

    Yields:
        Its parameters. Helion's pipelines copy whole tiles, and on a TPU arrays in HBM are padded
        to tiles.
    """
    from jax.experimental.pallas import tpu as pltpu

    parameters = pltpu.InterpretParams(buffer_bounds="padded", out_of_bounds_reads="uninitialized")
    _compat_jax.keep_callbacks_from_starting_backends()
    with _compat_jax.pallas_interpret(parameters):
        yield parameters


def launch(call: Launch, inputs: Sequence[Any], interpret: Any) -> list[Any]:
    """One Pallas call.

    Args:
        call: The launch.
        inputs: A value for each tensor that it reads.
        interpret: False, True or `pltpu.InterpretParams`.

    Returns:
        A value for each tensor that it writes.
    """
    args: list[Any] = [
        jax.ShapeDtypeStruct(tuple(a.shape), dtypes.to_jax(a.dtype))
        if isinstance(a, torch.Tensor)
        else a
        for a in call.args
    ]
    for place, value in zip(call.inputs, inputs, strict=True):
        args[place] = value
    plain = interpret is True
    if not plain and interpret:
        _compat_helion.describe_cpu_as(_INTERPRETED_AS)
    pads = list(call.options.get("_ds_pad_dims") or [])
    if plain:
        pads += _ragged(call, args, {(place, dim) for place, dim, _, _ in pads})
    shapes: dict[int, tuple[int, ...]] = {}
    for place, dim, block, extra in pads:
        shape = tuple(args[place].shape)
        amount = (-shape[dim]) % block + extra
        shapes.setdefault(place, shape)
        if amount:
            args[place] = _padded(args[place], dim, amount)
    with _some_chip():
        return _compat_helion.pallas_call(
            call.kernel, call.grid, args, call.options, pads=pads, shapes=shapes, interpret=plain
        )


@contextlib.contextmanager
def _some_chip() -> Iterator[None]:
    """Tell a trace that is for no chip of one: the question would start every backend of JAX."""
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        yield
        return
    device = jax.sharding.AbstractDevice(device_kind=_INTERPRETED_AS, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _ragged(call: Launch, args: Sequence[Any], done: set[tuple[int, int]]) -> list[Any]:
    """Dimensions that blocks do not divide: the plain interpreter has no partial blocks.

    The generated code masks what lies beyond a tensor's end, so that padding is not seen.
    """
    info = call.options.get("_block_spec_info") or []
    tensors = [i for i, a in enumerate(call.args) if isinstance(a, torch.Tensor)]
    pads = []
    for place, entry in zip(tensors, info, strict=False):
        if entry is None:
            continue
        for dim, block in enumerate(entry[0]):
            size = args[place].shape[dim]
            if block is not None and block < size and size % block and (place, dim) not in done:
                pads.append((place, dim, block, 0))
    return pads


def _padded(value: Any, dim: int, amount: int) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        shape = list(value.shape)
        shape[dim] += amount
        return jax.ShapeDtypeStruct(tuple(shape), value.dtype)
    widths = [(0, 0)] * value.ndim
    widths[dim] = (0, amount)
    return jnp.pad(value, widths)
