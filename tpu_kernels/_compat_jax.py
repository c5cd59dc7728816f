"""Every use of a private part of JAX, one small function each, with the reason.

A new JAX release can break only what stands here; the import of JAX itself is the caller's cost, so
nothing in the package imports this module before a kernel is traced or compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

# --- Devices
# -------------------------------------------------------------------------------------------------


@functools.cache
def cpu_device() -> Any:
    """A CPU device of our own client, apart from the process's JAX backends.

    `jax.devices("cpu")` would initialise every backend that JAX can find (a TPU runtime included)
    and freeze the user's platform choice; a client that we make ourselves touches neither.
    """
    from jax._src.lib import xla_client

    client: Any = xla_client.make_cpu_client(asynchronous=False)
    _client_process.append(os.getpid())
    return client.local_devices()[0]


_client_process: list[int] = []


def client_is_inherited() -> bool:
    """Whether this process was forked from one that has the client.

    Its threads do not live here: programs that are there run, but the compiler would wait for
    them forever.
    """
    return bool(_client_process) and _client_process[0] != os.getpid()


# --- Compiler
# --------------------------------------------------------------------------------------------------


def mosaic_text(body: bytes, *, locations: bool) -> str:
    """Mosaic MLIR text of a serialized Pallas TPU kernel body.

    The dialect and the pass that undoes its versioned serialization have no public door.
    """
    from jax._src.lib import tpu
    from jax.extend.mlir import ir, passmanager

    with ir.Context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(body)
        undo = passmanager.PassManager.parse("builtin.module(mosaic-serde{serialize=false})")
        undo.run(module.operation)
        return str(module.operation.get_asm(enable_debug_info=locations))


def compile_for_topology(text: str, topology: str, options: Mapping[str, str]) -> Any:
    """Compile a StableHLO module with libtpu for one device of a topology; needs no TPU.

    `jax.jit(...).lower(...).compile()` would need the Python function again, and its error handler
    cuts the source locations out of Mosaic's messages; the compile-only client below it takes a
    module and reports in full.

    Args:
        text: StableHLO with source locations.
        topology: Name such as ``"v6e:2x2"``.
        options: XLA compiler options by name.

    Returns:
        The compile-only executable: it has `get_compiled_memory_stats` and `hlo_modules`, and
        cannot run.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax.experimental import topologies
    from jax.extend.mlir import ir

    device: Any = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        backend=device.client,
        env_options_overrides=dict(options),
    )
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        return device.client.compile(
            module,
            executable_devices=_jax.DeviceList((device,)),
            compile_options=compile_options,
        )


def traced_frames(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    """Files and lines at which the operations on a lowering's stack were traced, innermost first.

    Inside an inner `jit` (most of `jax.numpy`) JAX's own chained traceback ends at the library
    function; the equations that the lowering is working on, one for each level, still know the call
    in the author's file.
    """
    levels = []
    while traceback is not None:
        source_info = getattr(traceback.tb_frame.f_locals.get("eqn"), "source_info", None)
        if source_info is not None and getattr(source_info, "traceback", None) is not None:
            levels.append(source_info.traceback)
        traceback = traceback.tb_next
    for level in reversed(levels):
        for frame in level.frames:
            yield frame.file_name, frame.line_num


def called_jaxpr(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """Jaxpr and constants of an equation that only calls it (`jit`, `checkpoint`, custom rules).

    The parameter that holds it is named differently by each primitive. Control flow is not a call.
    """
    if equation.primitive.name in ("cond", "pallas_call", "run_scoped", "scan", "while"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        inner = equation.params.get(name)
        if hasattr(inner, "jaxpr"):
            return inner.jaxpr, inner.consts
        if hasattr(inner, "eqns"):
            return inner, ()
    return None


def evaluate_equation(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Compute one equation of a jaxpr, as `jax.core.eval_jaxpr` does for all of them."""
    primitive = equation.primitive
    bound = primitive.get_bind_params(equation.params)
    functions, parameters = bound if isinstance(bound, tuple) else ((), bound)
    result = primitive.bind(*functions, *values, **parameters)
    return result if primitive.multiple_results else [result]


# --- TorchTPU (backends/torch_tpu)
# --------------------------------------------------------------------------------------------------


def export_for_tpu(function: Any, avals: Sequence[Any], *, x64: bool) -> Any:
    """A `jax.export.Exported` of a function for TPUs, for a consumer of the same version.

    By default an export keeps to what older consumers read, which leaves out the latest
    optimisations of Mosaic; the switch has no public context manager. Unused arguments stay.
    """
    import jax
    from jax import export
    from jax._src import config

    allowed = [export.DisabledSafetyCheck.custom_call("ALL")]
    jitted = jax.jit(function, keep_unused=True)
    with config.export_ignore_forward_compatibility(True), jax.enable_x64(x64):
        return export.export(jitted, platforms=["tpu"], disabled_checks=allowed)(*avals)


def parse_module(text: str) -> Any:
    """An MLIR module from StableHLO text, in a context that knows JAX's dialects."""
    from jax._src.interpreters import mlir
    from jax.extend.mlir import ir

    with mlir.make_ir_context():
        return ir.Module.parse(text)


# --- Call path
# -------------------------------------------------------------------------------------------------


def import_capsule(capsule: Any, device: Any) -> Any:
    """A `jax.Array` on the memory of a DLPack capsule, without a copy where alignment allows.

    `jax.dlpack.from_dlpack` costs ten times as much (it queries devices and copies for a consumer
    that we are not), and refuses tensors of the simulated device.
    """
    from jax._src.lib import _jax

    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None, None, 1)


def export_capsule(array: Any) -> Any:
    """A DLPack capsule on the memory of a `jax.Array`; blocks until the value is there.

    `jax.Array.__dlpack__` costs four times as much for the same result.
    """
    from jax._src.lib import _jax

    return _jax.buffer_to_dlpack_managed_tensor(array)


def capsule_functions() -> tuple[Any, Any]:
    """`import_capsule` and `export_capsule` without their Python frames, for the call path."""
    from jax._src.lib import _jax

    return _jax.dlpack_managed_tensor_to_buffer, _jax.buffer_to_dlpack_managed_tensor


class _Compiler:
    """A client whose `compile_and_load` is another function; all else is the client's own."""

    def __init__(self, client: Any, compile_and_load: Callable[..., Any]) -> None:
        self._client = client
        self.compile_and_load = functools.partial(compile_and_load, client)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def compile_with(jitted: Any, args: Sequence[Any], compile_and_load: Callable[..., Any]) -> bool:
    """Compile a `jax.jit` function for these arguments, the compiler's own part by a function of
    ours. A call with such arguments then finds the executable, on JAX's own fast call path.

    Public are an executable of its own (`lower().compile()`, which takes longer to call) and a
    cache for everything that the process compiles; both are configured for the process, which is
    the user's.

    Args:
        jitted: What `jax.jit` returned.
        args: Arguments, with arrays on the device that is compiled for.
        compile_and_load: ``(client, module, executable_devices, compile_options)`` -> executable.

    Returns:
        Whether the function was given the chance: a program that calls back into Python is tied
        to this process.
    """
    lowering = jitted.lower(*args)._lowering
    parameters = getattr(lowering, "compile_args", None)
    if not isinstance(parameters, dict) or "backend" not in parameters:
        return False
    if parameters.get("host_callbacks") or parameters.get("keepalive"):
        return False
    parameters["backend"] = _Compiler(parameters["backend"], compile_and_load)
    lowering.compile()
    return True


def program_key(client: Any, module: Any, devices: Any, options: Any) -> str:
    """Hash of all that decides the machine code of a module, as far as JAX can say: the module
    without source locations, compiler version, options and flags, the device's topology.

    JAX maintains this list for its own cache of programs, together with the compiler.
    """
    import numpy as np
    from jax._src import cache_key

    found = cache_key.get(module, np.asarray(list(devices)), options, client, "none")
    return found.rpartition("-")[2]


def save_executable(client: Any, executable: Any) -> bytes:
    """The bytes of a compiled program; `jax.experimental.serialize_executable` would pickle it."""
    return bytes(client.serialize_executable(executable))


def load_executable(client: Any, data: bytes, devices: Any, options: Any) -> Any:
    """The program of such bytes.

    Raises:
        Exception: They are not a program that this compiler made (`jax.errors.JaxRuntimeError`, or
            what the binding raises).
    """
    return client.deserialize_executable(data, executable_devices=devices, compile_options=options)


@contextlib.contextmanager
def pallas_interpret(mode: Any) -> Iterator[None]:
    """Interpret every `pallas_call` that is traced in this scope, whatever its own ``interpret``
    says.

    The public `pltpu.force_tpu_interpret_mode` takes the TPU interpreter's parameters only, not the
    plain (and some hundred times faster) interpreter that ``True`` stands for.

    Args:
        mode: True, or `pltpu.InterpretParams`.
    """
    from jax._src import config

    previous = config.pallas_tpu_interpret_mode_context_manager.swap_local(mode)
    try:
        yield
    finally:
        config.pallas_tpu_interpret_mode_context_manager.set_local(previous)


class _CallbackDevices:
    """Stands for the module that host callbacks ask for a CPU device."""

    def __init__(self, bridge: Any) -> None:
        self._bridge = bridge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bridge, name)

    def local_devices(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's devices where it has started its backends, else ours."""
        if self._bridge.backends_are_initialized():
            return self._bridge.local_devices(*args, **kwargs)
        return [cpu_device()]


def keep_callbacks_from_starting_backends() -> None:
    """Let host callbacks of programs on our own client run without JAX's backends.

    The TPU interpreter is made of host callbacks, and each asks for JAX's CPU device to run on,
    which would start every backend of the process, a TPU runtime included. Callbacks of programs
    that run on one of those backends find them started, and notice nothing.
    """
    from jax._src import callback

    module: Any = callback
    if not isinstance(module.xb, _CallbackDevices):
        module.xb = _CallbackDevices(module.xb)


# --- Symbolic shapes
# -------------------------------------------------------------------------------------------


def dimension_terms(dimension: Any) -> list[tuple[list[tuple[Any, int]], int]]:
    """A symbolic dimension as a sum of products: ``[([(factor, exponent), ...], coefficient),
    ...]``.

    A factor is a variable's name, or ``(operation, operands)``. JAX's own evaluation compares
    operands with 0 and 1, which on torch's symbolic integers would install guards and specialise
    every dimension.
    """
    terms = []
    for term, coefficient in dimension._sorted_terms:
        factors = []
        for factor, exponent in term._factors:
            leaf = (
                factor.var if factor.var is not None else (factor.operation, tuple(factor.operands))
            )
            factors.append((leaf, exponent))
        terms.append((factors, coefficient))
    return terms


# --- Pallas calls in a jaxpr
# -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PallasBlock:
    """One pipelined operand of a `pallas_call` that has a window in VMEM.

    Attributes:
        origin: The operand as Pallas names it, such as ``"args[0]"``.
        shape: Block shape without squeezed dimensions.
        dtype: Name of the dtype.
        bits: Width of the dtype.
        buffers: Number of buffers that the kernel asks for, None for the default.
        depends_on: The grid axes that its index map reads; all of them if it reads prefetched
            scalars.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: str
    bits: int
    buffers: int | None
    depends_on: frozenset[int]


@dataclasses.dataclass(frozen=True)
class PallasCall:
    """What the parameters of one `pallas_call` equation say.

    Attributes:
        name: Name of the kernel.
        where: The user's ``file:line``, empty if unknown.
        grid: Sizes; a dynamic bound is no int.
        blocks: The operands and results with a window in VMEM.
        scratch: Shape and width in bits of each VMEM scratch buffer.
        scalars: The same of what lies in SMEM: prefetched operands, blocks and scratch.
        vmem_limit: Its ``vmem_limit_bytes``, None for the default.
        flops_per_step: Operations in `dot_general` per grid step, by dtype name of the operands.
        calls: Product of the lengths of the enclosing scans.
    """

    name: str
    where: str
    grid: tuple[Any, ...]
    blocks: tuple[PallasBlock, ...]
    scratch: tuple[tuple[tuple[int, ...], int], ...]
    scalars: tuple[tuple[tuple[int, ...], int], ...]
    vmem_limit: int | None
    flops_per_step: dict[str, float]
    calls: int


def pallas_calls(jaxpr: Any, calls: int = 1) -> Iterator[PallasCall]:
    """The Pallas calls of a jaxpr, those in nested functions and loops included.

    Grid and blocks are parameters of a primitive whose layout is not part of JAX's public API.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "pallas_call":
            yield _pallas_call(eqn, calls)
            continue
        trips = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        for inner in inner_jaxprs(eqn):
            yield from pallas_calls(inner, calls * trips)


# `pallas_call`, and what `pl.kernel` (and so Helion) binds.
_PALLAS = frozenset({"pallas_call", "mpmd_map"})


def has_pallas_call(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a Pallas call, nested functions and loops included."""
    return any(
        eqn.primitive.name in _PALLAS or any(map(has_pallas_call, inner_jaxprs(eqn)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters: called functions, branches, loop bodies."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                yield item


def replace_equations(jaxpr: Any, rule: Callable[[Any], Callable[..., Any] | None]) -> Any:
    """Replace equations of a jaxpr, and of all jaxprs in it, by what functions trace to.

    JAX has no public way to transform a program inside a `pallas_call`: its body works on
    references, which no public function traces. Here only single equations on values are traced.

    Args:
        jaxpr: A jaxpr or closed jaxpr.
        rule: Given an equation, returns a function of its inputs that returns its outputs as a
            list, or None to leave the equation as it is.

    Returns:
        The new one, of the same kind.
    """
    if hasattr(jaxpr, "consts"):
        return jaxpr.replace(jaxpr=replace_equations(jaxpr.jaxpr, rule))
    equations: list[Any] = []
    for eqn in jaxpr.eqns:
        function = rule(eqn)
        if function is None:
            equations.append(_with_inner(eqn, rule))
        else:
            equations.extend(_traced_equations(eqn, function))
    return jaxpr.replace(eqns=equations)


def _with_inner(eqn: Any, rule: Callable[[Any], Any]) -> Any:
    def changed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return (
                type(value)([changed(item) for item in value])
                if type(value)
                in (
                    tuple,
                    list,
                )
                else value
            )
        closed = hasattr(getattr(value, "jaxpr", None), "eqns")
        return replace_equations(value, rule) if closed or hasattr(value, "eqns") else value

    params = {name: changed(value) for name, value in eqn.params.items()}
    return eqn.replace(params=params)


def _traced_equations(eqn: Any, function: Callable[..., Any]) -> Iterator[Any]:
    """The equations of a function, from the inputs of one equation to its outputs."""
    import jax
    from jax.extend import core

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    inner = jax.make_jaxpr(function)(*avals).jaxpr
    names = dict(zip(inner.invars, eqn.invars, strict=True))
    names |= dict(zip(inner.outvars, eqn.outvars, strict=True))

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else names.get(atom, atom)

    for item in inner.eqns:
        yield item.replace(
            invars=[named(v) for v in item.invars],
            outvars=[named(v) for v in item.outvars],
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )


def equation_place(eqn: Any) -> str:
    """The user's ``file:line`` at which an equation was traced, empty if unknown."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame is not None else ""


def _pallas_call(eqn: Any, calls: int) -> PallasCall:
    mapping, params = eqn.params["grid_mapping"], eqn.params
    scratch = [aval for aval in mapping.scratch_avals if str(aval.memory_space) == "vmem"]
    return PallasCall(
        name=str(
            params.get("name") or getattr(params["jaxpr"].debug_info, "func_name", "") or "kernel"
        ),
        where=equation_place(eqn),
        grid=tuple(mapping.grid),
        blocks=tuple(
            _pallas_block(block, len(mapping.grid))
            for block in mapping.block_mappings
            if str(block.block_aval.memory_space) in ("None", "default", "vmem")
        ),
        scratch=tuple((tuple(aval.shape), _bits(aval.dtype)) for aval in scratch),
        scalars=tuple(_scalar_operands(eqn)),
        vmem_limit=getattr(params.get("compiler_params"), "vmem_limit_bytes", None),
        flops_per_step=_dot_flops(params["jaxpr"]),
        calls=calls,
    )


def _scalar_operands(eqn: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    mapping = eqn.params["grid_mapping"]
    first = mapping.num_dynamic_grid_bounds
    prefetched = [v.aval for v in eqn.invars[first : first + mapping.num_index_operands]]
    inside = [*(b.block_aval for b in mapping.block_mappings), *mapping.scratch_avals]
    for aval in (*prefetched, *(a for a in inside if str(a.memory_space) == "smem")):
        yield tuple(int(size) for size in aval.shape), _bits(aval.dtype)


def _pallas_block(block: Any, axes: int) -> PallasBlock:
    aval, index_map = (
        block.block_aval,
        getattr(block.index_map_jaxpr, "jaxpr", block.index_map_jaxpr),
    )
    reads: dict[Any, frozenset[int]] = {}
    for position, variable in enumerate(index_map.invars):
        # Prefetched scalars may be anything at any step.
        reads[variable] = frozenset({position} if position < axes else range(axes))
    for eqn in index_map.eqns:
        found = frozenset().union(*(_reads_of(v, reads) for v in eqn.invars))
        reads.update(dict.fromkeys(eqn.outvars, found))
    depends_on = frozenset().union(*(_reads_of(v, reads) for v in index_map.outvars))
    return PallasBlock(
        origin=str(block.origin),
        shape=tuple(int(size) for size in aval.shape),
        dtype=str(aval.dtype),
        bits=_bits(aval.dtype),
        buffers=getattr(block.pipeline_mode, "buffer_count", None),
        depends_on=depends_on,
    )


def _reads_of(atom: Any, reads: Mapping[Any, frozenset[int]]) -> frozenset[int]:
    # Literals are not hashable and read nothing.
    return frozenset() if hasattr(atom, "val") else reads.get(atom, frozenset())


def _bits(dtype: Any) -> int:
    import ml_dtypes
    import numpy as np

    for finfo in (ml_dtypes.finfo, ml_dtypes.iinfo):
        try:
            return int(finfo(dtype).bits)
        except ValueError:
            continue
    return int(8 * np.dtype(dtype).itemsize)


def _dot_flops(jaxpr: Any) -> dict[str, float]:
    """Multiply-adds of the matrix products; of the branches of a `cond` the dearest."""
    total: dict[str, float] = {}

    def add(more: Mapping[str, float], times: float = 1.0) -> None:
        for dtype, flops in more.items():
            total[dtype] = total.get(dtype, 0.0) + times * flops

    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval
            size = math.prod(eqn.outvars[0].aval.shape)
            size *= math.prod(left.shape[axis] for axis in contracted)
            add({str(left.dtype): 2.0 * size})
            continue
        inner = [_dot_flops(item) for item in inner_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            add(max(inner, key=lambda flops: sum(flops.values()), default={}))
        else:
            trips = float(eqn.params["length"]) if eqn.primitive.name == "scan" else 1.0
            for item in inner:
                add(item, trips)
    return total


# --- Interpreters, for checks
# ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pallas_padding(pattern: str) -> Iterator[None]:
    """Let the plain interpreter fill what overhangs an array with a pattern, while tracing.

    Its filling is fixed (NaN, or the smallest integer, whose sums cancel). Only scalars are
    replaced: those are paddings, while fresh buffers are asked for with their shapes.

    Args:
        pattern: ``"nan"`` (a large number for integers), ``"high"`` or ``"low"``.
    """
    import jax.numpy as jnp
    import ml_dtypes
    from jax._src.pallas import primitives

    original: Any = primitives.uninitialized_value

    def filled(shape: Any, dtype: Any) -> Any:
        if shape != ():
            return original(shape, dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            large = float(ml_dtypes.finfo(dtype).max) / 1024  # type: ignore[no-untyped-call]
            value = {"nan": jnp.nan, "high": large, "low": -large}[pattern]
        elif jnp.issubdtype(dtype, jnp.integer):
            limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
            # Odd offsets, so that an even number of them does not wrap around to zero.
            value = limits.min + 3 if pattern == "low" else limits.max - 6 * (pattern == "high")
        else:
            return original(shape, dtype)
        return jnp.full(shape, value, dtype)

    primitives.uninitialized_value = filled
    try:
        yield
    finally:
        primitives.uninitialized_value = original


def interpreter_races() -> bool:
    """Whether the TPU interpreter's last run found a data race; its state has no public door."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found
