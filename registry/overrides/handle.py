"""`Override`: one replacement of an operator, its lifetime, and the count of what happened."""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, Self

from torch._ops import OpOverload

from tpu_kernels.errors import OverrideError
from tpu_kernels.registry.overrides import adapt, dispatch, gateways, graph, names
from tpu_kernels.registry.overrides.chain import (
    FLAGS,
    LOCK,
    UNSAID,
    Link,
    add_process_activation,
    current_scope,
    drop_process_activation,
    next_serial,
    refresh,
    set_scope,
)
from tpu_kernels.registry.overrides.kernels import kernel_of
from tpu_kernels.registry.overrides.targets import (
    Site,
    arity,
    qualified,
    sites,
)

log = logging.getLogger("tpu_kernels.overrides")

Implementation = Callable[..., Any]
Predicate = Callable[..., Any]
OnError = Literal["raise", "fallback"]
Backward = Literal["auto", "impl", "original"]


class Decline(str):
    """What a predicate returns to decline a call and say why; any other string does the same.

    Example:
        >>> Decline("K is not a multiple of 8")
        'K is not a multiple of 8'
    """

    __slots__ = ()


class Override:
    """One override: a context manager for this thread, a switch for the process, a counter.

    Made by `override`. Inactive until entered by ``with`` (this thread, and the backward passes
    that it starts) or enabled by `enable` (every thread).

    Attributes:
        op: The overload that the user named.
        impl: The implementation.
        when: The predicate, or None.
        device: ``"tpu"`` or ``"cpu"``.
        priority: Higher comes first; among equals the latest activated.
        hits: Calls that the implementation answered.
        declines: Calls that the predicate (or the implementation's signature) declined.
        last_decline: Why the last of them was declined.
        errors: Calls in which the implementation or the predicate raised, or broke the contract in
            debug mode.
        last_error: The last error's text.
        where: ``file:line`` of the implementation, if it has one.
        serial: Larger for overrides made later.
        listed: Whether reports tell of it; not of those that the package itself makes.
    """

    def __init__(
        self,
        op: OpOverload,
        impl: Implementation,
        *,
        when: Predicate | None,
        device: str,
        priority: int,
        on_error: OnError,
        backward: Backward,
        debug: bool,
        listed: bool = True,
    ) -> None:
        self.op = op
        self.impl = impl
        self.when = when
        self.device = device
        self.priority = priority
        self.on_error = on_error
        self.backward = backward
        self.debug = debug
        self.listed = listed
        self.hits = self.declines = self.errors = 0
        self.last_decline: str | None = None
        self.last_error: str | None = None
        self.removed = False
        self.serial = next_serial()
        self.impl_name = names.name_of(impl)
        self.when_name = None if when is None else names.name_of(when)
        self.where = names.where(kernel_of(impl) or impl)
        self.identity = (
            qualified(op),
            device,
            priority,
            on_error,
            backward,
            names.content(impl),
            names.content(when),
        )
        self.sites: dict[tuple[str, str], Site] = {
            (qualified(site.op), site.key): site for site in sites(op, device)
        }
        self._arity = arity(impl)
        self._callable = adapt.with_fallback(impl, self)
        self._predicate = None if when is None else adapt.trimmed(when, arity(when))
        self._enabled = False
        self._entered = threading.local()
        self._uses = 0
        self._loud: list[bool] = []  # for each use, whether calls take the slow way because of it
        self._warned = False
        self._companions = gateways.companions(self)
        with LOCK:
            _known.add(self)

    # -- lifetime ---------------------------------------------------------------------------

    def enable(self) -> Self:
        """Put the override in force for every thread until `disable`; returns itself."""
        with LOCK:
            self._check_alive()
            if not self._enabled:
                self._acquire()
                self._enabled = True
                add_process_activation((next_serial(), self))
                for companion in self._companions:
                    companion.enable()
        return self

    def disable(self) -> None:
        """Undo `enable`; nothing happens if the override is not enabled."""
        with LOCK:
            if self._enabled:
                for companion in self._companions:
                    companion.disable()
                self._enabled = False
                drop_process_activation(self)
                self._release()

    def remove(self) -> None:
        """End the override everywhere, also in open scopes; it cannot be enabled again."""
        with LOCK:
            self.disable()
            for companion in self._companions:
                companion.remove()
            self.removed = True
            _known.discard(self)
            refresh()
            while self._uses:
                self._release()

    def __enter__(self) -> Self:
        with LOCK:
            self._check_alive()
            self._acquire()
            scope = current_scope()
            FLAGS.scoped += 1
        activation = (next_serial(), self)
        inside = scope.replaced(activations=(*scope.activations, activation))
        stack = self._entered.__dict__.setdefault("stack", [])
        stack.append((activation, set_scope(inside), inside))
        for companion in self._companions:
            companion.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        stack = self._entered.__dict__.get("stack")
        if not stack:
            raise self.error(
                "it is left in a thread that has not entered it",
                hint="leave it where it was entered; enable() is for all threads",
            )
        for companion in reversed(self._companions):
            companion.__exit__()
        activation, before, inside = stack.pop()
        scope = current_scope()
        if scope is inside:
            set_scope(before)
        else:  # blocks that were entered later are still open
            left = tuple(a for a in scope.activations if a != activation)
            set_scope(scope.replaced(activations=left))
        with LOCK:
            FLAGS.scoped -= 1
            if not self.removed:
                self._release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation itself, whether the override is in force or not."""
        return self._callable(*args, **kwargs)

    def _check_alive(self) -> None:
        if self.removed:
            raise self.error("it has been removed", hint="call override(...) again")

    def _acquire(self) -> None:
        dispatch.acquire(list(self.sites.values()))
        self._loud.append(self.debug or log.isEnabledFor(logging.DEBUG))
        FLAGS.slow += self._loud[-1]
        self._uses += 1
        _alive.add(self)
        graph.enter(self)

    def _release(self) -> None:
        graph.leave(self)
        self._uses -= 1
        FLAGS.slow -= self._loud.pop()
        if not self._uses:
            _alive.discard(self)
        dispatch.release(list(self.sites.values()))

    @property
    def scope(self) -> str:
        """Where it is in force: ``"process"``, ``"thread"`` (some ``with``) or ``"off"``."""
        if self._enabled:
            return "process"
        return "thread" if self._uses else "off"

    # -- calls ------------------------------------------------------------------------------

    def link(self, site: Site, skip: frozenset[Override]) -> Link:
        """The override as one site calls it."""
        run = adapt.for_site(self._callable, self, site)
        return Link(self, adapt.predicate_for_site(self._predicate, site), run, skip)

    def accepts(self, verdict: Any) -> bool:
        """Read a predicate's answer: true is yes; false, None, or a string (the reason) is no."""
        if not isinstance(verdict, str) and verdict:
            return True
        self.declines += 1
        reason = str(verdict) if isinstance(verdict, str) and verdict else UNSAID
        self.last_decline = reason
        return False

    def takes(self, positional: int, keywords: dict[str, Any]) -> bool:
        """Whether the implementation has parameters for what the operator was called with."""
        if self._arity.admits(positional, keywords):
            return True
        self.declines += 1
        extra = ", ".join(keywords) or f"{positional} positional arguments"
        self.last_decline = f"{self.impl_name} does not take {extra}"
        return False

    def predicate_raised(self, error: Exception) -> Decline:
        """Decline after an error in the predicate where the user allowed that, else raise."""
        self._failed(error, f"its predicate {self.when_name}")
        return Decline(f"the predicate raised {type(error).__name__}: {error}")

    def implementation_raised(self, error: Exception) -> None:
        """Return (so that the next in the chain runs) where the user allowed that, else raise."""
        self._failed(error, "it")

    def _failed(self, error: Exception, culprit: str) -> None:
        self.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"
        problem = f"{culprit} raised {self.last_error}"
        log.info("%s: %s", self, problem)
        if self.on_error == "fallback":
            if not self._warned:
                self._warned = True
                message = self.error(f"{problem}; falling back", hint="").problem
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            return
        if isinstance(error, OverrideError):  # says already which override and what to do
            raise error
        raise self.error(
            problem, hint="decline such calls by a predicate (when=), or allow on_error='fallback'"
        ) from error

    def error(self, problem: str, hint: str) -> OverrideError:
        """An error about this override, naming the operator and the implementation."""
        prefix = f"override of {qualified(self.op)} by {self.impl_name}"
        return OverrideError(f"{prefix}: {problem}", where=self.where, hint=hint)

    def __repr__(self) -> str:
        return (
            f"<override of {qualified(self.op)} on {self.device} by {self.impl_name}, {self.scope}>"
        )


_known: weakref.WeakSet[Override] = weakref.WeakSet()
_alive: set[Override] = set()  # in force somewhere: kept even if the user dropped the handle


def listed() -> list[Override]:
    """Every override of a user's that has not been removed, oldest first."""
    with LOCK:
        return sorted((o for o in _known if o.listed), key=lambda o: o.serial)
