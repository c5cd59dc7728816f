"""`Operator`: one torch.library operator whose implementation is a JAX program.

A kernel is one operator for callers, and more behind the scenes (forward with residuals, backward,
tangents, batched variants), all made here. What they have in common: a schema, a function that
builds the JAX program for a given `Call`, a fake kernel derived from it, and one implementation by
each backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_torch
from tpu_kernels.dsl import dtypes
from tpu_kernels.dsl.spec import Kind, Parameter, ReturnKind
from tpu_kernels.errors import ArgumentError, DeviceError, DTypeError
from tpu_kernels.registry import backend_table, donation, overlap
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.freshness import Freshness, refreshed
from tpu_kernels.registry.layout import Layout, fill, flat_names, map_slot, split, tensors_of
from tpu_kernels.registry.shapes import ShapeRule
from tpu_kernels.registry.stats import Counters


@dataclasses.dataclass(frozen=True)
class Call:
    """What a program is specialised for.

    Attributes:
        layout: Which tensors there are, and the static values.
        avals: A `jax.ShapeDtypeStruct` for each tensor of the flat tuple.
    """

    layout: Layout
    avals: tuple[Any, ...]


Body = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""``body(tensor_arguments, dynamic_scalars) -> [one entry per result slot, then per mutated
argument]`` in JAX."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """What makes an operator.

    Attributes:
        name: ``"ns::op"``.
        schema: Torch schema without namespace.
        parameters: In schema order.
        returns: Kind of each result slot.
        program: Builds the JAX body for a call and an engine.
        where: ``file:line`` of the kernel, for messages.
        kernel: Qualified name of the kernel that the operator belongs to, for messages.
        int64: The kernel's policy for 64-bit types.
        mutated: Names of the arguments that are written back.
        reference: Torch function that answers for empty inputs that the kernel cannot run on.
        donated: Names of the arguments whose memory the operator may take.
        flops: Formula for torch's FLOP counter, on the kernel's own arguments.
        has_defaults: Whether the schema has the parameters' defaults; derived operators take every
            argument.
        cache_dir: Folder of its compiled programs, None for that of the settings.
        freshness: The globals that the kernel reads, None if there are none.
    """

    name: str
    schema: str
    parameters: tuple[Parameter, ...]
    returns: tuple[ReturnKind, ...]
    program: Callable[[Call, Engine], Body]
    where: str
    kernel: str
    int64: str | None = None
    mutated: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    has_defaults: bool = True
    donated: tuple[str, ...] = ()
    flops: Callable[..., int] | None = None
    cache_dir: Any = None
    freshness: Freshness | None = None


class Operator:
    """A registered torch operator.

    Args:
        definition: What makes it.
        counters: Counters of the kernel that it belongs to.

    Attributes:
        op: The `torch._ops.OpOverload`.
        shapes: Shape rule, the source of the fake kernel.
        autocast: Its autocast policies by device type.
    """

    def __init__(self, definition: Definition, counters: Counters) -> None:
        self.definition = definition
        self.counters = counters
        self.shapes = ShapeRule(self)
        self._shapes_of = self._version()
        self.autocast: dict[str, torch.dtype | str] = {}
        namespace, self.opname = definition.name.split("::")
        self.library = torch.library.Library(namespace, "FRAGMENT")
        # Any strides will do: programs see logical values, and outputs are fresh row-major tensors.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
        self.library.define(definition.schema, tags=tags)
        self.op: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), self.opname).default
        # Implementations by the key set of plain tensors under no mode: what lies between autograd
        # and them could only pass the call on, so the autograd kernel need not ask the dispatcher
        # again (a fifth of a call).
        self.direct: dict[int, Callable[..., Any]] = {}
        self.on_cpu: Callable[..., Any] | None = None
        torch.library.register_fake(definition.name, self.fake, lib=self.library)
        if definition.mutated:
            self._bump_versions()
        self.library.impl(self.opname, self._without_backend, "CompositeExplicitAutograd")
        backend_table.add_operator(self)

    # ------------------------------------------------------------------ implementations
    def implement(self, backend: backend_table.Backend) -> None:
        """Register this operator's implementation by a backend."""
        watched = self.definition.freshness
        if watched is None:
            implementation = backend.implement(self)
        else:
            implementation = refreshed(self, watched, lambda: backend.implement(self))
        if self.definition.mutated:
            implementation = overlap.guarded(self, self.definition.mutated, implementation)
        if self.definition.donated:
            implementation = donation.guarded(self, self.definition.donated, implementation)
        self.library.impl(self.opname, implementation, backend.dispatch_key)
        if backend.dispatch_key == "CPU":
            self.on_cpu = implementation
        if not self.definition.mutated:
            self.direct[_compat_torch.plain_key_set(backend.dispatch_key)] = implementation

    def _without_backend(self, *args: Any, **kwargs: Any) -> Any:
        """What the dispatcher calls for tensors that no backend serves, and where there is none."""
        arguments = self.arguments(args, kwargs)
        definition = self.definition
        layout, tensors, _ = split(definition.parameters, arguments)
        if not tensors and self.on_cpu is not None:
            return self.on_cpu(*args, **kwargs)
        names = flat_names(definition.parameters, layout)
        plain = [t.layout is torch.strided and not t.is_quantized for t in tensors]
        name, tensor = next(
            ((n, t) for n, t, ok in zip(names, tensors, plain, strict=True) if not ok),
            (names[0], tensors[0]) if tensors else ("", None),
        )
        if tensor is None or all(plain):
            where = "no tensor" if tensor is None else f"{name!r} on {tensor.device}"
            raise DeviceError(
                f"kernel {definition.kernel!r} does not run here: got {where}",
                where=definition.where,
                hint=f"backends: {', '.join(b.name for b in backend_table.backends().values())}",
            )
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        raise ArgumentError(
            f"kernel {definition.kernel!r}: argument {name!r} is {kind}; kernels take dense "
            "tensors",
            where=definition.where,
            hint=f"pass {name}.dequantize()" if tensor.is_quantized else f"pass {name}.to_dense()",
        )

    def replace_implementation(self, key: str, fn: Callable[..., Any]) -> None:
        """Run a torch function for tensors of one dispatch key, instead of the JAX program."""
        with self.replacing():
            self.library.impl(self.opname, fn, key)
        _compat_torch.forget_dispatch(self.op, key)
        self.direct.pop(_compat_torch.plain_key_set(key), None)

    @staticmethod
    @contextlib.contextmanager
    def replacing() -> Iterator[None]:
        """A context in which a kernel of this operator is replaced: torch would warn of what is
        intended."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*Overriding a previously registered kernel"
            )
            yield

    def call(self, *arguments: Any) -> Any:
        """Call the torch operator with all its arguments in schema order."""
        args, kwargs = positional_and_keyword(self, arguments)
        return self.op(*args, **kwargs)

    def forget_shapes(self) -> None:
        """Derive the shapes of results anew: the kernel computes something else now."""
        self.shapes = ShapeRule(self)
        self._shapes_of = self._version()

    def _version(self) -> int:
        watched = self.definition.freshness
        return 0 if watched is None else watched.version()

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """The fake kernel: outputs of the right shape, stride, dtype and device, without values."""
        arguments = self.arguments(args, kwargs)
        device = self.device_of(arguments)
        if self.definition.mutated:
            overlap.check(self, self.definition.mutated, arguments)
        self._check_sizes(device, arguments)
        if self._version() != self._shapes_of:
            self.forget_shapes()
        slots = self.shapes(arguments)
        if not self.definition.returns:  # a kernel that only writes to its arguments
            return None

        def empty(meta: Any) -> torch.Tensor:
            return torch.empty(meta.shape, dtype=meta.dtype, device=device)

        results = [map_slot(empty, slot) for slot in slots[: len(self.definition.returns)]]
        return results_of(results)

    def _check_sizes(self, device: torch.device, arguments: Sequence[Any]) -> None:
        """Refuse symbolic sizes for a backend that makes a program for one size."""
        backend = backend_table.backends().get(_compat_torch.dispatch_key_of_device(device.type))
        if getattr(backend, "symbolic_sizes", True):
            return
        definition = self.definition
        layout, tensors, _ = split(definition.parameters, arguments)
        names = flat_names(definition.parameters, layout)
        for name, tensor in zip(names, tensors, strict=True):
            if any(_compat_torch.symbol_of(size) is not None for size in tensor.shape):
                raise ArgumentError(
                    f"kernel {definition.kernel!r}: argument {name!r} has the shape "
                    f"{list(tensor.shape)}; {getattr(backend, 'name', device)} makes a program for "
                    "one size",
                    where=definition.where,
                    hint="compile without dynamic= and mark_dynamic: each size gets its program",
                )

    def _bump_versions(self) -> None:
        parameters = self.definition.parameters
        indices = [i for i, p in enumerate(parameters) if p.name in self.definition.mutated]
        keys = _compat_torch.after_version_counter_keys()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            result = self.op.redispatch(keyset & keys, *args, **kwargs)
            arguments = self.arguments(args, kwargs)
            for i in indices:
                tensors = (
                    arguments[i] if isinstance(arguments[i], (list, tuple)) else [arguments[i]]
                )
                for tensor in tensors:
                    if tensor is not None and not tensor.is_inference():
                        torch.autograd.graph.increment_version(tensor)
            return result

        self.library.impl(self.opname, kernel, "ADInplaceOrView", with_keyset=True)

    def destroy(self) -> None:
        """Take the operator out of torch's tables."""
        backend_table.remove_operator(self)
        _compat_torch.destroy_library(self.library)

    # ------------------------------------------------------------------ arguments
    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """One argument per parameter in schema order, defaults filled in."""
        filled = list(args)
        for parameter in self.definition.parameters[len(args) :]:
            filled.append(
                kwargs[parameter.name] if parameter.name in kwargs else schema_default(parameter)
            )
        return filled

    def check_dtypes(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse dtypes that JAX does not have, or that the kernel's 64-bit policy excludes.

        Raises:
            DTypeError: Names kernel, argument and dtype.
        """
        definition = self.definition
        for name, tensor in zip(flat_names(definition.parameters, layout), tensors, strict=True):
            dtype = tensor.dtype
            if not dtypes.is_supported(dtype):
                raise DTypeError(
                    f"kernel {definition.kernel!r}: argument {name!r} is {dtype}, which JAX does "
                    "not have",
                    where=definition.where,
                    hint="view it as another dtype of the same width, for example "
                    ".view(torch.uint8)",
                )
            if dtype in dtypes.PACKED and not tensor.shape:
                raise DTypeError(
                    f"kernel {definition.kernel!r}: argument {name!r} is {dtype} without a "
                    "dimension, so that it is no array of single values",
                    where=definition.where,
                    hint=f"pass {name}.reshape(1)",
                )
            if dtype in dtypes.WIDE and not self.takes(dtype):
                narrow = "int32" if not (dtype.is_floating_point or dtype.is_complex) else "float32"
                raise DTypeError(
                    f"kernel {definition.kernel!r}: argument {name!r} is {dtype}; TPU kernels "
                    "compute in 32 bits",
                    where=definition.where,
                    hint=f"pass {name}.to(torch.{narrow}), or declare int64='narrow_checked' "
                    "(integers that fit)"
                    " or int64='exact' on the kernel",
                )

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the kernel's 64-bit policy admits a wide dtype."""
        policy = self.definition.int64
        return policy == "exact" or (policy == "narrow_checked" and dtype in dtypes.NARROW)

    def device_of(self, arguments: Sequence[Any]) -> torch.device:
        """The device of the tensors among the arguments (the CPU if there are none).

        Raises:
            DeviceError: They are on devices of several types; names each.
        """
        parameters = self.definition.parameters
        tensors = [
            t
            for p, a in zip(parameters, arguments, strict=True)
            if p.kind.is_tensor
            for t in tensors_of(a)
        ]
        if not tensors:
            return torch.device("cpu")
        device: torch.device = tensors[0].device
        if any(t.device.type != device.type for t in tensors):
            raise self.wrong_device(arguments)
        return device

    def wrong_device(self, arguments: Sequence[Any]) -> DeviceError:
        """The error for tensors on several devices, naming each."""
        definition = self.definition
        layout, tensors, _ = split(definition.parameters, arguments)
        names = flat_names(definition.parameters, layout)
        places = ", ".join(f"{n!r} on {t.device}" for n, t in zip(names, tensors, strict=True))
        return DeviceError(
            f"kernel {definition.kernel!r}: all tensors must be on one device, got {places}",
            where=definition.where,
            hint="move them with .to(device)",
        )

    # ------------------------------------------------------------------ programs
    def call_of(self, layout: Layout, metas: Sequence[Any]) -> Call:
        """The `Call` for tensors (or anything with shape and torch dtype)."""
        import jax

        return Call(
            layout,
            tuple(
                jax.ShapeDtypeStruct(dtypes.array_shape(m.shape, m.dtype), dtypes.to_jax(m.dtype))
                for m in metas
            ),
        )

    def jax_function(self, call: Call, engine: Engine) -> Callable[..., tuple[Any, ...]]:
        """The program as a JAX function of positional arguments.

        Returns:
            ``fn(*tensor_arguments, *dynamic_scalars) -> tuple of slots``: an array, None or a tuple
            of arrays for each tensor parameter, and the same for each result slot and mutated
            argument.
        """
        body = self.definition.program(call, engine)
        tensors = len(call.layout.slots)

        def program(*args: Any) -> tuple[Any, ...]:
            with engine.scope():
                return tuple(body(args[:tensors], args[tensors:]))

        if engine.emulates:
            from tpu_kernels.registry.numerics.jaxpr import emulated

            program = emulated(program)
        program.__name__ = program.__qualname__ = self.opname
        return program

    def dynamic_structs(self) -> list[Any]:
        """Abstract values of the dynamic scalars: weakly typed, as Python numbers are in JAX."""
        import jax

        width = 64 if jax.config.jax_enable_x64 else 32  # type: ignore[attr-defined]
        kinds = {"SymInt": f"int{width}", "float": f"float{width}", "bool": "bool"}
        return [
            jax.ShapeDtypeStruct((), kinds[p.schema_type], weak_type=p.schema_type != "bool")
            for p in self.definition.parameters
            if p.kind is Kind.DYNAMIC
        ]

    def abstract_arguments(self, call: Call) -> list[Any]:
        """The arguments of `jax_function` as abstract values."""
        return [*fill(call.layout, call.avals), *self.dynamic_structs()]


def schema_default(parameter: Parameter) -> Any:
    """The default that the dispatcher stands for when it passes nothing (None where a schema cannot
    write it)."""
    if parameter.tunable or parameter.none_is_default:
        return None
    default = parameter.default
    return (
        default if default is None or parameter.to_schema is None else parameter.to_schema(default)
    )


def signature_source(definition: Definition, env: dict[str, Any]) -> tuple[str, str]:
    """Source text of an operator's Python signature, and of a call that passes everything on.

    Args:
        definition: The operator.
        env: Globals of the generated function; receives the default values.

    Returns:
        For example ``("x, y=_default_1, *, n=_default_2", "x, y, n=n")``. The dispatcher leaves out
        arguments that equal the schema's default.
    """
    declared: list[str] = []
    passed: list[str] = []
    for i, p in enumerate(definition.parameters):
        if p.keyword_only and "*" not in declared:
            declared.append("*")
        if p.required or not definition.has_defaults:
            declared.append(p.name)
        else:
            env[f"_default_{i}"] = schema_default(p)
            declared.append(f"{p.name}=_default_{i}")
        passed.append(f"{p.name}={p.name}" if p.keyword_only else p.name)
    return ", ".join(declared), ", ".join(passed)


def positional_and_keyword(
    operator: Operator, arguments: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in schema order as the dispatcher wants them."""
    pairs = list(zip(operator.definition.parameters, arguments, strict=True))
    return [a for p, a in pairs if not p.keyword_only], {
        p.name: a for p, a in pairs if p.keyword_only
    }


def results_of(slots: Sequence[Any]) -> Any:
    """What an operator returns for its slots: nothing, the one result, or a tuple."""
    if not slots:
        return None
    return slots[0] if len(slots) == 1 else tuple(slots)
