"""Overrides of ATen operators inside lowered graphs.

An override that takes a node is traced into the program, so that its kernel is compiled with the
rest. What the dispatcher counts for each call is counted for each run of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_kernels.lowering.rules import Unlowered
from tpu_kernels.registry.numerics import operators
from tpu_kernels.registry.overrides import chain, graph

SKIPPED = "tpu_kernels_skipped_overrides"  # entry of the user's part of a node's meta
_HOST = "cpu"  # the simulated device calls the CPU's kernels, and with them their overrides


class Overrides:
    """The overrides in force when a graph is lowered.

    Attributes:
        hits: For each override, how many nodes of the program it took.
        declines: For each override, the reasons of the nodes that it left.
    """

    def __init__(self) -> None:
        # Programs round products by themselves under `numerics`.
        rounding = operators.overrides()
        self._active = [o for o in chain.active() if o not in rounding]
        self._ops = {
            site.op
            for override in self._active
            for site in override.sites.values()
            if not site.differentiates
        }
        self.hits: dict[Any, int] = {}
        self.declines: dict[Any, list[str]] = {}

    def concern(self, op: OpOverload) -> bool:
        """Whether some override may take calls of an operator."""
        return op in self._ops

    def choose(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        skipped: frozenset[Any],
    ) -> chain.Link | None:
        """The override that takes a call, judged by fake tensors.

        Args:
            op: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.
            skipped: Overrides that the call must not reach: it is made by one of them.

        Raises:
            Unlowered: It depends on values.
        """
        device = graph.device_of(tuple(args), kwargs)
        for link in self._links(op, dict.fromkeys((device, _HOST))):
            override = link.override
            if override in skipped:
                continue
            if link.when is not None:
                try:
                    verdict = link.when(*args, **kwargs)
                except Exception as error:
                    raise Unlowered("an override whose predicate needs values") from error
                if isinstance(verdict, str) or not verdict:
                    reason = verdict if isinstance(verdict, str) else chain.UNSAID
                    self.declines.setdefault(override, []).append(reason)
                    continue
            self.hits[override] = self.hits.get(override, 0) + 1
            return link
        return None

    def _links(self, op: OpOverload, devices: Mapping[str | None, None]) -> list[chain.Link]:
        """The overrides of an operator in the order in which the dispatcher would reach them."""
        found: list[chain.Link] = []
        for device in devices:
            before: frozenset[Any] = frozenset()
            for override in self._active:
                for site in override.sites.values():
                    if site.op is op and site.device == device and not site.differentiates:
                        before |= {override}
                        found.append(override.link(site, before))
        return found

    def counts(self) -> Counts:
        """What one run of the program is to count."""
        return Counts(
            {override.identity: hits for override, hits in self.hits.items()},
            {override.identity: reasons for override, reasons in self.declines.items()},
        )


def no_overrides() -> Overrides:
    """No overrides, for calls that have passed those in force already."""
    found = Overrides()
    found._active, found._ops = [], set()
    return found


def implementation(link: chain.Link) -> Callable[..., Any]:
    """An override's implementation, to be traced: each node will know what it must not reach."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = chain.BUSY.overrides
        chain.BUSY.overrides = before | link.skip
        try:
            with _Noting():  # type: ignore[no-untyped-call]
                return link.run(*args, **kwargs)
        finally:
            chain.BUSY.overrides = before

    return run


class _Noting(TorchDispatchMode):
    """Writes into each traced node which overrides its call would pass over."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of what is current, torch copies into nodes only entries that it knows, such as this one.
        current = torch.fx.traceback.current_meta
        before = current.get("custom")
        current["custom"] = {**(before or {}), SKIPPED: chain.BUSY.overrides}
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if before is None:
                del current["custom"]
            else:
                current["custom"] = before


def skipped_by(node: torch.fx.Node) -> frozenset[Any]:
    """The overrides that a traced call passes over, because one of them made it."""
    found: frozenset[Any] = (node.meta.get("custom") or {}).get(SKIPPED, frozenset())
    return found


class Counts:
    """What a program counts for the overrides in it, each time that it runs.

    Overrides are known by their identity: a program outlives a scope, and runs for the next scope
    with the same content.
    """

    def __init__(self, hits: dict[Any, int], declines: dict[Any, list[str]]) -> None:
        self._hits = hits
        self._declines = declines

    def __bool__(self) -> bool:
        return bool(self._hits or self._declines)

    def add(self) -> None:
        """Count one run."""
        for override in chain.active():
            override.hits += self._hits.get(override.identity, 0)
            reasons = self._declines.get(override.identity)
            if reasons:
                override.declines += len(reasons)
                override.last_decline = reasons[-1]
