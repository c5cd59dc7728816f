"""Functions and arguments as bytes that a worker process can read."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_lock = threading.Lock()  # by-value registration is global to cloudpickle


def dumps(value: Any) -> bytes | None:
    """Pickle a value with the code of what a fresh process could not import.

    Functions of ``__main__`` (scripts and notebooks) travel by value, and so do those of modules that only this
    process can find: test files and modules that were loaded from a path.

    Args:
        value: Functions, closures, data.

    Returns:
        The bytes, or None if something in it cannot be pickled.

    Example:
        >>> dumps(lambda x: x + 1) is None
        False
    """
    import cloudpickle

    with _lock:
        registered = []
        try:
            for module in _unimportable():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
            stream = io.BytesIO()
            cloudpickle.dump(value, stream)
            return stream.getvalue()
        except Exception:
            # Pickling runs the `__reduce__` of arbitrary objects, which may raise anything; the caller then
            # works in its own process.
            return None
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def import_path() -> list[str]:
    """Return this process's module search path with absolute entries."""
    return [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]


def _unimportable() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or not file.endswith(".py"):
            continue
        spec = getattr(module, "__spec__", None)
        # What the import system found by its path entries has a parent or lies directly on one of them.
        if spec is not None and _on_path(name, file):
            continue
        yield module


def _on_path(name: str, file: str) -> bool:
    top = name.partition(".")[0]
    package = sys.modules.get(top)
    if package is None:
        return False
    if top != name:
        # A submodule is found through its package.
        return getattr(package, "__path__", None) is not None and _on_path_top(top)
    return _on_path_top(top, file)


def _on_path_top(top: str, file: str | None = None) -> bool:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and (file is None or spec.origin in (None, file))
