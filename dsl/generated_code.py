"""Generated source files, and the author's lines that they were made from.

Helion writes the Pallas code of a kernel to a file of its own; messages of JAX and of the TPU
compiler name that file. Its comments say which line of the author's each statement comes from.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from pathlib import Path

_COMMENT = re.compile(r"#\s*src\[(?P<name>[^\]:]+):(?P<first>\d+)(?:-\d+)?\]")
_BESIDE = ".origin"
_SEARCHED = 200  # lines above a statement

_origins: dict[str, str] = {}


def remember(generated: str, source: str) -> None:
    """Note that a generated file was made from a source file.

    Args:
        generated: Path of the generated file.
        source: Path of the author's file.
    """
    _origins[generated] = source
    # A worker that compiles the kernel reads it there; without the file it names the generated one.
    with contextlib.suppress(OSError):
        beside = Path(generated + _BESIDE)
        if not beside.exists():
            passing = Path(f"{beside}.{os.getpid()}")
            passing.write_text(source, encoding="utf-8")
            passing.replace(beside)


def _source_of(file: str) -> str | None:
    known = _origins.get(file)
    if known is None:
        with contextlib.suppress(OSError):
            known = _origins[file] = Path(file + _BESIDE).read_text(encoding="utf-8")
    return known


def origin(file: str, line: int) -> tuple[str, int]:
    """The author's file and line for a line of a generated file; others unchanged.

    Args:
        file: Path as a message names it.
        line: 1-based line number.

    Example:
        >>> origin("k.py", 7)
        ('k.py', 7)
    """
    source = _source_of(file)
    if source is None:
        return file, line
    # Comments with the author's lines stand above the statements; the innermost one stands last.
    for number in range(line, max(0, line - _SEARCHED), -1):
        found = _COMMENT.search(linecache.getline(file, number))
        if found is not None:
            return source, int(found["first"])
    return source, 1
