"""Which kernels a command sees: the shipped ones and those that ``--import`` names."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kernels.errors import ArgumentError, KernelError

if TYPE_CHECKING:
    from types import ModuleType

    from tpu_kernels.registry.kernel import Kernel


class ImportFailure(KernelError, ImportError):
    """A module or file given by ``--import`` cannot be imported."""


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--import``, which every command that works on kernels has."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE_OR_FILE",
        help="module or .py file that defines kernels; repeat for several",
    )


def load_kernels(imports: list[str]) -> dict[str, Kernel]:
    """Import the shipped operators and the user's modules.

    Args:
        imports: Dotted module names or paths of Python files.

    Returns:
        Every kernel defined by then, by name, sorted.

    Raises:
        ImportFailure: If one of the user's modules cannot be imported.
    """
    import pkgutil

    from tpu_kernels import ops
    from tpu_kernels.registry import naming

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")
    for name in imports:
        _import(name)
    return dict(sorted(naming.kernels().items()))


def find_kernel(name: str, imports: list[str]) -> Kernel:
    """Return one kernel by its name.

    Args:
        name: Qualified operator name, such as ``"tpu::matmul"``.
        imports: As for `load_kernels`.

    Returns:
        The kernel.

    Raises:
        ArgumentError: If no kernel has that name.
    """
    kernels = load_kernels(imports)
    if name in kernels:
        return kernels[name]
    import difflib

    similar = difflib.get_close_matches(name, kernels, n=3, cutoff=0.5)
    did_you_mean = f"did you mean {', '.join(similar)}? " if similar else ""
    raise ArgumentError(
        f"no kernel is called {name!r}",
        hint=f"{did_you_mean}`tpu-kernels list` shows all; --import adds yours",
    )


def find_subject(name: str, imports: list[str]) -> Any:
    """Return a kernel by its name, or what ``FILE.py:NAME`` names.

    Args:
        name: ``"tpu::matmul"``, or ``"model.py:Net"``. A class is called without arguments.
        imports: As for `load_kernels`.

    Returns:
        The kernel, module or function.

    Raises:
        ArgumentError: There is no such kernel, or no such name in the file.
        ImportFailure: The file cannot be imported.
    """
    file, separator, attribute = name.rpartition(".py:")
    if not separator:
        return find_kernel(name, imports)
    for module in imports:
        _import(module)
    path = Path(f"{file}.py")
    _import(str(path))
    found = getattr(sys.modules[path.stem], attribute, None)
    if found is None:
        raise ArgumentError(f"{path} defines no {attribute!r}")
    return found() if isinstance(found, type) else found


def find_function(name: str) -> Any:
    """Return what ``MODULE:NAME`` or ``FILE.py:NAME`` names.

    Raises:
        ArgumentError: The word names no such thing.
        ImportFailure: The module cannot be imported.

    Example:
        >>> find_function("math:hypot")(3, 4)
        5.0
    """
    module, separator, attribute = name.rpartition(":")
    if not separator:
        raise ArgumentError(f"{name!r} is not MODULE:NAME or FILE.py:NAME")
    _import(module)
    found = getattr(sys.modules.get(module) or sys.modules[Path(module).stem], attribute, None)
    if not callable(found):
        raise ArgumentError(f"{module} has no function {attribute!r}")
    return found


def _import(name: str) -> None:
    path = Path(name)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ImportFailure(f"--import {name}: there is no such file")
    try:
        if is_file:
            _import_file(path)
        else:
            # A console script, unlike `python -m`, does not look for modules in the working folder.
            if "" not in sys.path:
                sys.path.insert(0, "")
            importlib.import_module(name)
    except KernelError:
        raise  # says what is wrong with a kernel better than we could
    except Exception as error:
        raise ImportFailure(
            f"--import {name}: {type(error).__name__}: {error}", where=_place(error, path)
        ) from error


def _import_file(path: Path) -> ModuleType:
    from importlib.util import module_from_spec, spec_from_file_location

    module_spec = spec_from_file_location(path.stem, path.resolve())
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} cannot be read as a Python module")
    module = module_from_spec(module_spec)
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    sys.modules.setdefault(path.stem, module)
    module_spec.loader.exec_module(module)
    return module


def _place(error: Exception, path: Path) -> str | None:
    """The last line of the user's own file in an error's traceback."""
    place, entry = None, error.__traceback__
    while entry is not None:
        if Path(entry.tb_frame.f_code.co_filename).name == path.name:
            place = f"{path}:{entry.tb_lineno}"
        entry = entry.tb_next
    return place
