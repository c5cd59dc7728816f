"""The backends that operators get implementations from.

A backend may arrive after the operators (the simulated device is installed on first use) and an
operator after the backends; both directions meet here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tpu_kernels.registry.operator import Operator


class Backend(Protocol):
    """Something that can run an operator on tensors of one dispatch key.

    Attributes:
        name: For messages, for example ``"cpu"``.
        dispatch_key: The torch dispatch key of its tensors.
    """

    name: str
    dispatch_key: str

    def implement(self, operator: Operator) -> Callable[..., Any]:
        """A function with the operator's arguments that runs it."""
        ...


_lock = threading.RLock()
_backends: dict[str, Backend] = {}
_operators: weakref.WeakSet[Operator] = weakref.WeakSet()


def add_backend(backend: Backend) -> None:
    """Give every operator, present and future, an implementation by this backend.

    Adding a second backend for a dispatch key that is taken changes nothing.
    """
    with _lock:
        if backend.dispatch_key in _backends:
            return
        _backends[backend.dispatch_key] = backend
        for operator in list(_operators):
            operator.implement(backend)


def add_operator(operator: Operator) -> None:
    """Give an operator an implementation by every backend, present and future."""
    with _lock:
        _operators.add(operator)
        for backend in _backends.values():
            operator.implement(backend)


def remove_operator(operator: Operator) -> None:
    """Forget an operator that was replaced."""
    with _lock:
        _operators.discard(operator)


def operator_of(overload: Any) -> Operator | None:
    """The operator behind a torch overload, None if it is not one of ours.

    Derived operators (forward with residuals, backward, batched) are found as well.
    """
    with _lock:
        for operator in _operators:
            if operator.op is overload:
                return operator
    return None


def backends() -> dict[str, Backend]:
    """The backends by dispatch key."""
    return dict(_backends)
