"""Which kernel owns an operator name, and when a definition may replace another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from tpu_kernels.dsl.spec import KernelSpec, Source
from tpu_kernels.errors import NameClashError

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel

lock = threading.RLock()
_kernels: dict[str, Kernel] = {}


def kernels() -> dict[str, Kernel]:
    """All registered kernels by qualified name."""
    with lock:
        return dict(_kernels)


def lookup(name: str) -> Kernel | None:
    """The kernel of a qualified name, or None."""
    return _kernels.get(name)


def same_place(a: Source, b: Source) -> bool:
    """Whether two definitions are one place seen twice: a notebook cell run again, a module
    imported twice."""
    return a.qualname == b.qualname and (a.module == b.module or a.file == b.file)


def make_way(spec: KernelSpec, *, replace: bool) -> None:
    """Remove the kernel that a new definition replaces.

    Args:
        spec: The new definition, already complete: a broken one must not take the old one away.
        replace: Whether a definition from another place may be replaced as well.

    Raises:
        NameClashError: Another place owns the name; names both.
    """
    old = _kernels.get(spec.name)
    if old is not None:
        if not replace and not same_place(old.spec.source, spec.source):
            raise NameClashError(
                f"kernel {spec.name!r} is already defined at {old.spec.source} "
                f"({old.spec.source.qualname})",
                where=str(spec.source),
                hint="choose another name or namespace, or pass replace=True to take the name over",
            )
        old.retire(spec.source)
        del _kernels[spec.name]
    elif hasattr(getattr(torch.ops, spec.namespace), spec.opname):
        raise NameClashError(
            f"operator {spec.name!r} exists already and was not defined by tpu_kernels",
            where=str(spec.source),
            hint="choose another name or namespace",
        )


def enter(kernel: Kernel) -> None:
    """Make a kernel the owner of its name."""
    _kernels[kernel.name] = kernel
