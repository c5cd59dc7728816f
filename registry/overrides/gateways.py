"""Operators that a backend runs in one piece, although torch knows what they are made of.

The overrides of the parts would never be asked there: TorchTPU's eager ``linear`` does not call
``mm``. So while a part is overridden, an override of the package's own stands at the whole, after
all others, and expresses it by its parts. Compiled graphs, which contain the parts, and eager calls
then agree.

A backend states here what it runs in one piece; nothing is stated for the CPU and the simulated
device, which compute wholes by calling their parts.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpu_kernels.registry.overrides.targets import qualified, resolve

if TYPE_CHECKING:
    from tpu_kernels.registry.overrides.handle import Override

LAST = -sys.maxsize
"""Priority of what stands at a whole: every override that a user makes of it comes first."""


@dataclasses.dataclass(frozen=True)
class Gateway:
    """An operator that is run in one piece.

    Attributes:
        whole: Its qualified name.
        parts: Names of the operators in which `express` computes it.
        express: Function of the whole's arguments.
        when: Predicate on them, or None for all calls.
        device: Device whose backend runs it in one piece.
    """

    whole: str
    parts: frozenset[str]
    express: Callable[..., Any]
    when: Callable[..., Any] | None = None
    device: str = "tpu"


@dataclasses.dataclass(frozen=True)
class ResultRule:
    """What a backend wants of an operator's result beyond torch's schema.

    Attributes:
        op: The operator's qualified name.
        adjust: Takes an implementation's result and returns it as the backend wants it.
        device: The backend's device.
    """

    op: str
    adjust: Callable[[Any], Any]
    device: str = "tpu"


_gateways: dict[tuple[str, str], Gateway] = {}
_rules: dict[tuple[str, str], ResultRule] = {}


def add_gateway(gateway: Gateway) -> None:
    """State that a backend runs an operator in one piece."""
    _gateways[gateway.whole, gateway.device] = gateway


def add_result_rule(rule: ResultRule) -> None:
    """State what a backend wants of an operator's result."""
    _rules[rule.op, rule.device] = rule


def result_rule(op: str, device: str) -> ResultRule | None:
    """The rule for an operator's results, if there is one."""
    return _rules.get((op, device))


def companions(override: Override) -> tuple[Override, ...]:
    """The overrides of wholes that have to be in force as long as an override of a part is."""
    from tpu_kernels.registry.overrides.handle import Override

    if not override.listed:
        return ()
    names = {qualified(site.op) for site in override.sites.values()}
    return tuple(
        Override(
            resolve(gateway.whole),
            gateway.express,
            when=gateway.when,
            device=gateway.device,
            priority=LAST,
            on_error="raise",
            backward="auto",
            debug=False,
            listed=False,
        )
        for gateway in list(_gateways.values())
        if gateway.device == override.device and gateway.parts & names
    )
