"""Which overloads of which operator an override covers, and at which dispatch keys it sits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket

from tpu_kernels import _compat_torch as compat
from tpu_kernels.errors import OverrideError

Variant = Literal["direct", "out", "inplace"]

DEVICE_KEYS = {"tpu": "PrivateUse1", "cpu": "CPU"}


def resolve(op: str | OpOverload | OpOverloadPacket) -> OpOverload:
    """The one overload that a user means.

    A packet (``"aten::mm"``) means its unnamed overload, else the one called ``Tensor``, else its
    only functional one.

    Args:
        op: ``"aten::mm"``, ``"aten::mm.out"``, ``torch.ops.aten.mm`` or
            ``torch.ops.aten.mm.default``.

    Returns:
        The overload.

    Raises:
        OverrideError: There is no such operator, or the packet is ambiguous.

    Example:
        >>> str(resolve("aten::mm")), str(resolve("aten::add"))
        ('aten.mm.default', 'aten.add.Tensor')
    """
    if isinstance(op, OpOverload):
        return op
    if isinstance(op, OpOverloadPacket):
        return _pick(op)
    namespace, separator, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if separator else None
    if packet is None:
        raise OverrideError(
            f"override({op!r}): there is no such operator",
            hint='write it as "aten::mm", or pass torch.ops.aten.mm (dir(torch.ops.aten) has all)',
        )
    if not overload:
        return _pick(packet)
    if overload not in packet.overloads():
        raise OverrideError(
            f"override({op!r}): {packet} has no overload {overload!r}",
            hint=f"its overloads are {', '.join(packet.overloads())}",
        )
    return getattr(packet, overload)  # type: ignore[no-any-return]


def _pick(packet: OpOverloadPacket) -> OpOverload:
    # Many operators have overloads on plain numbers too, which never reach a device.
    names = [name for name in packet.overloads() if _takes_tensors(getattr(packet, name))]
    for preferred in ("default", "Tensor"):
        if preferred in names:
            return getattr(packet, preferred)  # type: ignore[no-any-return]
    functional = [name for name in names if not is_mutable(getattr(packet, name))]
    if len(functional) == 1:
        return getattr(packet, functional[0])  # type: ignore[no-any-return]
    raise OverrideError(
        f"override({packet}): none of its overloads is the obvious one",
        hint=f"name one of {', '.join(f'{packet}.{name}' for name in names)}",
    )


def _takes_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(a.type) for a in _arguments(op))


def qualified(op: OpOverload) -> str:
    """The dispatcher's name of an overload, such as ``aten::mm`` or ``aten::mm.out``."""
    return str(op.name())


def is_mutable(op: OpOverload) -> bool:
    """Whether an overload writes to one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in _arguments(op))


def _arguments(op: OpOverload) -> list[Any]:
    return list(compat.schema_of(op).arguments)


def is_composite(op: OpOverload, device: str) -> bool:
    """Whether autograd differentiates *through* the operator.

    A kernel in its place below autograd would cut the gradient.
    Such an operator is implemented by others (CompositeImplicitAutograd) on this device: `matmul`,
    `linear`, `scaled_dot_product_attention`. What has a kernel of its own there has a gradient
    formula of torch's too, unless the backend brings the formula along as an autograd kernel: then
    graphs still take the operator apart above autograd, where they would not meet an override.
    """
    if not compat.has_kernel(op, "CompositeImplicitAutograd"):
        return False
    key = DEVICE_KEYS[device]
    return not _has_own(op, key) or _has_own(op, f"Autograd{key}")


covered: dict[tuple[str, str], bool] = {}
"""The sites whose kernels are ours at the moment, and whether there was one of torch's before."""


def _has_own(op: OpOverload, key: str) -> bool:
    """Whether an operator has a kernel of torch's or of the backend's at a dispatch key."""
    site = (qualified(op), key)
    return covered[site] if site in covered else compat.has_kernel(op, key)


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the dispatcher: an overload at a dispatch key.

    Attributes:
        op: The overload.
        key: The dispatch key, such as ``"PrivateUse1"`` or ``"AutogradPrivateUse1"``.
        variant: How the overload relates to the one that the user named.
        device: ``"tpu"`` or ``"cpu"``.
    """

    op: OpOverload
    key: str
    variant: Variant
    device: str

    @property
    def outputs(self) -> frozenset[str]:
        """Names of the tensors that an out variant writes to."""
        return frozenset(a.name for a in _arguments(self.op) if a.is_out)

    @property
    def exact(self) -> bool:
        """Whether torch passes the same number of arguments in every call."""
        return not signature(self.op).optional

    @property
    def differentiates(self) -> bool:
        """Whether implementations run *above* autograd here, and must be differentiable."""
        return self.key.startswith("Autograd")


def sites(op: OpOverload, device: str) -> list[Site]:
    """Every place that an override of an overload occupies: all keys, and the derived variants."""
    places: list[Site] = []
    overloads: list[tuple[OpOverload, Variant]] = [(op, "direct")]
    if not is_mutable(op):
        overloads += derived(op)
    for overload, variant in overloads:
        keys = [DEVICE_KEYS[device]]
        if is_composite(overload, device):
            keys.append("Autograd" + DEVICE_KEYS[device])
        places += [Site(overload, key, variant, device) for key in keys]
    return places


def derived(op: OpOverload) -> Iterator[tuple[OpOverload, Variant]]:
    """The in-place and out variants that compute the same as a functional overload."""
    arguments = [(a.name, str(a.type)) for a in _arguments(op)]
    packet = op.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [a for a in _arguments(other) if a.is_out]
        plain = [(a.name, str(a.type)) for a in _arguments(other) if not a.is_out]
        if outs and plain == arguments:
            yield other, "out"
    inplace = getattr(getattr(torch.ops, op.namespace), f"{_base_name(op)}_", None)
    for name in [] if inplace is None else inplace.overloads():
        other = getattr(inplace, name)
        written = [a.name for a in _arguments(other) if a.alias_info and a.alias_info.is_write]
        same = [(a.name, str(a.type)) for a in _arguments(other)] == arguments
        if same and len(written) == 1 and written[0] == arguments[0][0]:
            yield other, "inplace"


def _base_name(op: OpOverload) -> str:
    return qualified(op).partition("::")[2].partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Signature:
    """How the dispatcher hands an overload's arguments to a Python kernel.

    torch drops trailing positional arguments and keyword arguments that have their default value.

    Attributes:
        required: Number of positional arguments that are always passed.
        keywords: Names of keyword-only arguments that are always passed (the ``out`` tensors).
        optional: Whether more may follow.
    """

    required: int
    keywords: tuple[str, ...]
    optional: bool


def signature(op: OpOverload) -> Signature:
    """The `Signature` of an overload."""
    arguments = _arguments(op)
    required = [a for a in arguments if not a.has_default_value()]
    return Signature(
        required=sum(not a.kwarg_only for a in required),
        keywords=tuple(a.name for a in required if a.kwarg_only),
        optional=len(required) < len(arguments),
    )


@dataclasses.dataclass(frozen=True)
class Arity:
    """What a callable can be called with.

    Attributes:
        positional: Most positional arguments, or None for any number.
        names: Accepted keyword names, or None for all.
        required: Names of the positional parameters without a default.
    """

    positional: int | None
    names: frozenset[str] | None
    required: tuple[str, ...] = ()

    def admits(self, positional: int, keywords: Any = ()) -> bool:
        """Whether a call with so many positional arguments and these keywords binds."""
        if self.positional is not None and positional > self.positional:
            return False
        return self.names is None or self.names.issuperset(keywords)


def arity(function: Callable[..., Any]) -> Arity:
    """The `Arity` of a callable; anything goes for one whose signature Python cannot tell."""
    # A kernel has an operator; so has, under the same name, an operator: its C++ function.
    operator = function if isinstance(function, OpOverload) else getattr(function, "op", None)
    if isinstance(operator, OpOverload):
        arguments = _arguments(operator)
        positional = [a for a in arguments if not a.kwarg_only]
        required = tuple(a.name for a in positional if not a.has_default_value())
        return Arity(len(positional), frozenset(a.name for a in arguments), required)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions
        return Arity(None, None)
    P = inspect.Parameter
    by_position = [p for p in parameters if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in parameters if p.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)]
    return Arity(
        positional=None
        if any(p.kind is P.VAR_POSITIONAL for p in parameters)
        else len(by_position),
        names=None
        if any(p.kind is P.VAR_KEYWORD for p in parameters)
        else frozenset(p.name for p in by_name),
        required=tuple(
            p.name for p in by_position if p.default is P.empty and p.name != "fallback"
        ),
    )
