"""Runs an operator on tensors of the real TorchTPU: one StableHLO module per key.

As on the CPU (`tpu_kernels.backends.executor`), the function that torch's dispatcher calls is
generated from the operator's parameters: it forms the key, looks the program up, and hands the
tensors over. TorchTPU then runs the program, queues it, or (inside its compile backend) puts it
into the module that is being built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_torch_tpu as compat
from tpu_kernels.backends.call_source import key_parts
from tpu_kernels.backends.torch_tpu.programs import Maker, Program
from tpu_kernels.backends.torch_tpu.tracing import current_purpose, scoped_purpose
from tpu_kernels.dsl import dtypes
from tpu_kernels.dsl.spec import Kind, Parameter, ReturnKind
from tpu_kernels.errors import ArgumentError, DTypeError
from tpu_kernels.registry import config_table
from tpu_kernels.registry.engine import Engine, current_mode
from tpu_kernels.registry.layout import (
    Layout,
    fill,
    flat_names,
    freeze,
    is_empty,
    split,
    tensors_of,
)
from tpu_kernels.registry.operator import Operator, results_of, signature_source
from tpu_kernels.registry.programs import flat_outputs
from tpu_kernels.registry.shapes import Meta
from tpu_kernels.registry.tracing import explained

DEVICE = "tpu"

# Where the program's results are the operator's: one lookup, one call.
_PLAIN = """\
def implementation({signature}):
    {shapes}
    _key = ({key},)
    _program = _find(_key)
    if _program is None:
        return _run(_key, [{names}])
    _launch()
    try:
        return {result}
    except RuntimeError:
        _check_devices([{names}])
        raise
"""
_GENERAL = """\
def implementation({signature}):
    {shapes}
    _key = ({key},)
    return _run(_key, [{names}])
"""


class Executor:
    """The programs of one operator on TorchTPU's device.

    Args:
        operator: What to run.
        make: How programs are made of JAX functions: `programs.fast` or `programs.public`.
    """

    def __init__(self, operator: Operator, make: Maker) -> None:
        self.operator = operator
        self.make = make
        self.plain: dict[Any, Program] = {}
        self.plans: dict[Any, Plan] = {}
        self.lock = threading.RLock()
        config_table.watch(self)

    def forget_configs(self) -> None:
        """Drop all programs: other configurations may apply now."""
        with self.lock:
            self.plain.clear()
            self.plans.clear()

    def implementation(self) -> Callable[..., Any]:
        """The function to register with torch for TorchTPU's dispatch key."""
        definition = self.operator.definition
        parameters = definition.parameters
        env: dict[str, Any] = {
            "_find": self.plain.get,
            "_run": self.run,
            "_mode": current_mode,
            "_purpose": scoped_purpose,
            "_launch": self.operator.counters.launch,
            "_check_devices": self.check_devices,
            "_tuple": tuple,
            "_freeze": freeze,
        }
        inputs = ", ".join(_tensors(p) for p in parameters if p.kind.is_tensor)
        call = f"_program(inputs=[{inputs}])"
        several = len(definition.returns) > 1
        plain = [p.name for p in parameters if p.kind is Kind.TENSOR]
        source = (_PLAIN if self._is_plain() else _GENERAL).format(
            signature=signature_source(definition, env)[0],
            shapes="; ".join(f"_shape_{n} = {n}.shape; _dtype_{n} = {n}.dtype" for n in plain)
            or "pass",
            key=", ".join(
                ["_mode()", "_purpose()", *(k for p in parameters for k in key_parts(p))]
            ),
            names=", ".join(p.name for p in parameters),
            result=f"_tuple({call})" if several else f"{call}[0]",
        )
        exec(compile(source, f"<tpu_kernels executor of {definition.name}>", "exec"), env)
        return env["implementation"]  # type: ignore[no-any-return]

    def _is_plain(self) -> bool:
        definition = self.operator.definition
        return (
            bool(definition.returns)
            and not definition.mutated
            and all(kind is ReturnKind.TENSOR for kind in definition.returns)
            and not any(p.kind is Kind.DYNAMIC for p in definition.parameters)
        )

    def run(self, key: Any, arguments: list[Any]) -> Any:
        """Answer a call that the generated function could not: the first, or an unusual one."""
        plan = self.plans.get(key)
        if plan is None:
            with self.lock:
                plan = self.plans.get(key)
                if plan is None:
                    plan = self.plans[key] = self._plan(arguments)
                    if plan.program is not None and not plan.converts and self._is_plain():
                        self.plain[key] = plan.program
        return plan.run(arguments)

    def check_devices(self, arguments: list[Any]) -> None:
        """Raise if the tensors are not all on TorchTPU's device; names each."""
        _, tensors, _ = split(self.operator.definition.parameters, arguments)
        if any(t.device.type != DEVICE for t in tensors):
            raise self.operator.wrong_device(arguments)

    def _plan(self, arguments: list[Any]) -> Plan:
        operator = self.operator
        definition = operator.definition
        layout, tensors, _ = split(definition.parameters, arguments)
        self.check_devices(arguments)
        slots = operator.shapes(arguments)  # checks dtypes as well
        outputs = [meta for slot in slots for meta in _metas(slot)]
        self._refuse_packed([*(t.dtype for t in tensors), *(meta.dtype for meta in outputs)])
        if outputs and all(is_empty(meta.shape) for meta in outputs):
            return Plan(operator, slots, None, [], narrow=False)
        metas = [Meta(tuple(t.shape), t.dtype) for t in tensors]
        narrow = definition.int64 == "narrow_checked" and any(
            m.dtype in dtypes.NARROW for m in metas
        )
        if narrow:
            metas = [Meta(m.shape, dtypes.NARROW.get(m.dtype, m.dtype)) for m in metas]
        with explained(definition.kernel, definition.where, "tracing"):
            program, made = self._compile(layout, metas)
        operator.counters.compilation()
        return Plan(operator, slots, program, made, narrow=narrow)

    def _refuse_packed(self, used: Sequence[torch.dtype]) -> None:
        packed = next((dtype for dtype in used if dtype in dtypes.PACKED), None)
        if packed is not None:
            definition = self.operator.definition
            raise DTypeError(
                f"kernel {definition.kernel!r} has {packed} tensors, which TorchTPU cannot hold",
                where=definition.where,
                hint="hand over the bytes, tensor.view(torch.uint8), and bitcast in the kernel",
            )

    def _compile(self, layout: Layout, metas: Sequence[Meta]) -> tuple[Program, list[torch.dtype]]:
        operator = self.operator
        purpose = current_purpose()
        engine = Engine(
            interpret=purpose.interpret,
            x64=operator.definition.int64 == "exact",
            target=purpose.target.chip.name,
        )
        call = operator.call_of(layout, metas)
        program = operator.jax_function(call, engine)

        def flat(*arrays: Any) -> tuple[Any, ...]:
            tensors, scalars = arrays[: layout.count], arrays[layout.count :]
            return tuple(flat_outputs(program(*fill(layout, tensors), *scalars)))

        flat.__name__ = flat.__qualname__ = operator.opname
        avals = [*call.avals, *operator.dynamic_structs()]
        return self.make(operator.definition.name, flat, avals, purpose.target, engine.x64)


class Plan:
    """How the calls of one key are answered.

    Args:
        operator: What is called.
        slots: `Meta` of each result and then of each mutated argument, as a shape rule gives them.
        program: Computes the flat outputs; None where all of them are empty.
        made: Dtypes of the program's outputs.
        narrow: Whether 64-bit integers go in as 32 bits.
    """

    def __init__(
        self,
        operator: Operator,
        slots: Sequence[Any],
        program: Program | None,
        made: Sequence[torch.dtype],
        *,
        narrow: bool,
    ) -> None:
        self.operator = operator
        self.slots = slots
        self.program = program
        self.narrow = narrow
        declared = [meta.dtype for slot in slots for meta in _metas(slot)]
        self.converts = narrow or list(made) != declared

    def run(self, arguments: list[Any]) -> Any:
        """Run the operator."""
        definition = self.operator.definition
        outputs = iter(self._outputs(arguments))

        def take(slot: Any) -> Any:
            if isinstance(slot, list):
                return [take(meta) for meta in slot]
            if slot is None:
                return None
            tensor = next(outputs)
            return tensor if tensor.dtype is slot.dtype else tensor.to(slot.dtype)

        values = [take(slot) for slot in self.slots]
        by_name = dict(zip((p.name for p in definition.parameters), arguments, strict=True))
        for name, value in zip(definition.mutated, values[len(definition.returns) :], strict=True):
            for old, new in zip(tensors_of(by_name[name]), tensors_of(value), strict=True):
                old.copy_(new)
        return results_of(values[: len(definition.returns)])

    def _outputs(self, arguments: list[Any]) -> list[torch.Tensor]:
        if self.program is None:
            return [
                torch.empty(meta.shape, dtype=meta.dtype, device=DEVICE)
                for slot in self.slots
                for meta in _metas(slot)
            ]
        parameters = self.operator.definition.parameters
        layout, tensors, dynamics = split(parameters, arguments)
        if self.narrow:
            names = flat_names(parameters, layout)
            tensors = [self._narrowed(n, t) for n, t in zip(names, tensors, strict=True)]
        self.operator.counters.launch()
        return self.program(inputs=[*tensors, *map(_scalar, dynamics)])

    def _narrowed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        narrow = dtypes.NARROW.get(tensor.dtype)
        if narrow is None:
            return tensor
        # A graph that is being built has no values; the eager call that debugs it checks them.
        if tensor.numel() and not compat.is_tracing():
            limits = torch.iinfo(narrow)
            low, high = int(tensor.min()), int(tensor.max())
            if low < limits.min or high > limits.max:
                definition = self.operator.definition
                raise ArgumentError(
                    f"kernel {definition.kernel!r}: argument {name!r} holds values out of the "
                    f"range of {str(narrow).removeprefix('torch.')} ({low} to {high})",
                    where=definition.where,
                    hint="the kernel declares int64='narrow_checked'; int64='exact' keeps 64 bits",
                )
        return tensor.to(narrow)


def _scalar(value: Any) -> torch.Tensor:
    """A number as the 0-d array that a dynamic parameter is: one program serves all values."""
    dtype = {bool: torch.bool, int: torch.int32, float: torch.float32}[type(value)]
    if compat.is_tracing():  # a module can only read what it computes or is given
        return torch.full((), value, dtype=dtype, device=DEVICE)
    # A transfer; `torch.full` would compile a program for each value.
    return torch.tensor(value, dtype=dtype).to(DEVICE)


def _metas(slot: Any) -> list[Meta]:
    return [] if slot is None else slot if isinstance(slot, list) else [slot]


def _tensors(p: Parameter) -> str:
    """Source text of a tensor parameter's part of the flat list."""
    name = p.name
    if p.kind is Kind.TENSOR:
        return name
    if p.kind is Kind.OPTIONAL:
        return f"*(() if {name} is None else ({name},))"
    if p.kind is Kind.LIST:
        return f"*{name}"
    return f"*(_t for _t in {name} or () if _t is not None)"
