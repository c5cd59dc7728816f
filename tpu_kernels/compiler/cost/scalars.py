"""Integer operands that steer a kernel: scalar-prefetch arrays and sizes of a dynamic grid.

How many grid steps a kernel runs, and which blocks it skips, may depend on values that the program
computes from its arguments (group offsets, page tables, mask blocks). `evaluate` computes just
those on the CPU, on demand, and nothing that does not feed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_kernels import _compat_jax
from tpu_kernels.compiler.cost.listing import Listing
from tpu_kernels.compiler.cost.translate import call_operands

_MAX_ELEMENTS = 1 << 20
_Thunk = Callable[[], Any]


class _NotKnown(Exception):
    """A value depends on an argument that only its shape is known of."""


@dataclass(frozen=True)
class KernelScalars:
    """What is known of one Pallas kernel's operands.

    Attributes:
        shapes: Each operand's shape as the compiler writes it, such as ``"s32[16]"``.
        values: The integer operands whose values could be computed, by operand number.
    """

    shapes: tuple[str, ...]
    values: Mapping[int, np.ndarray]


def evaluate(closed: Any, concrete: Mapping[int, np.ndarray]) -> list[KernelScalars]:
    """Compute the integer operands of the Pallas kernels in a traced function.

    Args:
        closed: Its jaxpr, closed over its constants.
        concrete: Values of those arguments that are known, by position.

    Returns:
        One record for each Pallas kernel that takes integers, in order of appearance.
    """
    import jax

    count = len(closed.jaxpr.invars)
    thunks = [_constant(concrete[i]) if i in concrete else _unknown for i in range(count)]
    records: list[KernelScalars] = []
    with jax.default_device(_compat_jax.cpu_device()):
        _Walk(records).run(closed.jaxpr, closed.consts, thunks)
    return records


def choose(listing: Listing, waiting: list[KernelScalars]) -> Mapping[int, np.ndarray]:
    """Find the record that belongs to a listing, by the shapes of its operands.

    Args:
        listing: Generated code of a kernel.
        waiting: Records not yet used; the one that is found is removed unless it is the last that
            fits.

    Returns:
        The values by operand number, empty if no record fits.
    """
    shapes = {
        index: shape for (index, output), (_, shape) in call_operands(listing).items() if not output
    }
    fitting = [
        record
        for record in waiting
        if all(
            index < len(record.shapes) and record.shapes[index] == shape
            for index, shape in shapes.items()
        )
    ]
    if not fitting:
        return {}
    if len(fitting) > 1:
        waiting.remove(fitting[0])
    return fitting[0].values


class _Walk:
    """Goes through a jaxpr with one thunk for each value."""

    def __init__(self, records: list[KernelScalars]) -> None:
        self.records = records

    def run(
        self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[_Thunk]
    ) -> list[_Thunk]:
        values: dict[Any, _Thunk] = {}
        values.update(zip(jaxpr.constvars, map(_constant, constants), strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def thunk(atom: Any) -> _Thunk:
            return _constant(atom.val) if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            inputs = [thunk(atom) for atom in equation.invars]
            outputs = self._equation(equation, inputs)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [thunk(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[_Thunk]) -> list[_Thunk]:
        if equation.primitive.name == "pallas_call":
            self._record(equation, inputs)
            return [_unknown] * len(equation.outvars)
        if equation.primitive.name == "scan":
            # A kernel in a loop over layers is steered by what does not change from turn to turn.
            body, constants = equation.params["jaxpr"], equation.params["num_consts"]
            unknown = [_unknown] * (len(inputs) - constants)
            self.run(body.jaxpr, body.consts, [*inputs[:constants], *unknown])
        inner = _compat_jax.called_jaxpr(equation)
        if inner is not None:
            jaxpr, constants = inner
            if len(jaxpr.invars) == len(inputs):
                return self.run(jaxpr, constants, inputs)
        results = _once(lambda: _compat_jax.evaluate_equation(equation, [i() for i in inputs]))
        return [_item(results, number) for number in range(len(equation.outvars))]

    def _record(self, equation: Any, inputs: list[_Thunk]) -> None:
        avals = [atom.aval for atom in equation.invars]
        values: dict[int, np.ndarray] = {}
        for number, (aval, value) in enumerate(zip(avals, inputs, strict=True)):
            if not np.issubdtype(aval.dtype, np.integer) or aval.size > _MAX_ELEMENTS:
                continue
            try:
                values[number] = np.asarray(value())
            except _NotKnown:
                continue
        self.records.append(KernelScalars(tuple(map(_shape_text, avals)), values))


def _shape_text(aval: Any) -> str:
    """Shape as XLA writes it: ``bf16[8,128]``."""
    name = aval.dtype.name
    for long, short in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "s"),
        ("bool", "pred"),
    ):
        if name.startswith(long):
            name = short + name.removeprefix(long).replace("_", "")
            break
    return f"{name}[{','.join(map(str, aval.shape))}]"


def _constant(value: Any) -> _Thunk:
    return lambda: value


def _unknown() -> Any:
    raise _NotKnown


def _once(compute: _Thunk) -> _Thunk:
    kept: list[Any] = []

    def get() -> Any:
        if not kept:
            kept.append(compute())
        return kept[0]

    return get


def _item(results: _Thunk, number: int) -> _Thunk:
    return lambda: results()[number]
