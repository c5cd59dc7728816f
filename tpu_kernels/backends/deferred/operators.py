"""Which operators can be recorded, and what one call of an operator looks like.

A call is known by a key: the operator, the sizes, strides, offsets and dtypes of its tensors, and
its other arguments except floats. The first call of each key runs as in strict mode; what its
results look like is remembered, so that later calls can be answered without computing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_kernels import _compat_torch as compat
from tpu_kernels._compat_torch import storage_id
from tpu_kernels.backends.deferred import geometry
from tpu_kernels.backends.device import bounds
from tpu_kernels.registry import backend_table

DTYPES = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.bool}
)  # fmt: skip

# They look at a tensor's sizes only; so they need not wait for its values.
SHAPE_ONLY = frozenset(
    {"empty_like", "new_empty", "new_empty_strided", "rand_like", "randn_like", "randint_like",
     "new_zeros", "new_ones", "new_full"}
)  # fmt: skip
# They write to running statistics without saying so, or allocate, or are no functions of values.
_NEVER = ("batch_norm", "empty", "resize", "set_", "moving_avg", "record_stream", "lift", "rrelu")
_VALUE_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its storage.

    Attributes:
        shape: Sizes.
        stride: Strides.
        offset: First element.
        dtype: Dtype.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Elements that a storage of nothing else has."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


class Place:
    """Stands for a tensor (or a float) among a call's arguments.

    Args:
        index: Which one of them.
    """

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Number(Place):
    """Stands for a float."""

    __slots__ = ()


_numbers = itertools.count()


class Entry:
    """What is known of the calls of one key.

    Attributes:
        number: Identifies it in this process.
        info: The operator.
        args: Its arguments, with `Place` and `Number` for tensors and floats.
        kwargs: Its keyword arguments.
        inputs: Geometry of each tensor among the arguments.
        written: Which tensors it writes to.
        outputs: Geometry of each new result; None for one that is not there.
        sizes: Elements and bytes of each new result.
        form: How the results are returned: ``"one"``, ``"list"``, ``"tuple"``, ``"self"``,
            ``"nothing"``.
        refused: Why its calls cannot be recorded, None if they can.
        checked: Whether its indices are checked when it runs.
        told: Whether it can still go wrong when it runs, so that its line is kept.
        dtypes: Dtype of each tensor among the arguments.
    """

    __slots__ = (
        "args", "checked", "dtypes", "form", "info", "inputs", "kwargs", "number", "outputs",
        "refused", "sizes", "told", "written",
    )  # fmt: skip

    def __init__(self, info: Info, call: Call) -> None:
        self.number = next(_numbers)
        self.info = info
        self.args, self.kwargs = call.template()
        tensors: Sequence[Any] = call.tensors  # their sizes are no symbols
        self.inputs = tuple(
            Geometry(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype) for t in tensors
        )
        self.written: tuple[int, ...] = ()
        self.outputs: tuple[Geometry | None, ...] = ()
        self.form = "nothing"
        self.sizes: tuple[tuple[int, int], ...] = ()
        self.refused: str | None = None
        self.checked = info.checked
        self.told = info.checked or info.kernel is not None
        self.dtypes = tuple(place.dtype for place in self.inputs)


class Info:
    """What is known of an operator.

    Args:
        op: The operator.
        functional: The operator that computes what this one writes, itself if it writes nothing.
        writes: Positions of the arguments that it writes to.
        kernel: The `Operator` of `tpu_kernels` behind it, if there is one.
    """

    def __init__(
        self, op: OpOverload, functional: OpOverload | None, writes: tuple[int, ...], kernel: Any
    ) -> None:
        self.op = op
        self.functional = functional
        self.writes = writes
        self.kernel = kernel
        self.checked = bounds.has_indices(op._opname) if op.namespace == "aten" else False
        self.entries: dict[Any, Entry] = {}


def info_of(op: OpOverload) -> Info | str | None:
    """What is known of an operator: ``"shape"`` if it looks at sizes only, None if its calls
    cannot be recorded."""
    name = op._opname
    if op.namespace == "aten" and name in SHAPE_ONLY:
        return "shape"
    if any(tag in op.tags for tag in _VALUE_TAGS) or any(part in name for part in _NEVER):
        return None
    schema = compat.schema_of(op)
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return None
    if any(str(r.type) not in ("Tensor", "List[Tensor]") for r in schema.returns):
        return None
    if any(a.is_out for a in schema.arguments):
        return None
    if op.namespace != "aten":
        kernel = backend_table.operator_of(op)
        if kernel is None or kernel.definition.mutated or kernel.definition.donated:
            return None
        return Info(op, op, (), kernel)
    writes = tuple(
        i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    if op is torch.ops.aten.copy_.default:
        return Info(op, None, writes, None)
    functional = _functional(op) if writes else op
    if functional is None or not _lowers(functional):
        return None
    return Info(op, functional, writes, None)


def _functional(op: OpOverload) -> OpOverload | None:
    packet = getattr(torch.ops.aten, op._opname.rstrip("_"), None)
    found = getattr(packet, op._overloadname, None)
    if not isinstance(found, OpOverload) or compat.schema_of(found).is_mutable:
        return None
    own = [a.name for a in compat.schema_of(op).arguments]
    return found if [a.name for a in compat.schema_of(found).arguments] == own else None


def _lowers(op: OpOverload) -> bool:
    from tpu_kernels.lowering import decompositions, rules

    if rules.find(op) is not None or op in decompositions.table():
        return True
    return compat.can_decompose(op)


class Unrecordable(Exception):
    """An argument of a kind that cannot be recorded."""


_PLAIN = frozenset(
    {bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device}
)


class Call:
    """A call's arguments, taken apart.

    Attributes:
        key: Everything but tensors' values and floats.
        tensors: The tensors, in order.
        floats: The floats, in order.
    """

    __slots__ = ("_args", "_kwargs", "floats", "key", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.tensors: list[torch.Tensor] = []
        self.floats: list[float] = []
        parts: list[Any] = []
        for value in args:
            self._add(value, parts)
        for name, value in kwargs.items():
            parts.append(name)
            self._add(value, parts)
        self.key = tuple(parts)

    def _add(self, value: Any, parts: list[Any]) -> None:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self.tensors.append(value)
            parts += (
                value.shape, value.stride(), value.storage_offset(), value.dtype,
                value.get_device(),
            )  # fmt: skip
        elif kind is int:
            parts.append(value)
        elif kind is float:
            self.floats.append(value)
            parts.append(float)
        elif kind in _PLAIN:
            parts += (kind, value)
        elif isinstance(value, (list, tuple)):
            parts += (list, len(value))
            for each in value:
                self._add(each, parts)
        else:
            raise Unrecordable

    def template(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `Place` and `Number` for tensors and floats."""
        tensors, floats = itertools.count(), itertools.count()

        def stand_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return Place(next(tensors))
            if type(value) is float:
                return Number(next(floats))
            if isinstance(value, (list, tuple)):
                return [stand_in(each) for each in value]
            return value

        args = tuple(stand_in(value) for value in self._args)
        return args, {name: stand_in(value) for name, value in self._kwargs.items()}


def fill(value: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Arguments with values for `Place` and `Number`."""
    if type(value) is Place:
        return tensors[value.index]
    if type(value) is Number:
        return numbers[value.index]
    if isinstance(value, list):
        return [fill(each, tensors, numbers) for each in value]
    return value


def learn(info: Info, call: Call, run: Callable[[], Any]) -> tuple[Entry, Any]:
    """Run the first call of a key, and remember what its results look like.

    Args:
        info: The operator.
        call: The call.
        run: Runs it as in strict mode.

    Returns:
        The entry, and the call's result.
    """
    entry = Entry(info, call)
    result = run()
    entry.refused = _fill(entry, call, result)
    info.entries[call.key] = entry
    return entry, result


def _fill(entry: Entry, call: Call, result: Any) -> str | None:
    """Complete an entry; returns why its calls cannot be recorded, if so."""
    if not any(t.get_device() >= 0 for t in call.tensors):
        return "no tensor of the device"
    for tensor, place in zip(call.tensors, entry.inputs, strict=True):
        if tensor.get_device() < 0 and tensor.dim():
            return "a tensor on the CPU"
        if (reason := _unusable(tensor, place)) is not None:
            return reason
    entry.written = tuple(_written(entry.args, entry.info.writes))
    for index in entry.written:
        place = entry.inputs[index]
        if call.tensors[index].get_device() < 0:
            return "it writes to a tensor on the CPU"
        if geometry.view(place.shape, place.stride, place.offset, writable=True) is None:
            return "it writes to a view that programs cannot express"
    if len({storage_id(call.tensors[i]) for i in entry.written}) != len(entry.written):
        return "it writes to the same memory twice"
    if entry.info.writes:
        entry.form = "self" if isinstance(result, torch.Tensor) else "nothing"
        return None
    if isinstance(result, torch.Tensor):
        entry.form, results = "one", [result]
    elif isinstance(result, (list, tuple)):
        entry.form, results = ("list" if isinstance(result, list) else "tuple"), list(result)
    else:
        return "a result that is no tensor"
    given = {storage_id(t) for t in call.tensors}
    outputs: list[Geometry | None] = []
    for tensor in results:
        if tensor is None:
            outputs.append(None)
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.get_device() < 0:
            return "a result that is no tensor of the device"
        place = Geometry(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype)
        sid = storage_id(tensor)
        if sid in given or tensor.storage_offset():
            return "a result that shares memory"
        if (reason := _unusable(tensor, place)) is not None:
            return reason
        if not geometry.is_dense(place.shape, place.stride):
            return "a result with gaps in memory"
        given.add(sid)
        outputs.append(place)
    entry.outputs = tuple(outputs)
    entry.sizes = tuple(
        (0, 0) if p is None else (p.count, p.count * p.dtype.itemsize) for p in outputs
    )
    return None


def _unusable(tensor: torch.Tensor, place: Geometry) -> str | None:
    if place.dtype not in DTYPES:
        return f"a tensor of {place.dtype}"
    if tensor.numel() == 0:
        return "an empty tensor"
    if tensor.is_neg() or tensor.layout is not torch.strided:
        return "a lazily negated tensor"
    if geometry.view(place.shape, place.stride, place.offset) is None:
        return "a view that programs cannot express"
    return None


def _written(args: Sequence[Any], positions: Sequence[int]) -> list[int]:
    found: list[int] = []
    for position in positions:
        value = args[position]
        for each in value if isinstance(value, list) else [value]:
            if type(each) is Place:
                found.append(each.index)
    return found
