"""From a Python function to the program that the TPU compiler takes, on any machine.

Lowering runs in this process and needs neither a TPU nor libtpu: JAX is told about the target by an
abstract mesh, so a kernel that asks `pltpu.get_tpu_info()` sees the target's figures. Mistakes in
the author's Python surface here, with their tracebacks; what only the compiler can refuse comes
later.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from tpu_kernels import _compat_jax
from tpu_kernels.compiler import locations
from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.cost.scalars import KernelScalars, evaluate
from tpu_kernels.compiler.pallas_model import PallasModel, pallas_models

_PALLAS_CALL = "tpu_custom_call"
_LAST_COMMA = re.compile(r",(\s*[}\]])")
_BODY = re.compile(r'\\22body\\22: \\22([A-Za-z0-9+/=]+)\\22|"body": "([A-Za-z0-9+/=]+)"')


@dataclass(frozen=True)
class KernelSite:
    """One Pallas kernel inside a lowered program.

    Attributes:
        name: The name that the compiler reports it under.
        op_name: Its path in the traced function, such as ``"jit(f)/scale/pallas_call"``.
        where: The author's line that calls it.
        body: Serialized Mosaic module.
    """

    name: str
    op_name: str
    where: locations.SourceLine | None
    body: bytes

    def mosaic(self, *, source_lines: bool = True) -> str:
        """Return the kernel's Mosaic MLIR as text.

        Args:
            source_lines: Whether to keep the author's source lines in it.

        Returns:
            The text.
        """
        return _compat_jax.mosaic_text(self.body, locations=source_lines)


@dataclass(frozen=True)
class Program:
    """A function lowered for a target: what the compiler gets and what a cache entry is named
    after.

    Attributes:
        text: StableHLO with source locations.
        target: What it was lowered for.
        kernels: Its Pallas kernels in order of appearance.
        digest: Hash of what decides the compiled code; source locations do not count.
        place_digest: Hash of the text as it is, source locations included.
        seconds: Time that tracing and lowering took.
        scalars: Integer operands that steer its kernels, as far as they are known.
        models: What its Pallas calls need of the memories, in order of appearance.
    """

    text: str
    target: Target
    kernels: tuple[KernelSite, ...]
    digest: str
    place_digest: str
    seconds: float
    scalars: tuple[KernelScalars, ...] = ()
    models: tuple[PallasModel, ...] = ()


def lower(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    concrete: Mapping[int, np.ndarray] | None = None,
) -> Program:
    """Trace and lower a JAX function for a target.

    Args:
        fn: Function of flat JAX arrays; may be wrapped by `jax.jit`.
        avals: Shape and dtype of each argument: `jax.ShapeDtypeStruct` or arrays.
        target: The TPU to lower for.
        concrete: Values of integer arguments by position, for kernels that they steer.

    Returns:
        The lowered program.

    Raises:
        Exception: Whatever tracing or lowering raises, unchanged; `locations.from_exception` finds
            its line.

    Example:
        >>> import jax.numpy as jnp
        >>> from tpu_kernels.compiler.chips import resolve
        >>> program = lower(jnp.sin, [jax.ShapeDtypeStruct((8, 128), "float32")], resolve("v6e"))
        >>> "stablehlo.sine" in program.text, program.kernels
        (True, ())
    """
    started = time.perf_counter()
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with target_scope(target):
        traced = jax.jit(fn).trace(*shapes)
        lowered = traced.lower(lowering_platforms=("tpu",))
        scalars = tuple(evaluate(traced.jaxpr, concrete or {}))
        models = tuple(pallas_models(traced.jaxpr))
    text = lowered.as_text(debug_info=True)
    kernels = tuple(_kernels(lowered.compiler_ir("stablehlo")))
    bare = _BODY.sub(_digest_of_body, lowered.as_text(debug_info=False))
    return Program(
        text=text,
        target=target,
        kernels=kernels,
        digest=_digest(bare + "".join(map(repr, map(_scalar_digest, scalars)))),
        place_digest=_digest(text),
        seconds=time.perf_counter() - started,
        scalars=scalars,
        models=models,
    )


def program_of_text(text: str, target: Target, seconds: float = 0.0) -> Program:
    """Take a StableHLO module that somebody else lowered.

    Args:
        text: StableHLO, with source locations if they are known.
        target: What it was lowered for.
        seconds: Time that this took.

    Returns:
        The program.

    Example:
        >>> from tpu_kernels.compiler.chips import resolve
        >>> text = "module @f { func.func @main(%x: tensor<8xf32>) -> tensor<8xf32>"
        >>> program_of_text(text + " { return %x : tensor<8xf32> } }", resolve("v6e")).kernels
        ()
    """
    module = _compat_jax.parse_module(text)
    bare = _BODY.sub(_digest_of_body, str(module.operation.get_asm(enable_debug_info=False)))
    return Program(
        text=text,
        target=target,
        kernels=tuple(_kernels(module)),
        digest=_digest(bare),
        place_digest=_digest(text),
        seconds=seconds,
    )


@contextlib.contextmanager
def target_scope(target: Target) -> Iterator[None]:
    """A scope in which a kernel that is traced and asks for its TPU sees the target's figures."""
    chip = target.chip
    device = jax.sharding.AbstractDevice(
        device_kind=chip.device_kind, num_cores=chip.cores_per_device, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    # Lowering asks for a default device, and without one JAX would start every backend that it
    # finds.
    with jax.default_device(_compat_jax.cpu_device()), jax.sharding.use_abstract_mesh(mesh):
        yield


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _scalar_digest(scalars: KernelScalars) -> list[tuple[int, str]]:
    """The estimate depends on these values, so the result's key does too."""
    return [
        (index, hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest())
        for index, value in sorted(scalars.values.items())
    ]


def _digest_of_body(match: re.Match[str]) -> str:
    """Stand-in for a serialized kernel: its hash without the source locations that it embeds."""
    body = base64.b64decode(match[1] or match[2])
    return "body:" + _digest(_compat_jax.mosaic_text(body, locations=False))


def _kernels(module: Any) -> Iterator[KernelSite]:
    for operation in _operations(module.operation):
        if operation.name != "stablehlo.custom_call":
            continue
        attributes = operation.attributes
        if ir.StringAttr(attributes["call_target_name"]).value != _PALLAS_CALL:
            continue
        config = _config(ir.StringAttr(attributes["backend_config"]).value)
        place = str(operation.location)
        op_name = re.match(r'loc\("([^"]*)"', place)
        yield KernelSite(
            name=ir.StringAttr(attributes["kernel_name"]).value
            if "kernel_name" in attributes
            else "",
            op_name=op_name[1] if op_name else "",
            where=locations.from_location(place),
            body=base64.b64decode(config.get("custom_call_config", {}).get("body", "")),
        )


def _config(text: str) -> Mapping[str, Any]:
    """A kernel's configuration; TorchTPU's C++ writes it with commas that JSON does not allow."""
    config: Mapping[str, Any] = json.loads(_LAST_COMMA.sub(r"\1", text))
    return config


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield child.operation
                yield from _operations(child.operation)
