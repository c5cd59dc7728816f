"""Where configurations of kernels come from: sources asked in order, and why one was chosen.

The registry knows nothing of tuning. The tuning layer adds its sources here (tuned for exactly this
call, nearest bucket, shipped table); a kernel's own heuristic and its declared defaults come last.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class ConfigRequest:
    """A question for a configuration.

    Attributes:
        kernel: Qualified name, ``"ns::op"``.
        source_hash: Content hash of the kernel.
        arrays: ``(shape, dtype name)`` of every tensor argument in order.
        static: Static arguments by name (tunables left out).
        target: Chip name.
        bucket: What the kernel's ``bucket`` function makes of the arguments, or None.
        default: The values that hold when nobody knows better.
    """

    kernel: str
    source_hash: str
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    static: Mapping[str, Any]
    target: str
    bucket: Any = None
    default: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ConfigChoice:
    """The configuration that a call uses.

    Attributes:
        config: Value by parameter name.
        provenance: ``"explicit"``, ``"tuned"``, ``"bucket"``, ``"shipped"``, ``"heuristic"`` or
            ``"default"``.
        reason: One sentence on why this one, and why nothing better was found.
    """

    config: dict[str, Any]
    provenance: str
    reason: str = ""


class ConfigSource(Protocol):
    """Something that may know a configuration.

    It may have a method ``fingerprint(kernels)``: a text that changes when its answers may, and
    ``explain(request)``: a text on what it has for a request or, field by field, why nothing.
    """

    def find(self, request: ConfigRequest) -> ConfigChoice | None:
        """The configuration for a request, or None."""
        ...


_sources: list[ConfigSource] = []
_choosers: weakref.WeakSet[Any] = weakref.WeakSet()


def add_config_source(source: ConfigSource) -> None:
    """Add a source; earlier ones are asked first. Adding the same object again changes nothing."""
    if source not in _sources:
        _sources.append(source)
        bump()


def find(request: ConfigRequest) -> ConfigChoice | None:
    """The first answer of the sources in order, or None."""
    for source in _sources:
        choice = source.find(request)
        if choice is not None:
            return choice
    return None


def explain(request: ConfigRequest) -> str:
    """What the sources say about a request: the record it finds, or why it finds none."""
    told = (getattr(source, "explain", None) for source in _sources)
    return "\n".join(text for tell in told if tell is not None and (text := tell(request)))


def fingerprint(kernels: Sequence[str]) -> str:
    """A text that differs whenever the sources may answer differently about some kernel.

    Args:
        kernels: Qualified names.
    """
    parts = []
    for source in _sources:
        of_source = getattr(source, "fingerprint", None)
        parts.append(str(of_source(kernels)) if of_source is not None else repr(type(source)))
    return " ".join(parts)


class Chooser(Protocol):
    """Something that remembers configurations."""

    def forget_configs(self) -> None:
        """Forget them: better ones may be known now."""
        ...


def watch(chooser: Chooser) -> None:
    """Tell an object, as long as it lives, when configurations may have changed."""
    _choosers.add(chooser)


def bump() -> None:
    """Make every kernel choose its configurations anew on the next call."""
    for chooser in list(_choosers):
        chooser.forget_configs()
