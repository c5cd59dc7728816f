"""Which overrides hold where, and in which order: of the process, of each thread, per site.

An activation is a pair ``(serial, override)``; serials grow, so that a larger one was activated
later. The chain of a site is what a call walks through: by priority, then latest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels import _compat_torch as compat
from tpu_kernels.registry.engine import current_mode
from tpu_kernels.registry.overrides.targets import Site, qualified

if TYPE_CHECKING:
    from tpu_kernels.registry.overrides.handle import Override
    from tpu_kernels.registry.overrides.report import Recorder

SCOPE_KEY = "tpu_kernels.overrides"
UNSAID = "the predicate said no"  # the reason where a predicate gives none
LOCK = threading.RLock()

Activation = tuple[int, "Override"]


@dataclasses.dataclass(slots=True)
class Link:
    """One override as seen from one site.

    Attributes:
        override: Where the call is counted.
        when: The predicate, called with the operator's arguments; None accepts always.
        run: The implementation, adapted to the site (writes into ``out``, borrows a backward, ...).
        skip: The overrides that a call from inside ``run`` must not reach: this one and those
            before it.
    """

    override: Override
    when: Callable[..., Any] | None
    run: Callable[..., Any]
    skip: frozenset[Override]


Chain = tuple[Link, ...]


class Slot:
    """A site whose kernel is replaced at the moment.

    Attributes:
        site: The overload and the dispatch key.
        original: ``original(keyset, *args, **kwargs)`` runs the kernel that was there before.
        chain: The chain that threads without scopes of their own see.
        users: How many activations need the replacement.
    """

    __slots__ = ("chain", "library", "original", "site", "users")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.original: Callable[..., Any] = _not_installed
        self.chain: Chain = ()
        self.library: torch.library.Library | None = None
        self.users = 0


def _not_installed(*_: Any, **__: Any) -> Any:
    raise AssertionError("the slot has no kernel yet")


class Scope:
    """What holds in one thread on top of the process: immutable but for the cached chains.

    It lives in torch's thread state, which the autograd engine carries over to the threads in which
    it runs the backward, so a `with` block around ``loss.backward()`` holds on every device.
    """

    __slots__ = ("__weakref__", "activations", "chains", "debug", "key", "recorder")

    def __init__(
        self,
        activations: tuple[Activation, ...] = (),
        debug: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.activations = activations
        self.debug = debug
        self.recorder = recorder
        self.chains: dict[Slot, Chain] = {}
        self.key: tuple[Any, ...] | None = None
        with LOCK:
            _scopes.add(self)

    def replaced(self, **changes: Any) -> Scope:
        """A copy with some attributes changed."""
        kept: dict[str, Any] = {
            "activations": self.activations,
            "debug": self.debug,
            "recorder": self.recorder,
        }
        return Scope(**(kept | changes))


class Flags:
    """What a call has to look at before it takes the shortest way.

    Attributes:
        scoped: How many thread scopes are open anywhere; 0 spares the look at the thread's own.
        slow: How many debug modes or recorders are on.
    """

    __slots__ = ("scoped", "slow")

    def __init__(self) -> None:
        self.scoped = 0
        self.slow = 0


class Busy(threading.local):
    """The overrides whose implementation the current thread is inside of."""

    overrides: frozenset[Override] = frozenset()


FLAGS = Flags()
BUSY = Busy()
SLOTS: dict[tuple[str, str], Slot] = {}

_scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
_process: list[Activation] = []
_process_key: tuple[Any, ...] | None = ()
_serial = 0
_NO_SCOPE = Scope()


def next_serial() -> int:
    """A number larger than all before."""
    global _serial
    with LOCK:
        _serial += 1
        return _serial


def current_scope() -> Scope:
    """The scope of the calling thread."""
    if not compat.has_thread_object(SCOPE_KEY):
        return _NO_SCOPE
    scope = compat.thread_object(SCOPE_KEY)
    assert isinstance(scope, Scope)  # the key is ours
    return scope


def set_scope(scope: Scope) -> Scope:
    """Put a scope in force in the calling thread; returns the one before."""
    before = current_scope()
    compat.set_thread_object(SCOPE_KEY, scope)
    return before


def process_activations() -> list[Activation]:
    """The activations that every thread sees."""
    with LOCK:
        return list(_process)


def add_process_activation(activation: Activation) -> None:
    """Let every thread see an override."""
    with LOCK:
        _process.append(activation)
        refresh()


def drop_process_activation(override: Override) -> None:
    """Undo `add_process_activation`."""
    with LOCK:
        _process[:] = [a for a in _process if a[1] is not override]
        refresh()


def refresh() -> None:
    """Recompute the chains after a change of what the process holds."""
    global _process_key
    with LOCK:
        for slot in SLOTS.values():
            slot.chain = build_chain(slot.site, _process)
        for scope in list(_scopes):
            scope.chains.clear()
            scope.key = None
        _process_key = None


def active() -> list[Override]:
    """The overrides that the calling thread sees, first in order first."""
    return _ordered([*process_activations(), *current_scope().activations])


def active_key() -> tuple[Any, ...]:
    """A value that differs between calls whenever the calling thread's overrides do.

    Compiled graphs are guarded by it. The precision of float32 matmuls and the mode of `numerics`
    are part of it, since implementations and predicates may read them and Dynamo does not guard on
    them; with no override in force nothing is.
    """
    global _process_key
    scope = current_scope() if FLAGS.scoped else _NO_SCOPE
    if scope.activations:
        if scope.key is None:
            scope.key = tuple(o.identity for o in active())
        key = scope.key
    else:
        if _process_key is None:
            _process_key = tuple(o.identity for o in _ordered(process_activations()))
        key = _process_key
    if not key:
        return ()
    mode = current_mode()
    precision = mode.products or torch.get_float32_matmul_precision()
    return (precision, mode.numerics, *key)


def _ordered(activations: Iterable[Activation]) -> list[Override]:
    latest: dict[Override, int] = {}
    for serial, override in activations:
        if not override.removed:
            latest[override] = max(serial, latest.get(override, 0))
    return sorted(latest, key=lambda o: (-o.priority, -latest[o]))


def build_chain(site: Site, activations: Iterable[Activation]) -> Chain:
    """The chain of a site for a set of activations."""
    links: list[Link] = []
    before: frozenset[Override] = frozenset()
    name = qualified(site.op)
    for override in _ordered(activations):
        if (name, site.key) in override.sites:
            before |= {override}
            links.append(override.link(override.sites[name, site.key], before))
    return tuple(links)


def scoped_chain(slot: Slot) -> Chain:
    """The chain of a slot for the calling thread, kept in its scope."""
    scope = current_scope()
    if not scope.activations:
        return slot.chain
    with LOCK:
        chain = build_chain(slot.site, [*_process, *scope.activations])
        scope.chains[slot] = chain
    return chain


def without(chain: Chain, busy: frozenset[Override]) -> Chain:
    """The part of a chain that a call from inside an implementation may reach."""
    return tuple(link for link in chain if link.override not in busy)


@contextlib.contextmanager
def originals(*but: Override) -> Iterator[None]:
    """Let the calling thread's calls reach torch's own operators, whatever is in force.

    Args:
        *but: Overrides that stay in force.
    """
    busy = BUSY.overrides
    BUSY.overrides = busy | frozenset(active()).difference(but)
    try:
        yield
    finally:
        BUSY.overrides = busy
