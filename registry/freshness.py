"""Programs follow the module globals that a kernel reads.

A program holds the values that globals had when it was traced. A caller who rebinds one would get
the old value where a program exists and the new one for new shapes: a mixture. So where a kernel
reads data from globals, each call compares their identity, and a change drops what was traced
before it. Contents that change in place are not noticed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpu_kernels.dsl import source

if TYPE_CHECKING:
    from tpu_kernels.registry.operator import Operator

_log = logging.getLogger(__name__)
_MISSING = object()


class Freshness:
    """The globals that a kernel's function reads.

    Args:
        name: Name of the kernel, for the log.
        fn: The author's function.
    """

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self._name = name
        self._fn = fn
        self._lock = threading.Lock()
        self._watched = source.globals_read(fn)
        self._version = 0

    def __bool__(self) -> bool:
        return bool(self._watched)

    def version(self) -> int:
        """A number that is another one once a global has been rebound."""
        for space, name, value in self._watched:
            if space.get(name, _MISSING) is not value:
                return self._renew()
        return self._version

    def _renew(self) -> int:
        import jax

        with self._lock:
            changed = [n for space, n, v in self._watched if space.get(n, _MISSING) is not v]
            if changed:
                self._watched = source.globals_read(self._fn)
                self._version += 1
                jax.clear_caches()  # of functions under jit that the kernel calls
                names = ", ".join(changed)
                _log.info("kernel %s is traced anew: %s changed", self._name, names)
            return self._version


def refreshed(
    operator: Operator, freshness: Freshness, implement: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """An implementation that is made anew once a global has changed.

    Args:
        operator: The operator; its shapes are derived anew, too.
        freshness: The globals.
        implement: Makes an implementation without programs.
    """
    implementation = implement()
    made = freshness.version()

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal implementation, made
        version = freshness.version()
        if version != made:
            operator.forget_shapes()
            implementation, made = implement(), version
        return implementation(*args, **kwargs)

    return run
