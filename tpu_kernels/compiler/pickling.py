"""Functions and arguments as bytes that a worker process can read."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from tpu_kernels.compiler import locations

_NAMELESS = "<dynamic-code>"

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
            _pickler(stream).dump(value)
            return stream.getvalue()
        except Exception:
            # Pickling runs the `__reduce__` of arbitrary objects, which may raise anything; the
            # caller then works in its own process.
            return None
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def _pickler(stream: io.BytesIO) -> Any:
    """A pickler that keeps the file names of code, which cloudpickle drops and errors need."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType) and obj.co_filename != _NAMELESS:
                return named_code, (obj.replace(co_filename=_NAMELESS), obj.co_filename)
            return super().reducer_override(obj)

    return Pickler(stream)


def named_code(code: CodeType, file: str) -> CodeType:
    """Give code its file name back; called while unpickling.

    Args:
        code: Code without a file name.
        file: The file that it came from.

    Returns:
        The code with its file name.
    """
    return code.replace(co_filename=file)


def import_path() -> list[str]:
    """Return this process's module search path with absolute entries."""
    return [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]


def is_importable(module: str) -> bool:
    """Tell whether a fresh process with our search path would find a module.

    Args:
        module: Name of an imported module.

    Returns:
        False for ``__main__``, and for modules that were loaded from a path or made by hand.

    Example:
        >>> is_importable("json"), is_importable("__main__")
        (True, False)
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and isinstance(file, str) and _importable(module, file)


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
    return any(_is_at(finder.find_spec(name, path), file) for finder in sys.meta_path)


def _is_at(spec: ModuleSpec | None, file: str) -> bool:
    # Not `importlib.util.find_spec`, which would answer with what this process has imported.
    # Packages in editable mode have finders of their own, which every process has.
    return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)
