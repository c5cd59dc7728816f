"""What a thread has recorded and not run yet.

A queue knows *slots*: storages that its nodes read or write. A slot is *fresh* if a node makes it
(the caller holds a placeholder, the queue only a weak reference: what dies before the queue runs
is never computed for its own sake) or *given* if its memory existed before. Nodes refer to slots by
number, so equal code records equal nodes, whatever tensors it runs on.

One lock serves all queues. Whoever touches a storage from outside (`settle`) runs the queue first.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from tpu_kernels._compat_torch import storage_id
from tpu_kernels.backends.deferred import running
from tpu_kernels.backends.deferred.operators import Call, Entry
from tpu_kernels.backends.deferred.placeholder import placeholder
from tpu_kernels.backends.device import capsule
from tpu_kernels.backends.device.user_line import user_line
from tpu_kernels.errors import DeferredError

LOCK = threading.RLock()
LIMIT = 5000
"""Nodes after which a queue runs by itself."""

_MOST_LOST = 10000
LOST: dict[int, tuple[int, str]] = {}
"""Weak reference and reason by storage, for placeholders that will never get a value."""


class Slot:
    """A storage that a queue knows.

    Attributes:
        index: Its number in the queue.
        dtype: Of its elements.
        count: How many elements it has.
        weak: For a fresh slot, the weak reference to its storage; None for a given one.
        held: For a given slot, the storage, since a tensor may be given another one (`set_`); for
            a number on the CPU, a tensor.
        written: Whether a node writes to it after it was made.
    """

    __slots__ = ("count", "dtype", "held", "index", "weak", "written")

    def __init__(
        self, index: int, dtype: torch.dtype, count: int, weak: int | None, held: Any
    ) -> None:
        self.index = index
        self.dtype = dtype
        self.count = count
        self.weak = weak
        self.held = held
        self.written = False

    def storage(self) -> Any:
        """The storage, None if nobody holds it any more."""
        if self.weak is None:
            return self.held
        return torch.UntypedStorage._new_with_weak_ptr(self.weak)


class Node:
    """One recorded call.

    Attributes:
        signature: The entry's number and the numbers of its slots: given, written, made.
        entry: What is known of such calls.
        slots: Numbers of its tensors' slots, in order.
        made: Numbers of its results' slots.
        floats: The floats among its arguments.
        where: The user's line, where the call can still go wrong.
    """

    __slots__ = ("entry", "floats", "made", "signature", "slots", "where")

    def __init__(
        self,
        entry: Entry,
        slots: list[int],
        made: list[int],
        floats: list[float],
        where: str | None,
    ) -> None:
        self.entry = entry
        self.slots = slots
        self.made = made
        self.floats = floats
        self.where = where
        self.signature = (entry.number, *slots, *made)


class Queue:
    """The recorded calls of one thread and of the backward passes that it starts."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.order: list[Slot] = []
        self.nodes: list[Node] = []
        self.running = False

    # ------------------------------------------------------------------ recording
    def record(self, entry: Entry, call: Call) -> Any:
        """Record a call; returns what the operator returns, or None if it cannot be done."""
        known, order = self.slots, self.order
        found: list[Slot] = []
        for tensor, dtype in zip(call.tensors, entry.dtypes, strict=True):
            slot = known.get(storage_id(tensor)) or self._given(tensor)
            if slot is None or slot.dtype is not dtype:
                return NotImplemented
            found.append(slot)
        for index in entry.written:
            self._claim(call.tensors[index])
        results: list[torch.Tensor | None] = []
        made: list[int] = []
        for place, (count, nbytes) in zip(entry.outputs, entry.sizes, strict=True):
            if place is None:
                results.append(None)
                continue
            tensor, storage = placeholder(place, nbytes)
            slot = Slot(len(order), place.dtype, count, storage._weak_ref(), None)
            order.append(slot)
            known[storage._cdata] = slot
            made.append(slot.index)
            results.append(tensor)
        slots = [slot.index for slot in found]
        where = user_line() if entry.told else None
        node = Node(entry, slots, made, call.floats, where)
        for index in entry.written:
            found[index].written = True
        self.nodes.append(node)
        capsule.ACTIVE[id(self)] = self
        if len(self.nodes) >= LIMIT:
            self.flush()
        if entry.form == "one":
            return results[0]
        if entry.form == "self":
            return call.tensors[entry.written[0]]
        if entry.form == "nothing":
            return None
        return results if entry.form == "list" else tuple(results)

    def _given(self, tensor: torch.Tensor) -> Slot | None:
        """Enter a storage that exists; None if this queue cannot have it."""
        if tensor.get_device() < 0:
            copy = tensor.detach().clone()  # a number, whose tensor may change
            slot = Slot(len(self.order), tensor.dtype, 1, None, copy)
            self.order.append(slot)
            return slot
        self._claim(tensor, written=False)
        storage = tensor.untyped_storage()
        count, rest = divmod(storage.nbytes(), tensor.dtype.itemsize)
        if rest:
            return None
        slot = Slot(len(self.order), tensor.dtype, count, None, storage)
        self.order.append(slot)
        self.slots[storage._cdata] = slot
        return slot

    def _claim(self, tensor: torch.Tensor, *, written: bool = True) -> None:
        """Let other queues finish with a storage that this one reads or writes."""
        if len(capsule.ACTIVE) > 1 or (capsule.ACTIVE and id(self) not in capsule.ACTIVE):
            sid = storage_id(tensor)
            for other in tuple(capsule.ACTIVE.values()):
                slot = other.slots.get(sid) if other is not self else None
                if slot is not None and (written or slot.written or slot.weak is not None):
                    other.flush()

    # ------------------------------------------------------------------ running
    def settle(self, storage: int) -> None:
        """Run the queue if it knows a storage."""
        with LOCK:  # another thread may be putting results into their places
            if storage in self.slots:
                self.flush()

    def flush(self) -> None:
        """Run what was recorded.

        Raises:
            Exception: What the first operator raised that failed; its results, and those of what
                was recorded after it, are lost.
        """
        with LOCK:
            if self.running:
                return
            if not self.nodes:
                self._clear()
                return
            self.running = True
            try:
                run = running.prepare(self)  # may be interrupted: nothing has changed yet
                with _uninterrupted():
                    try:
                        run()
                    except BaseException as error:
                        self._lose(error)
                        raise
                    finally:
                        self._clear()
            finally:
                self.running = False

    def _lose(self, error: BaseException) -> None:
        """Remember for placeholders that did not get a value why."""
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if len(LOST) > _MOST_LOST:
            forget_dead()
        for sid, slot in self.slots.items():
            if slot.weak is not None and not torch.UntypedStorage._expired(slot.weak):
                LOST[sid] = (slot.weak, reason)
                slot.weak = None  # the reference now belongs to the table
        if LOST:
            capsule.ACTIVE[id(LOST)] = _Lost()

    def _clear(self) -> None:
        order, self.order, self.nodes, self.slots = self.order, [], [], {}
        capsule.ACTIVE.pop(id(self), None)
        for slot in order:
            if slot.weak is not None:
                torch.UntypedStorage._free_weak_ref(slot.weak)


def check_lost(storage: int) -> None:
    """Raise for a storage whose value was lost.

    Raises:
        DeferredError: It was; names the failure.
    """
    found = LOST.get(storage)
    if found is not None and not torch.UntypedStorage._expired(found[0]):
        raise DeferredError(
            "this tensor has no value: an operator that was recorded before it failed",
            hint=f"it raised {found[1]}",
        )


class _Lost:
    """Stands among the active queues for storages whose value was lost."""

    slots: ClassVar[dict[int, Slot]] = {}

    def settle(self, storage: int) -> None:
        """Raise for a storage whose value was lost."""
        check_lost(storage)

    def flush(self) -> None:
        """Do nothing."""


def forget_dead() -> None:
    """Drop what is remembered of storages that nobody holds any more."""
    for sid, (weak, _) in list(LOST.items()):
        if torch.UntypedStorage._expired(weak):
            del LOST[sid]
            torch.UntypedStorage._free_weak_ref(weak)
    if not LOST:
        capsule.ACTIVE.pop(id(LOST), None)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until results are in their places; other threads get none anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None or not callable(before):  # set from outside of Python, or ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])
