"""Which line of the author's own source an error belongs to.

JAX, libtpu and this package put dozens of frames between a mistake and its report; an author wants
the one in their file. Two sources are read: Python tracebacks, and the ``loc(...)`` texts that MLIR
carries along.
"""

from __future__ import annotations

import functools
import linecache
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from tpu_kernels import _compat_jax
from tpu_kernels.dsl import generated_code

_LOC_FRAME = re.compile(r'"(?P<file>[^"]+)":(?P<line>\d+):\d+')
_INDEX_MAP = re.compile(r"^Index map function \S+ at (?P<file>[^\s:]+\.py):(?P<line>\d+)")
_FAULT_STACK = re.compile(r"(?:Current thread 0x[0-9a-f]+|Stack) \(most recent call first\):")
_FAULT_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)
_BODY_AT = re.compile(r" at (?P<file>[^\s:]+\.py):(?P<line>\d+)")
# Helion's exceptions say where in the author's file it was.
_PROCESSING = re.compile(r'While processing:\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_INSTALLED = re.compile(r"/(site|dist)-packages/")
# Layers of this package that only pass a kernel along; `tpu_kernels/ops` is not among them: its
# authors want their lines as anybody else does.
_OWN_LAYERS = (
    *("backends", "cli", "compiler", "dsl", "integrations", "registry", "tuning", "verify"),
    *("config.py", "errors.py", "_compat_jax.py", "_compat_torch.py"),
)
_FOREIGN_PACKAGES = (
    "jax",
    "jaxlib",
    "torch",
    "numpy",
    "helion",
    "cloudpickle",
    "pytest",
    "_pytest",
    "pluggy",
)


@dataclass(frozen=True)
class SourceLine:
    """A place in the author's source.

    Attributes:
        file: Path as Python knows it.
        line: 1-based line number.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The line's text without indentation, empty if the source is not at hand."""
        return linecache.getline(self.file, self.line).strip()


@functools.cache
def _foreign_roots() -> tuple[str, ...]:
    roots = [sysconfig.get_path("stdlib")]
    for name in _FOREIGN_PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            roots.append(str(Path(spec.origin).parent))
    return tuple(roots)


@functools.cache
def _plumbing_roots() -> tuple[str, ...]:
    roots: list[str] = []
    # The package is spread over several source folders, so each layer is asked for its own.
    package = find_spec("tpu_kernels")
    for folder in (package.submodule_search_locations or ()) if package else ():
        roots.extend(str(Path(folder) / layer) for layer in _OWN_LAYERS)
    for layer in ("tpu_kernels.dsl", "tpu_kernels.registry"):
        spec = find_spec(layer)
        roots.extend(spec.submodule_search_locations or () if spec else ())
    return tuple(roots)


def _is_plumbing(file: str) -> bool:
    return any(file == root or file.startswith(root + "/") for root in _plumbing_roots())


def is_authors(file: str) -> bool:
    """Tell whether a source file is neither a library's nor this package's plumbing.

    Args:
        file: Path, or a pseudo-name such as ``<ipython-input-3>``.

    Returns:
        True for the author's files and notebook cells; a kernel under ``tpu_kernels/ops`` counts as
        its author's.

    Example:
        >>> is_authors("/home/ann/kernels/softmax.py"), is_authors(__import__("json").__file__)
        (True, False)
    """
    if file.startswith(("<frozen", "#")) or file in ("<string>", "<blocks>", "-", ""):
        return False
    if _is_plumbing(file):
        return False
    for root in _foreign_roots():
        # site-packages lies below the standard library's folder, and the author's code may be
        # installed.
        rest = file.removeprefix(root + "/")
        if rest != file and not _INSTALLED.search("/" + rest):
            return False
    return True


def parse(place: str) -> SourceLine:
    """Turn ``file:line`` back into a place.

    Args:
        place: What `str` of a `SourceLine` gives.

    Returns:
        The place.

    Example:
        >>> parse("k.py:7").line
        7
    """
    file, _, line = place.rpartition(":")
    return SourceLine(file, int(line))


def is_installed(file: str) -> bool:
    """Tell whether a source file belongs to an installed distribution.

    Args:
        file: Path.

    Returns:
        True below a ``site-packages`` or ``dist-packages`` folder.

    Example:
        >>> is_installed("/usr/lib/python3/dist-packages/flash/kernel.py")
        True
    """
    return _INSTALLED.search(file) is not None


def from_exception(error: BaseException) -> SourceLine | None:
    """Find the innermost line of the author's in an exception and what it was raised from.

    JAX chains the place where an operation was traced as the exception's cause; that place is where
    the author wrote it, while the exception's own traceback ends in the lowering.

    Args:
        error: The exception, with its traceback.

    Returns:
        The line, or None if no frame is the author's.
    """
    chain = list(_chain(error))
    for item in chain:
        processing = _PROCESSING.search(str(item))
        if processing is not None and is_authors(processing["file"]):
            return SourceLine(processing["file"], int(processing["line"]))
        index_map = _INDEX_MAP.search(str(item))
        if index_map is not None and is_authors(index_map["file"]):
            return _place(index_map["file"], int(index_map["line"]))
        exact = from_location(str(item))
        if exact is not None:
            return exact
    for item in chain:
        lines = [line for line in _beyond_plumbing(item.__traceback__) if is_authors(line.file)]
        if lines:
            return _place(lines[-1].file, lines[-1].line)
    for file, line in _compat_jax.traced_frames(error.__traceback__):
        if is_authors(file):
            return _place(file, line)
    return from_message(str(error))


def _place(file: str, line: int) -> SourceLine:
    """A place in the author's source; that of a generated file is where its line was made from."""
    return SourceLine(*generated_code.origin(file, line))


def _chain(error: BaseException) -> Iterator[BaseException]:
    chain: list[BaseException] = []
    item: BaseException | None = error
    while item is not None and item not in chain:
        chain.append(item)
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)
    # The deepest cause that JAX added is nearest to the author's line.
    traced = [item for item in chain if type(item).__name__ == "JaxStackTraceBeforeTransformation"]
    yield from traced
    yield from (item for item in chain if item not in traced)


def _beyond_plumbing(traceback: TracebackType | None) -> list[SourceLine]:
    """Frames below the last one of this package; above it stands who called, not who wrote."""
    lines: list[SourceLine] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _is_plumbing(file):
            lines.clear()
        else:
            lines.append(SourceLine(file, traceback.tb_lineno))
        traceback = traceback.tb_next
    return lines


def from_location(text: str) -> SourceLine | None:
    """Find the author's line in an MLIR location.

    Args:
        text: Such as ``loc("get:"("body"("k.py":20:15 to :21)))``, innermost frame first, alone or
            in a message.

    Returns:
        The innermost frame that is the author's, or None.

    Example:
        >>> str(from_location('loc("add"(callsite("f"("k.py":7:4) at "g"("k.py":9:0))))'))
        'k.py:7'
    """
    for match in _LOC_FRAME.finditer(text):
        if is_authors(match["file"]):
            return _place(match["file"], int(match["line"]))
    return None


def from_message(message: str) -> SourceLine | None:
    """Find the author's line in a message of Pallas or Mosaic.

    Args:
        message: With an MLIR location or words such as ``in pallas_call body at k.py:33``.

    Returns:
        The line, or None if the message names none.

    Example:
        >>> str(from_message("Block spec for args[0] in pallas_call body at k.py:33 has"))
        'k.py:33'
    """
    found = from_location(message)
    if found is not None:
        return found
    for match in _BODY_AT.finditer(message):
        if is_authors(match["file"]):
            return _place(match["file"], int(match["line"]))
    return None


def from_fault(text: str) -> SourceLine | None:
    """Find the author's innermost line in what `faulthandler` prints of a process.

    Args:
        text: What the process had printed at its end.

    Returns:
        The line, or None if no frame of the thread that failed is the author's.

    Example:
        >>> str(from_fault('Stack (most recent call first):\\n  File "k.py", line 3 in f'))
        'k.py:3'
    """
    *_, stack = _FAULT_STACK.split(text)
    if stack == text:
        return None
    for match in _FAULT_FRAME.finditer(stack.partition("\n\n")[0]):
        if is_authors(match["file"]):
            return _place(match["file"], int(match["line"]))
    return None
