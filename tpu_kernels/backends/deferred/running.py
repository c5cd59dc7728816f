"""Runs a queue: as one program if its like has been seen before, else operator by operator.

Programs are known by structure: the signatures of nodes, the sizes of given storages, and which
results are still wanted. A structure is compiled when it comes for the second time, so that code
that runs once costs no compilation. Floats are constants of a program until one changes between
two runs; from then on it is an argument.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels import _compat_jax, _compat_torch
from tpu_kernels.backends import bridges
from tpu_kernels.backends.deferred import operators, programs
from tpu_kernels.backends.deferred.placeholder import address_of, flat_cpu, give_memory
from tpu_kernels.backends.device.capsule import unwrap, wrap
from tpu_kernels.backends.device.handlers import CPU_KEYS
from tpu_kernels.backends.device.integers import INTEGERS
from tpu_kernels.errors import BoundsError, KernelError
from tpu_kernels.registry import config_table

if TYPE_CHECKING:
    from tpu_kernels.backends.deferred.queue import Node, Queue, Slot

log = logging.getLogger("tpu_kernels.deferred")

PROGRAMS = 256
"""Structures that are remembered; the oldest leave."""

_CPU = torch.device("cpu")
_ALIGNMENT = 64


@dataclasses.dataclass
class DeferredStats:
    """What deferred mode has done in this process.

    Attributes:
        recorded: Calls that were recorded.
        runs: Times that recorded calls were run.
        fused: Of those, the runs of a compiled program.
        compilations: Programs compiled.
    """

    recorded: int = 0
    runs: int = 0
    fused: int = 0
    compilations: int = 0


stats = DeferredStats()


def deferred_stats() -> DeferredStats:
    """Return what deferred mode has done in this process.

    Returns:
        A copy of the counts.

    Example:
        >>> import torch, tpu_kernels.device
        >>> deferred_stats().recorded >= 0
        True
    """
    return dataclasses.replace(stats)


class Structure:
    """What is known of queues that look alike.

    Attributes:
        floats: Their floats when one was last compiled or seen.
        varying: Positions of floats that have changed.
        program: The compiled program, None if there is none yet.
        refused: Whether it cannot be compiled.
    """

    __slots__ = ("floats", "program", "refused", "varying")

    def __init__(self, floats: array.array[float]) -> None:
        self.floats = floats
        self.varying: frozenset[int] = frozenset()
        self.program: programs.Program | None = None
        self.refused = False


_structures: dict[Any, Structure] = {}


class _Forget:
    """Programs hold the configurations of kernels that were in force."""

    def forget_configs(self) -> None:
        _structures.clear()


_forget = _Forget()
config_table.watch(_forget)


def prepare(queue: Queue) -> Callable[[], None]:
    """Decide how a queue is run, and compile what has to be.

    Returns:
        What runs it, and puts the results into their places.
    """
    nodes, order = queue.nodes, queue.order
    wanted = tuple(
        [
            slot.index
            for slot in order
            if (slot.written if slot.weak is None else not torch.UntypedStorage._expired(slot.weak))
        ]
    )
    stats.runs += 1
    given = tuple([(s.index, s.count, s.dtype) for s in order if s.weak is None])
    key = (tuple([node.signature for node in nodes]), given, wanted)
    floats = array.array("d")
    for node in nodes:
        if node.floats:
            floats.extend(node.floats)
    structure = _structures.get(key)
    if structure is None:
        if len(_structures) >= PROGRAMS:
            _structures.pop(next(iter(_structures)))
        _structures[key] = Structure(floats)
        return lambda: _one_by_one(nodes, order, wanted)
    if structure.refused or _compat_jax.client_is_inherited():
        return lambda: _one_by_one(nodes, order, wanted)
    program = _program(structure, floats, nodes, order, wanted)
    if program is None:
        return lambda: _one_by_one(nodes, order, wanted)
    return lambda: _fused(program, floats, nodes, order)


def _program(
    structure: Structure,
    floats: array.array[float],
    nodes: list[Node],
    order: list[Slot],
    wanted: tuple[int, ...],
) -> programs.Program | None:
    """The program of a structure for these floats; None if it cannot be made."""
    if floats.tobytes() != structure.floats.tobytes():
        changed = {
            i
            for i, (a, b) in enumerate(zip(floats, structure.floats, strict=True))
            if a != b and not (a != a and b != b)
        }
        if not changed <= structure.varying:
            structure.varying |= changed
            structure.program = None
        structure.floats = floats
    if structure.program is None:
        try:
            structure.program = programs.build(nodes, order, wanted, structure.varying)
        except programs.CannotLower as error:
            for entry, reason in error.reasons:
                entry.refused = reason
                log.debug("%s is not recorded any more: %s", entry.info.op, reason)
            structure.refused = True
            return None
        stats.compilations += 1
    return structure.program


# ---------------------------------------------------------------------- as one program
def _fused(
    program: programs.Program, floats: array.array[float], nodes: list[Node], order: list[Slot]
) -> None:
    # A storage's array may only be used as long as the storage is held, which slots see to.
    inputs = [order[i] for i in program.inputs]
    arrays = [_import(slot.held, slot.dtype) for slot in inputs]
    results, flags = program.run(arrays, [floats[i] for i in program.numbers])
    if flags is not None and flags.any():
        raise _out_of_bounds(nodes[program.checks[int(flags.argmax())]])
    for index, result in zip(program.outputs, results, strict=True):
        _deliver(order[index], result)
    for launch in program.launches:
        launch()
    stats.fused += 1


def _deliver(slot: Slot, result: Any) -> None:
    """Put a program's result into its place: a copy where memory existed before, since others may
    look at it; else the result's own memory."""
    storage = slot.storage()
    if storage is None:
        return
    if slot.weak is None:
        ctypes.memmove(address_of(storage), result.unsafe_buffer_pointer(), storage.nbytes())
    else:
        give_memory(storage, bridges.to_torch("tpu")(result))


# Arrays of storages that outlive a run, by storage: (weak reference, address, array). An array
# does not keep its storage alive.
_imported: dict[int, tuple[int, int, int, torch.dtype, Any]] = {}
_sweep_at = 4096


def _import(held: Any, dtype: torch.dtype) -> Any:
    """A storage's elements (or a number on the CPU) as a JAX array without a copy."""
    if isinstance(held, torch.Tensor):
        return _array(held.reshape(1))
    storage = held
    sid, address, size = storage._cdata, address_of(storage), storage.nbytes()
    known = _imported.get(sid)
    if known is not None:
        weak = known[0]
        if known[1:4] == (address, size, dtype) and not torch.UntypedStorage._expired(weak):
            return known[4]
        del _imported[sid]
        torch.UntypedStorage._free_weak_ref(weak)
    found = _array(flat_cpu(storage, dtype))
    if address % _ALIGNMENT == 0:  # else it is a copy
        _sweep()
        _imported[sid] = (storage._weak_ref(), address, size, dtype, found)
    return found


def _array(tensor: torch.Tensor) -> Any:
    return _compat_jax.import_capsule(_compat_torch.to_dlpack(tensor), _compat_jax.cpu_device())


def _sweep() -> None:
    """Drop arrays of storages that are gone, at times."""
    global _sweep_at
    if len(_imported) < _sweep_at:
        return
    for sid, (weak, *_) in list(_imported.items()):
        if torch.UntypedStorage._expired(weak):
            del _imported[sid]
            torch.UntypedStorage._free_weak_ref(weak)
    _sweep_at = max(4096, 2 * len(_imported))


def _out_of_bounds(node: Node) -> KernelError:
    return BoundsError(
        f"{node.entry.info.op.name()}: an index is out of bounds",
        where=node.where,
        hint="deferred mode found it when a value was needed; strict mode raises at the call",
    )


# ---------------------------------------------------------------------- one by one
def _one_by_one(nodes: list[Node], order: list[Slot], wanted: tuple[int, ...]) -> None:
    """Run each call with torch's CPU kernel."""
    bases: dict[int, torch.Tensor] = {}
    # Which node is the last to use a slot that nobody wants: its memory is free after that.
    last: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for index in (*node.slots, *node.made):
            last[index] = position
    keep = set(wanted)
    for slot in order:
        if slot.weak is None:
            number = isinstance(slot.held, torch.Tensor)
            bases[slot.index] = slot.held if number else flat_cpu(slot.held, slot.dtype)
    try:
        for position, node in enumerate(nodes):
            _run(node, bases)
            for index in (*node.slots, *node.made):
                if last[index] == position and index not in keep and order[index].weak is not None:
                    bases.pop(index, None)
    finally:
        # What was computed before an operator that fails has its value, as in strict mode.
        for index in wanted:
            slot = order[index]
            if slot.weak is not None and index in bases:
                storage = slot.storage()
                if storage is not None:
                    give_memory(storage, wrap(bases[index]))
                    torch.UntypedStorage._free_weak_ref(slot.weak)
                    slot.weak = None


def _run(node: Node, bases: dict[int, torch.Tensor]) -> None:
    entry = node.entry
    tensors = [
        bases[index].as_strided(place.shape, place.stride, place.offset)
        for index, place in zip(node.slots, entry.inputs, strict=True)
    ]
    args = tuple([_on_cpu(operators.fill(value, tensors, node.floats)) for value in entry.args])
    kwargs = {
        name: _on_cpu(operators.fill(value, tensors, node.floats))
        for name, value in entry.kwargs.items()
    }
    try:
        result = _call(entry.info, args, kwargs)
    except Exception as error:
        error.add_note(
            f"{entry.info.op.name()} was recorded by deferred mode"
            + (f" at {node.where}" if node.where else "")
        )
        raise
    if entry.info.writes:
        return
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    made = iter(node.made)
    for place, value in zip(entry.outputs, results, strict=True):
        if place is not None:
            bases[next(made)] = _as_recorded(value, place)


def _call(info: operators.Info, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if info.kernel is not None:
        return info.kernel.on_cpu(*args, **kwargs)
    by_hand = INTEGERS.get(info.op.name())
    if by_hand is not None:  # the device takes what the CPU's kernel does not
        device: list[Any] = [
            wrap(value) if isinstance(value, torch.Tensor) else value for value in args
        ]
        return unwrap(by_hand(*device, **kwargs))
    wrapped = any(
        str(a.type) == "Tensor" and not isinstance(value, torch.Tensor)
        for a, value in zip(_compat_torch.schema_of(info.op).arguments, args, strict=False)
    )
    if wrapped:  # a number in place of a tensor, which only the operator itself takes
        return info.op(*args, **kwargs)
    return _compat_torch.redispatcher(info.op)(CPU_KEYS, *args, **kwargs)


def _on_cpu(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device) else value


def _as_recorded(value: torch.Tensor, place: operators.Geometry) -> torch.Tensor:
    """A result with memory of its own that lies as was announced."""
    if (
        value.stride() == place.stride
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() == place.count * place.dtype.itemsize
        and not value.is_conj()
        and not value.is_neg()
    ):
        return value
    found = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=_CPU)
    return found.copy_(value)
