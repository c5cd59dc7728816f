"""Functions and arguments as bytes that a worker process can read."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from tpu_kernels.compiler import locations

_lock = threading.Lock()  # by-value registration is global to cloudpickle


def dumps(value: Any) -> bytes | None:
    """Pickle a value with the code of what a fresh process could not import.

    Functions of ``__main__`` (scripts and notebooks) travel by value, and so do those of modules
    that only this process can find: test files and modules that were loaded from a path.

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
            # Pickling runs the `__reduce__` of arbitrary objects, which may raise anything; the
            # caller then works in its own process.
            return None
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def import_path() -> list[str]:
    """Return this process's module search path with absolute entries."""
    return [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]


def _unimportable() -> Iterator[ModuleType]:
    """Modules of the author's that a fresh process with our search path would not find."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name != getattr(module, "__name__", None):
            continue
        # `__main__` travels by value anyway, and libraries are installed for every process.
        if name == "__main__" or not locations.is_authors(file) or locations.is_installed(file):
            continue
        if not _importable(name, file):
            yield module


def _importable(name: str, file: str) -> bool:
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and path is None:
        return False
    spec = PathFinder.find_spec(name, path)
    return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)
