"""What the Pallas calls of a traced program read and write at each grid point.

Grid, block shapes and index maps are data in the jaxpr; this module reads them and evaluates the
index maps over the grid, without running a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_kernels import _compat_jax
from tpu_kernels.compiler.chips import Target

MOST_POINTS = 1 << 16


@dataclass(frozen=True)
class Block:
    """One operand or result of a `pallas_call` with its block.

    Attributes:
        role: ``"input"`` or ``"output"``.
        position: Its number among the inputs or outputs.
        argument: Number of the program's argument that it is or is made of, None if unclear.
        array: Shape of the whole array.
        block: Block shape, 1 for a squeezed dimension.
        windowed: Whether the pipeline copies it block by block.
        tiled: For each dimension whether the index map counts in blocks.
        index_map: Jaxpr of the index map.
        reads_scalars: Whether the index map reads prefetched scalars.
        where: ``file:line`` of the index map, empty if unknown.
    """

    role: str
    position: int
    argument: int | None
    array: tuple[int, ...]
    block: tuple[int, ...]
    windowed: bool
    tiled: tuple[bool, ...]
    index_map: Any
    reads_scalars: bool
    where: str = ""

    @property
    def leftovers(self) -> dict[int, int]:
        """Elements of the array in the last, partly filled block, by dimension."""
        found = {}
        for axis, (size, block) in enumerate(zip(self.array, self.block, strict=True)):
            if self.windowed and self.tiled[axis] and block and size % block:
                found[axis] = size % block
        return found


@dataclass(frozen=True)
class GridCall:
    """One `pallas_call` of a traced program.

    Attributes:
        name: The kernel's name.
        where: The author's line that calls it, ``file:line``, empty if unknown.
        grid: Grid sizes, None for a dynamic bound.
        semantics: What the author declared for each axis, ``"arbitrary"`` by default.
        blocks: Inputs, then outputs.
        prefetched: Number of scalar operands before the inputs; Pallas's ``args[...]`` counts them.
    """

    name: str
    where: str
    grid: tuple[int | None, ...]
    semantics: tuple[str, ...]
    blocks: tuple[Block, ...]
    prefetched: int = 0

    @property
    def inputs(self) -> tuple[Block, ...]:
        """The blocks that are read."""
        return tuple(block for block in self.blocks if block.role == "input")

    @property
    def outputs(self) -> tuple[Block, ...]:
        """The blocks that are written."""
        return tuple(block for block in self.blocks if block.role == "output")

    def sample(self) -> tuple[int, ...]:
        """Return the grid, its largest axes cut so that at most `MOST_POINTS` points remain."""
        sizes = [1 if size is None else size for size in self.grid]
        while math.prod(sizes) > MOST_POINTS:
            axis = sizes.index(max(sizes))
            sizes[axis] = max(2, sizes[axis] // 2)
        return tuple(sizes)


def trace(fn: Callable[..., Any], avals: Sequence[Any], target: Target) -> Any:
    """Trace a JAX function as a target sees it.

    Args:
        fn: Function of flat JAX arrays.
        avals: Shape and dtype of each array.
        target: The TPU that `pltpu.get_tpu_info` shall report.

    Returns:
        The closed jaxpr.

    Raises:
        Exception: Whatever tracing raises, unchanged.
    """
    import jax

    chip = target.chip
    device = jax.sharding.AbstractDevice(
        device_kind=chip.device_kind, num_cores=chip.cores_per_device, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.default_device(_compat_jax.cpu_device()), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(fn).trace(*avals).jaxpr


def grid_calls(jaxpr: Any) -> list[GridCall]:
    """Read the Pallas calls of a traced program.

    Args:
        jaxpr: A closed jaxpr, as `trace` returns.

    Returns:
        The calls in order of appearance, those in nested functions and loops included.

    Example:
        >>> import jax
        >>> from jax.experimental import pallas as pl
        >>> def f(x):
        ...     def double(x_ref, o_ref):
        ...         o_ref[...] = 2 * x_ref[...]
        ...     spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        ...     return pl.pallas_call(double, x, grid=(4,), in_specs=[spec], out_specs=spec)(x)
        >>> (call,) = grid_calls(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((30, 128), "float32")))
        >>> call.grid, call.inputs[0].argument, call.inputs[0].leftovers
        ((4,), 0, {0: 6})
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return list(_walk(inner, {var: number for number, var in enumerate(inner.invars)}))


def copy_starts(jaxpr: Any) -> list[str | None]:
    """Where the kernels of a traced program start copies of their own, as ``file:line``."""
    found: list[str | None] = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "dma_start":
            found.append(_compat_jax.equation_place(eqn))
        for inner in _compat_jax.inner_jaxprs(eqn):
            found.extend(copy_starts(inner))
    return found


def _walk(jaxpr: Any, known: dict[Any, int]) -> Iterator[GridCall]:
    """Calls of a jaxpr; `known` says which variables stem from which argument alone."""
    for eqn in jaxpr.eqns:
        origins = [None if hasattr(v, "val") else known.get(v) for v in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            yield _call(eqn, origins)
            continue
        if eqn.primitive.name == "mpmd_map":  # `pl.kernel`: its pipelines are in its body
            place = _compat_jax.equation_place(eqn)
            yield GridCall(str(eqn.params.get("name") or "kernel"), place, (), (), ())
            continue
        for inner in _compat_jax.inner_jaxprs(eqn):
            body = getattr(inner, "jaxpr", inner)
            same = len(body.invars) == len(eqn.invars)
            pairs = zip(body.invars, origins, strict=True) if same else ()
            yield from _walk(body, {v: origin for v, origin in pairs if origin is not None})
        arrays = {o for v, o in zip(eqn.invars, origins, strict=True) if not hasattr(v, "val")}
        if len(arrays) == 1 and None not in arrays:
            (origin,) = arrays
            known.update({v: origin for v in eqn.outvars if origin is not None})


def _call(eqn: Any, origins: Sequence[int | None]) -> GridCall:
    mapping, params = eqn.params["grid_mapping"], eqn.params
    grid = tuple(size if isinstance(size, int) else None for size in mapping.grid)
    skipped = mapping.num_dynamic_grid_bounds + mapping.num_index_operands
    blocks = []
    for number, block in enumerate(mapping.block_mappings):
        written = number >= mapping.num_inputs
        position = number - mapping.num_inputs if written else number
        argument = None if written else origins[skipped + number]
        blocks.append(_block(block, "output" if written else "input", position, argument, grid))
    debug = getattr(params["jaxpr"].debug_info, "func_name", "")
    return GridCall(
        name=str(params.get("name") or debug or "kernel"),
        where=_compat_jax.equation_place(eqn),
        grid=grid,
        semantics=_semantics(params.get("compiler_params"), len(grid)),
        blocks=tuple(blocks),
        prefetched=mapping.num_index_operands,
    )


def _semantics(params: Any, axes: int) -> tuple[str, ...]:
    declared = getattr(params, "dimension_semantics", None) or ()
    names = [str(getattr(each, "value", each)).lower() for each in declared]
    return (*names, *["arbitrary"] * (axes - len(names)))


def _block(block: Any, role: str, position: int, argument: int | None, grid: Any) -> Block:
    sizes = [getattr(size, "block_size", size) for size in block.block_shape]
    kinds = [type(size).__name__ for size in block.block_shape]
    index_map = block.index_map_jaxpr
    body = index_map.jaxpr
    scalars = set(body.invars[len(grid) :])
    used = {v for eqn in body.eqns for v in eqn.invars if not hasattr(v, "val")}
    return Block(
        role=role,
        position=position,
        argument=argument,
        array=tuple(int(size) for size in block.array_aval.shape),
        block=tuple(size if isinstance(size, int) else 1 for size in sizes),
        windowed=str(block.block_aval.memory_space) in ("None", "default", "vmem", "smem"),
        tiled=tuple(kind not in ("Element", "BoundedSlice") for kind in kinds),
        index_map=index_map,
        reads_scalars=bool(scalars & used),
        where=_place(body),
    )


def _place(jaxpr: Any) -> str:
    """``file:line`` of the function that a jaxpr was traced from."""
    info = getattr(jaxpr, "debug_info", None)
    file, line = getattr(info, "func_filename", None), getattr(info, "func_lineno", None)
    return f"{file}:{line}" if file and line else ""


def block_indices(block: Block, grid: tuple[int, ...]) -> np.ndarray:
    """Evaluate an index map at every grid point.

    Args:
        block: A block whose index map reads no prefetched scalars.
        grid: Grid sizes.

    Returns:
        Block indices in row-major order of the grid, int64 [points, dimensions].
    """
    import jax
    import jax.numpy as jnp

    if not grid:
        return np.zeros((1, len(block.block)), np.int64)
    points = np.stack(np.meshgrid(*[np.arange(n) for n in grid], indexing="ij"), -1)
    points = points.reshape(-1, len(grid)).astype(np.int32)
    closed = block.index_map
    unused = [np.int32(0)] * (len(closed.jaxpr.invars) - len(grid))

    def at(point: Any) -> Any:
        index = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *point, *unused)
        return jnp.stack([jnp.asarray(i, jnp.int32) for i in index]) if index else jnp.zeros(0)

    with jax.default_device(_compat_jax.cpu_device()):
        found = jax.jit(jax.vmap(at))(points)
    return np.asarray(found).astype(np.int64).reshape(len(points), -1)


def argument_of(calls: Sequence[GridCall], position: int) -> int | None:
    """The program's argument behind an input of the only Pallas call, None if there is doubt.

    Args:
        calls: The program's calls.
        position: Number of the input, prefetched scalars included.
    """
    if len(calls) != 1:
        return None
    inputs, number = calls[0].inputs, position - calls[0].prefetched
    return inputs[number].argument if 0 <= number < len(inputs) else None


def point_name(point: Sequence[int] | np.ndarray) -> str:
    """Write a grid point or block index as Python writes a tuple.

    Example:
        >>> point_name([1, 0]), point_name(np.array([3]))
        ('(1, 0)', '(3,)')
    """
    return str(tuple(int(i) for i in point))


Names = Mapping[int, str]
"""The author's name of each flat array argument."""


def block_name(block: Block, names: Names) -> str:
    """Name a block in the author's terms.

    Args:
        block: The block.
        names: Names of the program's arguments.

    Returns:
        Such as ``"argument 'x'"``, or ``"input 1 of pallas_call"`` where it is computed.
    """
    if block.argument is not None and block.argument in names:
        return f"argument {names[block.argument]!r}"
    return f"{block.role} {block.position} of pallas_call"
