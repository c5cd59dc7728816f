"""Errors raised while JAX traces a kernel, told in the author's terms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tpu_kernels.compiler import locations
from tpu_kernels.errors import KernelError, TraceError


@contextlib.contextmanager
def explained(kernel: str, where: str, doing: str = "tracing") -> Iterator[None]:
    """Turn an exception of the kernel's own code into a `TraceError` that names kernel, file and
    line.

    Args:
        kernel: Qualified name.
        where: ``file:line`` of the definition, used when the traceback has no line of the author's.
        doing: What was going on, for the message.
    """
    try:
        yield
    except KernelError:
        raise
    except Exception as error:
        raise _explain(error, kernel, where, doing) from error


def _explain(error: Exception, kernel: str, where: str, doing: str) -> TraceError:
    line = locations.from_exception(error)
    cause = (str(error).strip() or type(error).__name__).split("\n")
    first = f"kernel {kernel!r} failed while {doing}: {type(error).__name__}: {cause[0]}"
    rest = "\n".join(
        [*([f"    {line.text}"] if line is not None and line.text else []), *cause[1:4]]
    )
    return TraceError(
        f"{first}\n{rest}" if rest else first, where=str(line) if line is not None else where
    )
