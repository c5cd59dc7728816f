"""How kernels are traced for TorchTPU: for which chip, interpreted or not."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

from tpu_kernels import _compat_torch_tpu as compat
from tpu_kernels.backends.torch_tpu import cpu_plugin
from tpu_kernels.compiler.chips import Target, resolve
from tpu_kernels.config import settings
from tpu_kernels.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Purpose:
    """What a program is for: part of every program's key, so there is one object for each.

    Attributes:
        target: The chip whose configurations apply, and that a kernel sees when it asks.
        interpret: Whether Pallas calls become plain HLO instead of Mosaic kernels.
    """

    target: Target
    interpret: bool


_scoped: contextvars.ContextVar[Purpose | None] = contextvars.ContextVar(
    "tpu_kernels_torch_tpu_purpose", default=None
)


scoped_purpose = _scoped.get
"""The `Purpose` of the calling scope, None for running here: a key's part, asked on every call."""


def current_purpose() -> Purpose:
    """What programs of the calling scope are for: to run here, unless `lowering_for` says else."""
    return _scoped.get() or _here()


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """A scope in which programs are made for a chip that need not be here, and do not run."""
    token = _scoped.set(_to_lower(target.topology_name))
    try:
        yield
    finally:
        _scoped.reset(token)


@functools.cache
def _to_lower(topology: str) -> Purpose:
    return Purpose(resolve(topology), interpret=False)


@functools.cache
def _here() -> Purpose:
    if cpu_plugin.active() is not None:
        return Purpose(resolve(settings().sim_chip), interpret=True)
    try:
        return Purpose(resolve(compat.device_name()), interpret=False)
    except ConfigError:  # a chip that is newer than our table: its nearest relative is the setting
        return Purpose(resolve(settings().sim_chip), interpret=False)
