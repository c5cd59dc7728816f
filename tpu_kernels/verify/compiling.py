"""`compile`: what the real TPU compiler says about a kernel or function, for any targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch

from tpu_kernels.compiler import (
    CompileReport,
    CompileReports,
    Request,
    Target,
    compile_all,
    resolve,
)
from tpu_kernels.compiler.time_limit import time_limit
from tpu_kernels.dsl import dtypes, source
from tpu_kernels.errors import ArgumentError, DTypeError, TraceError, TraceTimeout
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.verify import modules

Via = Literal["jax", "torch_tpu"]

_STEERING_ELEMENTS = 1 << 20  # of an integer argument; larger ones are data
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True)
class Traceable:
    """A function of flat JAX arrays, ready to be lowered.

    Attributes:
        name: Name for reports.
        function_for: The function as a target sees it: its configuration may depend on it.
        avals: Shape and dtype of each array.
        where: ``file:line`` of the definition.
        concrete: Values of small integer arguments by position.
        leaves: The flat arguments themselves, tensors, arrays or abstract values.
        finish: Adds to a report what is known of the program besides, or None.
    """

    name: str
    function_for: Callable[[Target], Callable[..., Any]]
    avals: Sequence[Any]
    where: str | None
    concrete: Mapping[int, np.ndarray]
    leaves: Sequence[Any] = ()
    finish: Callable[[CompileReport, Target], CompileReport] | None = None


@overload
def compile(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target = ...,
    *,
    config: Mapping[str, Any] | None = ...,
    via: Via = ...,
    backward: bool = ...,
    timeout_s: float = ...,
    cache: bool = ...,
    dump: str | Path | None = ...,
    **kwargs: Any,
) -> CompileReport: ...


@overload
def compile(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    target: Sequence[str | Target],
    *,
    config: Mapping[str, Any] | None = ...,
    via: Via = ...,
    backward: bool = ...,
    timeout_s: float = ...,
    cache: bool = ...,
    dump: str | Path | None = ...,
    **kwargs: Any,
) -> CompileReports: ...


def compile(
    kernel: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target | Sequence[str | Target] = "v6e",
    *,
    config: Mapping[str, Any] | None = None,
    via: Via = "jax",
    backward: bool = False,
    timeout_s: float = 600.0,
    cache: bool = True,
    dump: str | Path | None = None,
    **kwargs: Any,
) -> CompileReport | CompileReports:
    """Compile a kernel, a JAX function or a whole torch model with the real TPU compiler; no TPU is
    needed.

    Args:
        kernel: A registered kernel, any JAX function, a `torch.nn.Module`, or a function of torch
            tensors (with ``via="torch_tpu"`` one that reads nothing but its arguments). A model
            becomes one program with its parameters as arguments; its report is a `ModelReport`.
        args: Its arguments: torch tensors on any device, JAX or NumPy arrays,
            `jax.ShapeDtypeStruct`, and scalars. Of tensors and arrays only shape and dtype count.
        target: A chip (``"v6e"``), a chip with topology (``"v6e:2x2"``), or a sequence of them;
            several are compiled in parallel.
        config: Tunable parameters; by default the kernel's own choice.
        via: Who lowers the program: ``"jax"``, or ``"torch_tpu"`` for the program that the real
            TorchTPU would send to the chip (experimental; in a process started by ``tpu-kernels
            run --torch-tpu``, or on a machine with a TPU).
        backward: Of a model, compile the gradients of its parameters in the same program. Its
            result is the loss, or summed up to one.
        timeout_s: Seconds that tracing, and then the compiler, may take for one target.
        cache: Look results up on disk first, and keep them there.
        dump: Folder to write StableHLO, Mosaic and LLO texts to, one subfolder for each of several
            targets. **kwargs: Keyword arguments of the kernel.

    Returns:
        The report, or a mapping from target to report where `target` is a sequence. That the
        program does not compile is a report, not an exception.

    Raises:
        ConfigError: If a target is unknown.
        ArgumentError: If the arguments do not fit the kernel.
        DeviceError: If TorchTPU is to lower the program and does not own the device.

    Example:
        >>> import jax.numpy as jnp
        >>> report = compile(jnp.tanh, (torch.zeros(8, 128),), "v6e")
        >>> report.status in ("ok", "unavailable")
        True
    """
    if isinstance(target, (str, Target)):
        targets = [resolve(target)]
    else:
        targets = [resolve(each) for each in target]
        if not targets:
            raise ArgumentError("no target to compile for", hint="name one, such as 'v6e'")
    if via not in ("jax", "torch_tpu"):
        raise ArgumentError(f"compile: via={via!r} is neither 'jax' nor 'torch_tpu'")
    requests = []
    program = None
    if via == "jax":
        program = _program(kernel, tuple(args), config, kwargs, timeout_s, backward=backward)
    for each in targets:
        folder = None if dump is None else Path(dump)
        if folder is not None and len(targets) > 1:
            folder = folder / each.topology_name.replace(":", "-")
        if program is None:
            request = _by_torch_tpu(kernel, args, kwargs, each, config)
            requests.append(replace(request, timeout_s=timeout_s, cache=cache, dump=folder))
            continue
        request = Request(
            fn=program.function_for(each),
            avals=program.avals,
            target=each,
            name=program.name,
            where=program.where,
            timeout_s=timeout_s,
            cache=cache,
            dump=folder,
            concrete=program.concrete,
        )
        requests.append(request)
    done = dict(compile_all(requests))
    if program is not None and program.finish is not None:
        done = {i: program.finish(report, targets[i]) for i, report in done.items()}
    if isinstance(target, (str, Target)):
        return done[0]
    return CompileReports({each.name: done[index] for index, each in enumerate(targets)})


def _by_torch_tpu(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    config: Mapping[str, Any] | None,
) -> Request:
    """The program that TorchTPU makes of torch code."""
    if config is not None:
        raise ArgumentError(
            "compile: config= is for a kernel, and via='torch_tpu' compiles torch code",
            hint="pass the configuration where the code calls the kernel",
        )
    from tpu_kernels.backends.torch_tpu import stablehlo
    from tpu_kernels.compiler.lowering import program_of_text

    started = time.perf_counter()
    text = stablehlo.lower(function, args, kwargs, target)
    program = program_of_text(text, target, time.perf_counter() - started)
    name, where = stablehlo.name_of(function), stablehlo.place_of(function)
    return Request(fn=function, avals=(), target=target, name=name, where=where, program=program)


def _program(
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    config: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],
    timeout_s: float,
    *,
    backward: bool,
) -> Traceable:
    """What to compile; a function that is no kernel is tried in JAX first, then in torch."""
    if isinstance(kernel, Kernel):
        if backward:
            raise ArgumentError(
                "compile: backward=True is for torch modules and functions",
                hint="compile a torch function that calls the kernel",
            )
        return traceable(kernel, args, config, kwargs)
    if backward or modules.is_module(kernel):
        return _of_torch(kernel, args, kwargs, backward=backward)
    if not modules.has_tensors(args, kwargs):
        return traceable(kernel, args, config, kwargs)
    try:
        program = traceable(kernel, args, config, kwargs)
    except DTypeError:
        found = _perhaps_torch(kernel, args, kwargs)
        if found is None:
            raise
        return found
    if _fails(program, timeout_s):
        return _perhaps_torch(kernel, args, kwargs) or program
    return program


def _fails(program: Traceable, timeout_s: float) -> bool:
    """Whether JAX cannot trace a function: its report will say so, unless it is torch code."""
    import jax

    try:
        with time_limit(timeout_s, "tracing"):
            jax.eval_shape(program.function_for(resolve("v6e")), *program.avals)
    except TraceTimeout:
        return False  # torch code raises at once
    except Exception:
        return True
    return False


def _perhaps_torch(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Traceable | None:
    try:
        return _of_torch(function, args, kwargs, backward=False)
    except TraceError:
        return None


def _of_torch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backward: bool,
) -> Traceable:
    program = modules.torch_program(function, args, kwargs, backward=backward)
    return Traceable(
        program.name,
        program.function_for,
        program.whole.avals(),
        program.where,
        {},
        finish=program.finished,
    )


def traceable(
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    config: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any],
) -> Traceable:
    """Make of a kernel or JAX function with arguments what the compiler takes; see `compile`."""
    if isinstance(kernel, Kernel):
        bound = kernel.bind(*args, config=config, **kwargs)

        def function_for(target: Target) -> Callable[..., Any]:
            return bound.function(interpret=False, target=target.chip.name)

        concrete = _integers(bound.tensors)
        where = str(kernel.spec.source)
        return Traceable(kernel.name, function_for, bound.avals, where, concrete, bound.tensors)
    return _plain(kernel, args, {**kwargs, **(config or {})})


def _plain(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traceable:
    """Split the arguments of a JAX function into arrays, to be traced, and fixed values."""
    import jax

    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    avals = [_aval(leaf, f"array {index}") for index, leaf in enumerate(leaves)]
    arrays = [index for index, aval in enumerate(avals) if aval is not None]

    def flat(*values: Any) -> Any:
        filled = list(leaves)
        for index, value in zip(arrays, values, strict=True):
            filled[index] = value
        positional, named = jax.tree.unflatten(tree, filled)
        return fn(*positional, **named)

    place = source.locate(fn)
    inner = source.unwrap(fn)
    name = getattr(inner, "__name__", type(inner).__name__)
    flat.__name__ = flat.__qualname__ = name
    where = f"{place.file}:{place.line}" if place.line else None
    values = [leaves[index] for index in arrays]
    concrete = _integers(values)
    kept = [avals[index] for index in arrays]
    return Traceable(name, lambda _: flat, kept, where, concrete, values)


def _aval(leaf: Any, what: str) -> Any:
    """Shape and dtype of an array, None for anything else."""
    import jax

    if isinstance(leaf, torch.Tensor):
        if leaf.dtype in dtypes.WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise DTypeError(
                f"{what} is {leaf.dtype}, which JAX would silently narrow to 32 bits",
                hint="convert it, or enable 64-bit types in JAX (jax_enable_x64)",
            )
        shape = dtypes.array_shape(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(shape, dtypes.to_jax(leaf.dtype))
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    return None


def _integers(arrays: Sequence[Any]) -> dict[int, np.ndarray]:
    """Values of the small integer arguments: they may steer a kernel."""
    import jax

    found = {}
    for position, array in enumerate(arrays):
        if isinstance(array, torch.Tensor):
            values = None if array.is_meta or array.numel() > _STEERING_ELEMENTS else array
            if values is not None and values.dtype in _INTEGERS:
                found[position] = values.detach().cpu().numpy()
        elif isinstance(array, (np.ndarray, jax.Array)):
            small = array.size <= _STEERING_ELEMENTS
            if small and np.issubdtype(array.dtype, np.integer):
                found[position] = np.asarray(array)
    return found
