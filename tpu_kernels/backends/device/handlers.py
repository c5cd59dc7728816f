"""From an operator's schema to the function that runs it on the simulated device.

A handler shows its tensor arguments to torch's own CPU kernel as CPU tensors on the same memory,
and its results to the caller as device tensors. View operators need neither: torch's view kernels
only touch metadata and take device tensors as they are, which keeps aliasing, ``_base`` and version
counters torch's own.

A handler is generated as source, since a function with exactly the operator's arguments is twice as
fast as one that loops over them. A kernel is registered before its handler is generated: it is a
stub whose code object is replaced at the first call, so that later calls pay no indirection.
"""

from __future__ import annotations

import functools
import keyword
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_kernels._compat_torch import key_set, redispatcher, registered_operators
from tpu_kernels.backends.device import modes
from tpu_kernels.backends.device.capsule import unwrap, with_lazy_bits, wrap

CPU_KEYS = key_set("CPU")
_CPU_DEVICE = torch.device("cpu")

# Operators that take CPU tensors beside device tensors on every backend: indices, lengths, steps.
_TAKES_CPU_TENSORS = """
index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put
_pack_padded_sequence _ctc_loss _fused_adamw_ _fused_adam_ _fused_sgd_ _fused_adagrad_
repeat_interleave is_same_size tensor_split
"""
TAKES_CPU_TENSORS = frozenset(_TAKES_CPU_TENSORS.split())

_INDEXING = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put"})

# Results that alias an argument, by a schema that does not say so.
_UNDECLARED_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")

# Families whose CPU kernels may return a lazily conjugated result.
_RETURNS_LAZY_BITS = ("linalg", "lu_", "cholesky", "triangular", "ormqr", "fft", "svd", "lstsq")


def mixed_devices() -> RuntimeError:
    """Return torch's own error for tensors on different devices."""
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        "tpu:0 and cpu!"
    )


def _input(tensor: Any) -> Any:
    # CPU scalars (0-dim tensors, and wrapped numbers, which arrive as numbers) go with any device.
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.get_device() < 0:
        if tensor.dim():
            raise mixed_devices()
        return tensor
    return unwrap(tensor)


def _lenient_input(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.get_device() < 0:
        return tensor
    return unwrap(tensor)


def _indexed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.get_device() < 0:  # CPU indices go with any device, but not the other way round
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    return unwrap(tensor)


def _written(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.get_device() < 0:
        raise mixed_devices()
    return unwrap(tensor)


def _lazy_input(tensor: Any) -> Any:
    # For the few operators that torch hands tensors with the lazy conjugate or negation bit set.
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.get_device() < 0:
        if tensor.dim():
            raise mixed_devices()
        return tensor
    return with_lazy_bits(unwrap(tensor), tensor)


def _lazy_written(tensor: torch.Tensor) -> torch.Tensor:
    return with_lazy_bits(_written(tensor), tensor)


def _output_argument(tensor: torch.Tensor) -> torch.Tensor:
    # An imported storage cannot be resized, so an empty `out=` is given memory of its own first.
    if tensor.get_device() < 0:
        raise mixed_devices()
    if tensor.numel() == 0:
        return torch.empty(0, dtype=tensor.dtype)
    return with_lazy_bits(unwrap(tensor), tensor)


def _lazy_wrap(tensor: torch.Tensor) -> torch.Tensor:
    return with_lazy_bits(wrap(tensor), tensor)


def _settle(tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
    # A kernel may conjugate its `out=` by a bit on the stand-in, which the tensor does not see.
    if stand_in.is_conj() != tensor.is_conj():
        torch.conj_physical_(unwrap(tensor))


def adopt(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Let a device tensor take over the memory, shape and strides of a CPU tensor, in place.

    Args:
        tensor: Tensor on the device.
        memory: CPU tensor; a stand-in for ``tensor`` itself, resized in place, is recognised.
    """
    if tensor.numel() and memory.untyped_storage().data_ptr() == tensor.data_ptr():
        # The same memory, only the shape changed. Adopting the stand-in's storage would free
        # the tensor's own, which the stand-in lives on.
        _set_storage(
            CPU_KEYS,
            tensor,
            tensor.untyped_storage(),
            tensor.storage_offset() + memory.storage_offset(),
            memory.shape,
            memory.stride(),
        )
    else:
        _set_tensor(CPU_KEYS, tensor, wrap(memory))


_set_tensor = redispatcher(torch.ops.aten.set_.source_Tensor)
_set_storage = redispatcher(torch.ops.aten.set_.source_Storage_storage_offset)


@functools.cache
def _keeps_lazy_bits() -> frozenset[str]:
    return registered_operators("Conjugate") | registered_operators("Negative")


def find_operator(name: str) -> OpOverload | None:
    """Return the operator of a qualified name such as ``aten::add.Tensor``, or None."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    found = getattr(packet, overload or "default", None)
    return found if isinstance(found, OpOverload) else None


def make_handler(operator: OpOverload) -> Callable[..., Any]:
    """Generate the function that runs an operator on the simulated device.

    Args:
        operator: Any operator for which torch has a CPU kernel.

    Returns:
        A kernel for the PrivateUse1 key.
    """
    if is_view(operator):
        return functools.partial(redispatcher(operator), CPU_KEYS)
    source, environment = _Source(operator).build()
    exec(compile(source, f"<tpu {operator}>", "exec"), environment)
    handler: Callable[..., Any] = environment["handler"]
    environment["self_"] = handler
    return handler


def with_modes(operator: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel that was written by hand follow the eager modes, as generated ones do."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        if modes.FLAGS.special:
            done = modes.intercept(operator, handler, args, kwargs)
            if done is not modes.GO:
                return done
        return kernel(*args, **kwargs)

    return handler


def lazy_handler(operator: OpOverload) -> Callable[..., Any]:
    """Return a kernel for the PrivateUse1 key that is generated at its first call.

    Args:
        operator: Any operator for which torch has a CPU kernel.

    Returns:
        A plain function, which replaces its own code and defaults by the generated ones.
    """
    if is_view(operator):
        return make_handler(operator)
    environment: dict[str, Any] = {}

    def materialise() -> Callable[..., Any]:
        source, names = _Source(operator).build()
        environment.update(names)
        exec(compile(source, f"<tpu {operator}>", "exec"), environment)
        generated = environment["handler"]
        # Code last: until then another thread runs the stub, which any defaults fit.
        function.__defaults__ = generated.__defaults__
        function.__kwdefaults__ = generated.__kwdefaults__
        function.__code__ = generated.__code__
        return generated  # type: ignore[no-any-return]

    environment["materialise"] = materialise
    function = types.FunctionType(_STUB, environment)
    environment["self_"] = function
    return function


def _stub(*args: Any, **kwargs: Any) -> Any:
    return materialise()(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


_STUB = _stub.__code__


def is_view(operator: OpOverload) -> bool:
    """Return whether an operator's result aliases an argument without writing to it."""
    if operator._opname in _UNDECLARED_VIEWS:
        return True
    returns = operator._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class _Source:
    """Builds one handler: the converted call, then the converted results."""

    def __init__(self, operator: OpOverload) -> None:
        self.operator = operator
        self.schema = operator._schema
        lenient = operator._opname in TAKES_CPU_TENSORS
        keeps_bits = operator.name() in _keeps_lazy_bits()
        self.lazy_results = keeps_bits or any(
            part in operator._opname for part in _RETURNS_LAZY_BITS
        )
        self.environment: dict[str, Any] = {
            "redispatch_": redispatcher(operator),
            "operator_": operator,
            "KEYS_": CPU_KEYS,
            "CPU_": _CPU_DEVICE,
            "Tensor_": torch.Tensor,
            "input_": _lazy_input if keeps_bits else _lenient_input if lenient else _input,
            "indexed_": _indexed,
            "written_": _lazy_written if keeps_bits else _written,
            "out_": _output_argument,
            "wrap_": _lazy_wrap if self.lazy_results else wrap,
            "settle_": _settle,
            "adopt_": adopt,
            "FLAGS_": modes.FLAGS,
            "intercept_": modes.intercept,
            "GO_": modes.GO,
        }
        self.body: list[str] = []
        self.written: dict[str, tuple[str, Any]] = {}  # argument -> (CPU stand-in, alias info)
        self.resizable: list[str] = []

    def build(self) -> tuple[str, dict[str, Any]]:
        parameters, call = self._arguments()
        lines = [*self._other_modes(parameters), *self.body, *self._results(call)]
        source = f"def handler({parameters}):\n    " + "\n    ".join(lines) + "\n"
        return source, self.environment

    @staticmethod
    def _other_modes(parameters: str) -> list[str]:
        names = [p.strip().partition("=")[0] for p in parameters.split(",") if p.strip()]
        keywords = "options" if "**options" in names else "{}"
        positional = "".join(f"{name}, " for name in names if name != "**options")
        return [
            "if FLAGS_.special:",
            f"    done_ = intercept_(operator_, self_, ({positional}), {keywords})",
            "    if done_ is not GO_: return done_",
        ]

    def _arguments(self) -> tuple[str, str]:
        positional = [a for a in self.schema.arguments if not a.kwarg_only]
        keywords = [a for a in self.schema.arguments if a.kwarg_only]
        # Everything behind the last positional argument that needs conversion passes as it came.
        last = max((i for i, a in enumerate(positional) if self._converts(a)), default=-1)
        parameters, values = [], []
        for argument in positional[: last + 1]:
            name = _name(argument.name)
            default = ""
            if argument.has_default_value():
                self.environment[f"default_{name}"] = argument.default_value
                default = f"=default_{name}"
            parameters.append(name + default)
            values.append(self._convert(argument, name))
        if len(positional) > last + 1:
            parameters.append("*rest")
            values.append("*rest")
        if keywords:
            parameters.append("**options")
            values.append("**options")
            for argument in keywords:
                self._convert_keyword(argument)
        return ", ".join(parameters), self._call(positional, values)

    def _call(self, positional: Sequence[Any], values: Sequence[str]) -> str:
        arguments = ", ".join(values)
        tensors = [_name(a.name) for a in positional if str(a.type) == "Tensor"]
        call = f"redispatch_(KEYS_, {arguments})" if arguments else "redispatch_(KEYS_)"
        if len(tensors) < 2:
            return call
        # A wrapped number reaches a Python kernel as a plain number. `redispatch_boxed` refuses it
        # in place of a tensor, the operator itself takes it.
        test = " and ".join(f"isinstance({name}, Tensor_)" for name in tensors)
        return f"{call} if {test} else operator_({arguments})"

    @staticmethod
    def _converts(argument: Any) -> bool:
        return "Tensor" in str(argument.type) or str(argument.type) in _DEVICES

    def _convert(self, argument: Any, name: str) -> str:
        kind = str(argument.type)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if kind == "Tensor" and writes:
            self._stand_in(argument, name)
            return f"cpu_{name}"
        if kind == "Tensor":
            takes_indices = argument.name == "self" and self.operator._opname in _INDEXING
            return f"indexed_({name})" if takes_indices else f"input_({name})"
        if kind == "Optional[Tensor]":
            return f"None if {name} is None else input_({name})"
        if kind == "List[Tensor]":
            convert = "written_" if writes else "input_"
            return f"[{convert}(x) for x in {name}]"
        if "Tensor" in kind:
            return f"{name} and [None if x is None else input_(x) for x in {name}]"
        return "CPU_" if kind in _DEVICES else name

    def _convert_keyword(self, argument: Any) -> None:
        name = _name(argument.name)
        if str(argument.type) in _DEVICES:
            self.body.append(f"options[{argument.name!r}] = CPU_")
        elif argument.name == "pin_memory":
            self.body.append("options.pop('pin_memory', None)")
        elif self._converts(argument):
            self.body.append(f"if {argument.name!r} in options:")
            self.body.append(f"    {name} = options[{argument.name!r}]")
            before = len(self.body)
            value = self._convert(argument, name)
            self.body[before:] = [f"    {line}" for line in self.body[before:]]
            self.body.append(f"    options[{argument.name!r}] = {value}")

    def _stand_in(self, argument: Any, name: str) -> None:
        convert = "out_" if argument.is_out else "written_"
        self.body.append(f"cpu_{name} = {convert}({name})")
        self.written[name] = (f"cpu_{name}", argument.alias_info)
        if argument.is_out:
            self.resizable.append(name)

    def _results(self, call: str) -> list[str]:
        returns = self.schema.returns
        adoptions = [f"if cpu_{n}.shape != {n}.shape: adopt_({n}, cpu_{n})" for n in self.resizable]
        if self.lazy_results:
            adoptions += [f"settle_({n}, cpu_{n})" for n in self.resizable]
        if not returns:
            return [call, *adoptions, "return None"]
        if len(returns) == 1:
            return [f"result = {call}", *adoptions, f"return {self._result(returns[0], 'result')}"]
        values = [self._result(r, f"result[{i}]") for i, r in enumerate(returns)]
        return [f"result = {call}", *adoptions, f"return ({', '.join(values)},)"]

    def _result(self, returned: Any, value: str) -> str:
        kind = str(returned.type)
        if returned.alias_info is not None and returned.alias_info.is_write:
            for name, (_, alias) in self.written.items():
                if alias.before_set & returned.alias_info.before_set:
                    return name  # the caller gets its own tensor back
        if kind == "Tensor":
            # Some kernels leave results undefined, which Python sees as None.
            many = len(self.schema.returns) > 1
            return f"None if {value} is None else wrap_({value})" if many else f"wrap_({value})"
        if kind == "List[Tensor]":
            return f"[wrap_(x) for x in {value}]"
        return value


_DEVICES = frozenset({"Device", "Optional[Device]"})


def _name(name: str) -> str:
    return f"{name}_" if keyword.iskeyword(name) or name in ("rest", "options", "result") else name
