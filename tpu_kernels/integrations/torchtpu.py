"""Source compatibility with TorchTPU: code written for ``torch.tpu.pallas.jax_op`` runs unchanged.

The interface is that of torch_tpu 0.2.0. What is more here: CPU tensors and the simulated device,
gradients, vmap, autocast, symbolic sizes. What is different: an `int` is an ``int`` in the schema
(a static value, as it is for TorchTPU's kernels), and a second definition of a name from another
place is an error.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, overload

import torch

from tpu_kernels import backends
from tpu_kernels._compat_torch import dispatch_key_of_device, privateuse1_name
from tpu_kernels.dsl import jax_frontend
from tpu_kernels.dsl.source import unwrap
from tpu_kernels.errors import ArgumentError, DeviceError
from tpu_kernels.registry.kernel import Kernel, register
from tpu_kernels.tuning import lookup

PALLAS = "torch.tpu.pallas"


class JaxOp(Kernel):
    """What `jax_op` returns: a `Kernel` with the methods of `torch.library.CustomOpDef`."""

    @property
    def _opoverload(self) -> torch._ops.OpOverload:  # as CustomOpDef calls it
        return self.op

    @property
    def _qualname(self) -> str:
        return self.name

    def register_kernel(
        self, device_types: str | Sequence[str] | None, fn: Callable[..., Any] | None = None, /
    ) -> Callable[..., Any]:
        """Replace the implementation on a device; usable as a decorator.

        Args:
            device_types: Such as ``"cpu"`` or ``["cpu", "tpu"]``; None replaces it everywhere.
            fn: A torch function with the operator's parameters.

        Returns:
            ``fn`` itself, or a decorator.

        Example:
            >>> import jax
            >>> @jax_op("doc::add_one")
            ... def add_one(x: jax.Array) -> jax.Array:
            ...     return x + 1
            >>> @add_one.register_kernel("cpu")
            ... def add_one_cpu(x):
            ...     return x + 1.5
            >>> add_one(torch.zeros(1))
            tensor([1.5000])
        """
        if fn is None:
            return functools.partial(self.register_kernel, device_types)
        types = [device_types] if isinstance(device_types, str) else device_types
        for device_type in types or ("cpu", privateuse1_name()):
            key = dispatch_key_of_device(device_type)
            self.operator.replace_implementation(key, fn)
        self.customised.append(("register_kernel", (device_types, fn), {}))
        return fn


@overload
def jax_op(
    name: str,
    fn: None = None,
    /,
    *,
    donate_argnums: Sequence[int] | None = ...,
    mesh: Any = ...,
    input_partition_specs: Any = ...,
    output_partition_specs: Any = ...,
) -> Callable[[Callable[..., Any]], JaxOp]: ...


@overload
def jax_op(
    name: str,
    fn: Callable[..., Any],
    /,
    *,
    donate_argnums: Sequence[int] | None = ...,
    mesh: Any = ...,
    input_partition_specs: Any = ...,
    output_partition_specs: Any = ...,
) -> JaxOp: ...


def jax_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    donate_argnums: Sequence[int] | None = None,
    mesh: Any = None,
    input_partition_specs: Any = None,
    output_partition_specs: Any = None,
) -> Any:
    """Register a JAX function as a PyTorch operator, with the signature of TorchTPU's function.

    Args:
        name: ``"namespace::op"``; the namespace is required.
        fn: The JAX function, its parameters annotated; without it `jax_op` is a decorator.
        donate_argnums: Positions of tensor parameters whose memory the operator may reuse. Using
            such an argument again raises.
        mesh: A JAX mesh for kernels that communicate between devices; needs TPUs.
        input_partition_specs: For kernels with a mesh.
        output_partition_specs: For kernels with a mesh.

    Returns:
        A `JaxOp`, or a decorator.

    Raises:
        ArgumentError: The name has no namespace, or ``donate_argnums`` names no tensor parameter.
        DeviceError: A mesh was given where there are no devices to make one of.
        SignatureError: The signature cannot become a schema; names the parameter.

    Example:
        >>> import jax
        >>> @jax_op("doc::scaled")
        ... def scaled(x: jax.Array, alpha: float = 2.0) -> jax.Array:
        ...     return x * alpha
        >>> torch.ops.doc.scaled(torch.ones(2), alpha=3.0)
        tensor([3., 3.])
    """
    if len([part for part in name.split("::") if part]) != 2 or name.count("::") != 1:
        raise ArgumentError(f"operator name {name!r} needs the form 'namespace::op'")
    _check_mesh(name, mesh, input_partition_specs, output_partition_specs)
    # This function is reached through torch.tpu too, where nothing of the package was used before.
    backends.ready()
    lookup.install()
    caller_locals = dict(sys._getframe(1).f_locals)

    def decorate(function: Callable[..., Any]) -> JaxOp:
        function = without_bound_parameters(function)
        options = jax_frontend.Options(donate_args=_donated(name, function, donate_argnums or ()))
        spec = jax_frontend.from_function(function, name, options, caller_locals)
        kernel = register(spec, kind=JaxOp)
        if not isinstance(kernel, JaxOp):
            raise TypeError(f"expected a JaxOp, got {type(kernel).__name__}")
        return kernel

    return decorate if fn is None else decorate(fn)


def without_bound_parameters(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function without the keyword parameters that `functools.partial` has bound.

    TorchTPU leaves them out of the schema, so they need no annotation that a schema can express.

    Example:
        >>> def scale(x: int, by: object) -> int:
        ...     return x * by
        >>> plain = without_bound_parameters(functools.partial(scale, by=2))
        >>> list(inspect.signature(plain).parameters)
        ['x']
    """
    bound: set[str] = set()
    inner = fn
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        if isinstance(inner, functools.partial):
            bound.update(inner.keywords)
            inner = inner.func
        else:
            inner = inner.__wrapped__
    if not bound:
        return fn
    signature = inspect.signature(fn)
    kept = [p for p in signature.parameters.values() if p.name not in bound]

    def function(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    function.__wrapped__ = unwrap(fn)  # type: ignore[attr-defined]
    function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return function


def _donated(name: str, fn: Callable[..., Any], argnums: Sequence[int]) -> tuple[str, ...]:
    names = list(inspect.signature(fn).parameters)
    for number in argnums:
        if not 0 <= number < len(names):
            raise ArgumentError(
                f"kernel {name!r}: donate_argnums names parameter {number}, there are {len(names)}"
            )
    return tuple(names[number] for number in argnums)


def _check_mesh(name: str, mesh: Any, inputs: Any, outputs: Any) -> None:
    if mesh is None:
        if inputs is not None or outputs is not None:
            raise ArgumentError(
                f"kernel {name!r}: partition specs were given without a mesh",
                hint="pass mesh=torch.tpu.pallas.get_pallas_mesh(axis_names)",
            )
        return
    raise _no_mesh(f"kernel {name!r}")


def _no_mesh(what: str) -> DeviceError:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return DeviceError(
            f"{what}: a Pallas mesh needs torch.distributed, which is not initialized",
            hint="call torch.distributed.init_process_group() on a machine with TPUs; to split a"
            " kernel over DTensors, use tpu_kernel(sharding=...) instead",
        )
    return DeviceError(
        f"{what}: a Pallas mesh spans real TPUs; the simulated device is one chip",
        hint="to split a kernel over DTensors, use tpu_kernel(sharding=...): it runs on CPUs too",
    )


def get_pallas_mesh(
    axis_names: Sequence[str] | str,
    mesh_shape: Sequence[int] | None = None,
    process_group: Any = None,
) -> Any:
    """Refuse: a mesh of real TPUs is what TorchTPU makes, and the simulated device is one chip.

    Args:
        axis_names: Names of the mesh axes.
        mesh_shape: Shape of the mesh.
        process_group: The process group whose devices to use.

    Raises:
        DeviceError: Always; says what is missing.
    """
    raise _no_mesh(f"get_pallas_mesh({axis_names!r})")


def register_module() -> None:
    """Provide ``torch.tpu.pallas`` on the simulated device, unless something else does."""
    device_module: Any = torch.tpu  # type: ignore[attr-defined]
    if hasattr(device_module, "pallas"):
        return
    module = ModuleType(PALLAS, "The part of TorchTPU's torch.tpu.pallas that can be simulated.")
    module.jax_op = jax_op  # type: ignore[attr-defined]
    module.get_pallas_mesh = get_pallas_mesh  # type: ignore[attr-defined]
    module.__all__ = ["get_pallas_mesh", "jax_op"]  # type: ignore[attr-defined]
    device_module.pallas = module
    sys.modules[PALLAS] = module
