"""The line of the user's program that an operator was called from."""

from __future__ import annotations

import functools
import re
import sys

from tpu_kernels._compat_torch import current_autograd_node
from tpu_kernels.compiler import locations

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')

# Names of what this package generates and compiles itself.
_GENERATED = ("<tpu ", "<tpu_kernels ", "<override of ")


@functools.cache
def is_authors(file: str) -> bool:
    """Return whether a file is the user's, by its name."""
    return not file.startswith(_GENERATED) and locations.is_authors(file)


def user_line() -> str | None:
    """Return ``file:line`` of the innermost frame that is the user's, None if there is none.

    In a backward pass, whose threads have no such frame, it is the line of the forward, which
    autograd knows while its anomaly mode is on.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if is_authors(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return _forward_line()


def in_backward() -> str | None:
    """Return the name of the autograd node that the calling thread runs, None if it runs none."""
    node = current_autograd_node()
    return None if node is None else str(node.name()).removesuffix("0")


def _forward_line() -> str | None:
    node = current_autograd_node()
    if node is None:
        return None
    for text in reversed(node.metadata.get("traceback_", [])):
        for found in reversed(list(_FRAME.finditer(text))):
            if is_authors(found["file"]):
                return f"{found['file']}:{found['line']}"
    return None
