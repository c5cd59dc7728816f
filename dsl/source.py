"""Where a kernel comes from, and a hash of everything that decides what it computes.

The hash covers the function's bytecode and constants (so comments and formatting do not count), its
defaults, the values in its closure, the globals it reads, and in turn the functions among those.
Code of installed libraries counts by module name and version, code of the author's own modules by
content.
"""

from __future__ import annotations

import ast
import dis
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpu_kernels.dsl.spec import KernelSpec, Source

_MAX_DEPTH = 24  # guards against pathological object graphs, far above real helper chains


def unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The plain Python function under `jax.jit`, `functools.partial` and `functools.wraps`
    layers."""
    seen: set[int] = set()
    while id(fn) not in seen:
        seen.add(id(fn))
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif hasattr(fn, "fun") and callable(
            fn.fun
        ):  # jax.custom_vjp and jax.custom_jvp keep it there
            fn = fn.fun
    return fn


def locate(fn: Callable[..., Any]) -> Source:
    """File, line and content hash of a kernel function.

    Args:
        fn: The author's function, possibly wrapped by `jax.jit`, `functools.partial` or a custom
            derivative.

    Returns:
        Its `Source`.

    Example:
        >>> def f(x):
        ...     return x + 1
        >>> def g(x):
        ...     return x + 1  # another comment
        >>> locate(f).digest == locate(g).digest
        True
    """
    inner = unwrap(fn)
    code = getattr(inner, "__code__", None)
    return Source(
        file=code.co_filename if code else _file_of_class(type(inner)),
        line=code.co_firstlineno if code else 0,
        module=getattr(inner, "__module__", "") or "",
        qualname=getattr(inner, "__qualname__", type(inner).__qualname__),
        digest=digest(fn),
    )


def _file_of_class(cls: type) -> str:
    try:
        return inspect.getsourcefile(cls) or "<unknown>"
    except TypeError:  # written in C
        return "<unknown>"


def digest(fn: Any) -> str:
    """Hash of everything that decides what a function computes, as 32 hexadecimal digits.

    Example:
        >>> make = lambda c: lambda x: x * c
        >>> digest(make(2.0)) == digest(make(3.0)), digest(make(2.0)) == digest(make(2.0))
        (False, True)
    """
    hasher = hashlib.blake2b(digest_size=16)
    _Walk(hasher).feed(fn)
    return hasher.hexdigest()


_DATA = (bool, int, float, complex, str, bytes, tuple, list, dict, enum.Enum, np.generic)


def globals_read(fn: Callable[..., Any]) -> tuple[tuple[dict[str, Any], str, Any], ...]:
    """The data among the globals that a function and the author's functions that it calls read.

    What they assign themselves (a counter, say), functions, classes and modules are left out, and
    so are this package's own kernels, whose constants are constant.

    Args:
        fn: The author's function, possibly wrapped.

    Returns:
        Namespace, name and present value of each.

    Example:
        >>> namespace = {"SCALE": 2.0}
        >>> exec("def f(x): return x * SCALE", namespace)
        >>> [(name, value) for _, name, value in globals_read(namespace["f"])]
        [('SCALE', 2.0)]
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    assigned: set[tuple[int, str]] = set()
    seen: set[int] = set()
    waiting = [unwrap(fn)]
    while waiting:
        function = waiting.pop()
        module = getattr(function, "__module__", None) or ""
        own = module.split(".")[0] == "tpu_kernels" or _library(module) is not None
        if id(function) in seen or not isinstance(function, types.FunctionType) or own:
            continue
        seen.add(id(function))
        space = function.__globals__
        assigned |= {(id(space), name) for name in _assigned_names(function.__code__)}
        for name in _global_names(function.__code__):
            value = space.get(name)
            if isinstance(value, _DATA) or (hasattr(value, "shape") and hasattr(value, "dtype")):
                found[id(space), name] = (space, name, value)
            elif callable(value):
                waiting.append(unwrap(value))
        waiting += [
            unwrap(cell.cell_contents)
            for cell in function.__closure__ or ()
            if _is_full(cell) and callable(cell.cell_contents)
        ]
    return tuple(entry for key, entry in found.items() if key not in assigned)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _assigned_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _assigned_names(constant)
    return names


class _Walk:
    """Feeds objects to a hash, each object once (recursive helpers refer back to themselves)."""

    def __init__(self, hasher: hashlib.blake2b) -> None:
        self.hasher = hasher
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # ids stay unique while the objects live
        self.depth = 0

    def write(self, *parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            self.hasher.update(len(data).to_bytes(8, "little") + data)

    def feed(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            # repr keeps 1, 1.0 and True apart, and gives every NaN the same text
            self.write(type(value).__name__, value if isinstance(value, bytes) else repr(value))
            return
        if id(value) in self.seen:
            self.write("again", self.seen[id(value)])
            return
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        self.depth += 1
        if self.depth <= _MAX_DEPTH:
            self._feed_object(value)
        self.depth -= 1

    def _feed_object(self, value: Any) -> None:
        if isinstance(
            getattr(value, "spec", None), KernelSpec
        ):  # a kernel that calls another kernel
            self.write("kernel", value.spec.name, value.spec.source.digest)
        elif isinstance(value, types.FunctionType):
            self._feed_function(value)
        elif isinstance(value, types.MethodType):
            self.write("method")
            self.feed(value.__func__)
            self.feed(value.__self__)
        elif isinstance(value, types.CodeType):
            self._feed_code(value)
        elif isinstance(value, functools.partial):
            self.write("partial")
            self.feed(value.func)
            self.feed(value.args)
            self.feed(value.keywords)
        elif isinstance(value, types.ModuleType):
            self._feed_module(value)
        elif isinstance(value, enum.Enum):
            self.write("enum", type(value).__qualname__, value.name)
            self.feed(value.value)
        elif isinstance(value, Mapping):
            self.write("mapping", len(value))
            for key in sorted(value, key=repr):
                self.feed(key)
                self.feed(value[key])
        elif isinstance(value, (tuple, list)):
            self.write(type(value).__name__, len(value))
            for item in value:
                self.feed(item)
        elif isinstance(value, (set, frozenset)):
            self.write("set", sorted(map(repr, value)))
        elif isinstance(value, type):
            self._feed_class(value)
        elif self._feed_array(value):
            pass
        elif hasattr(value, "__wrapped__") or (hasattr(value, "fun") and callable(value.fun)):
            self._feed_wrapper(value)
        else:
            self._feed_instance(value)

    def _feed_function(self, fn: types.FunctionType) -> None:
        if _library(fn.__module__) is not None:
            self.write("library function", _library(fn.__module__), fn.__module__, fn.__qualname__)
            # A library's higher-order function carries the author's functions in its closure.
            for cell in fn.__closure__ or ():
                self._feed_cell(cell)
            return
        self.write("function")
        self._feed_code(fn.__code__)
        self.feed(fn.__defaults__)
        self.feed(fn.__kwdefaults__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self.write("cell", name)
            self._feed_cell(cell)
        for name in sorted(_global_names(fn.__code__)):
            if name in fn.__globals__:
                self.write("global", name)
                self.feed(fn.__globals__[name])

    def _feed_cell(self, cell: types.CellType) -> None:
        try:
            self.feed(cell.cell_contents)
        except ValueError:  # a name of the enclosing scope that is assigned later
            self.write("empty cell")

    def _feed_code(self, code: types.CodeType) -> None:
        self.write(
            "code",
            code.co_code,
            code.co_names,
            code.co_varnames,
            code.co_argcount,
            code.co_kwonlyargcount,
        )
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._feed_code(constant)
            elif isinstance(constant, frozenset):
                self.write("frozenset", sorted(map(repr, constant)))
            elif not (isinstance(constant, str) and constant == _docstring(code)):
                self.feed(constant)

    def _feed_module(self, module: types.ModuleType) -> None:
        library = _library(module.__name__)
        if library is not None:
            self.write("library", module.__name__, library)
            return
        self.write("module", module.__name__, _normal_source(getattr(module, "__file__", None)))

    def _feed_class(self, cls: type) -> None:
        self.write("class", cls.__module__, cls.__qualname__)
        if _library(cls.__module__) is None:
            members = {
                k: v
                for k, v in vars(cls).items()
                if isinstance(v, (types.FunctionType, int, float, str, tuple))
            }
            self.feed(
                {
                    k: v
                    for k, v in members.items()
                    if k not in ("__module__", "__doc__", "__qualname__")
                }
            )

    def _feed_array(self, value: Any) -> bool:
        if isinstance(value, np.dtype):
            self.write("dtype", value.name)
            return True
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            return False
        if hasattr(value, "detach"):  # a torch tensor
            import torch

            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            items = np.asarray(value)
            if items.dtype.hasobject:  # an abstract value: it has a shape, and no bytes
                return False
            data = np.ascontiguousarray(items).reshape(-1).view(np.uint8)
        self.write("array", tuple(value.shape), value.dtype, data.tobytes())
        return True

    def _feed_wrapper(self, value: Any) -> None:
        self.write("wrapper", type(value).__qualname__)
        self.feed(getattr(value, "__wrapped__", None) or value.fun)
        for name in (
            "fwd",
            "bwd",
            "jvp",
        ):  # the derivative rules of jax.custom_vjp and jax.custom_jvp
            self.feed(getattr(value, name, None))

    def _feed_instance(self, value: Any) -> None:
        self.write("object", type(value).__module__, type(value).__qualname__)
        if _library(type(value).__module__) is None:
            self.feed(type(value))
        state = getattr(value, "__dict__", None)
        if state is None and hasattr(value, "__slots__"):
            state = {n: getattr(value, n, None) for n in value.__slots__ if isinstance(n, str)}
        if state:
            self.feed({k: v for k, v in state.items() if isinstance(k, str)})
        elif state is None:
            text = repr(value)
            self.write("repr", text.split(" at 0x")[0])  # an address is not content


def _docstring(code: types.CodeType) -> str | None:
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


@functools.cache
def _library(module_name: str | None) -> str | None:
    """Version text of the library that a module belongs to, or None for the author's own
    modules."""
    top = (module_name or "").split(".")[0]
    if not top or top in ("__main__", "__mp_main__"):
        return None
    module = sys.modules.get(top)
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return f"python{sys.version_info[0]}.{sys.version_info[1]}"
    file = os.path.realpath(getattr(module, "__file__", None) or "")
    if (
        f"{os.sep}site-packages{os.sep}" not in file
        and f"{os.sep}dist-packages{os.sep}" not in file
    ):
        return None
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


@functools.cache
def _normal_source_at(file: str, modified_ns: int) -> str:
    with open(file, encoding="utf-8") as handle:
        tree = ast.parse(handle.read())
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=16).hexdigest()


def _normal_source(file: str | None) -> str:
    """Hash of a module's syntax tree: comments and formatting do not count."""
    if file is None or not file.endswith(".py") or not os.path.exists(file):
        return "no source"
    return _normal_source_at(file, os.stat(file).st_mtime_ns)
