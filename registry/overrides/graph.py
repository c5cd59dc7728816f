"""Overrides in compiled graphs.

Three things make a graph agree with the overrides in force, whatever the backend:

* every graph that Dynamo compiles is guarded by them (`chain.active_key`): a change recompiles;
* a backend that runs ATen operators reaches the dispatcher, and with it the override; for one that
  generates code of its own (Inductor), an overridden operator becomes a *router* when the graph is
  traced: an opaque operator whose kernel calls the original through the dispatcher;
* their content is part of `torch.compiler.config.cache_key_tag` (`registry.cache_tag`), so that a
  cache on disk does not hand the next process a graph made under other overrides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from tpu_kernels import _compat_torch as compat
from tpu_kernels.registry import cache_tag
from tpu_kernels.registry.engine import current_mode
from tpu_kernels.registry.overrides import chain
from tpu_kernels.registry.overrides.targets import is_mutable, qualified

if TYPE_CHECKING:
    from tpu_kernels.registry.overrides.handle import Override

NAMESPACE = "tpu_kernels_override"

Function = Callable[..., Any]

_library: torch.library.Library | None = None
_routers: dict[str, OpOverload] = {}
_users: dict[OpOverload, int] = {}
_replaced: dict[OpOverload, list[Function | None]] = {}  # what Inductor's tables held before
_guarding = False


def enter(override: Override) -> None:
    """Let graphs know of an override that comes into force."""
    global _guarding
    with chain.LOCK:
        if not _guarding:
            _guarding = True
            # Graphs from before have no guard. That happens once per process.
            compat.forget_compiled_code()
            compat.guard_every_graph(chain.active_key)
            cache_tag.add_source("overrides", _content)
            compat.after_import(compat.INDUCTOR_READY, lambda _: _fill_table(executed=True))
        for op in _traced(override):
            _users[op] = _users.get(op, 0) + 1
        _fill_table()


def leave(override: Override) -> None:
    """Undo `enter`."""
    with chain.LOCK:
        for op in _traced(override):
            _users[op] -= 1
            if not _users[op]:
                del _users[op]
                _restore(op)


def _traced(override: Override) -> list[OpOverload]:
    """The overloads that appear in graphs below autograd: functional ones, and not composites."""
    ops = {site.op for site in override.sites.values() if not site.differentiates}
    above = {site.op for site in override.sites.values() if site.differentiates}
    return [op for op in ops - above if not is_mutable(op)]


def _fill_table(*, executed: bool = False) -> None:
    tables = compat.inductor_decompositions(executed=executed)
    with chain.LOCK:
        for op in _users:
            if tables and op not in _replaced:
                _replaced[op] = [table.get(op) for table in tables]
                # Inductor reads the second table first, and falls back on the first.
                before = next((rule for rule in reversed(_replaced[op]) if rule is not None), None)
                for table in tables:
                    if table is tables[0] or op in table:
                        table[op] = _rule(op, before)
        compat.refresh_inductor_decompositions()


def _restore(op: OpOverload) -> None:
    if op not in _replaced:
        return
    for table, before in zip(compat.inductor_decompositions(), _replaced.pop(op), strict=True):
        if before is None:
            table.pop(op, None)
        else:
            table[op] = before
    compat.refresh_inductor_decompositions()


def _rule(op: OpOverload, before: Function | None) -> Function:
    """The decomposition of an overridden operator: into its router, if an override may take it."""
    router = router_of(op)

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        if may_match(op, args, kwargs):
            return router(*args, **kwargs)
        return NotImplemented if before is None else before(*args, **kwargs)

    return decomposition


def may_match(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether some override in force may take a call, judged by fake tensors.

    A predicate on symbolic sizes guards on its answer. One that needs values cannot answer yet: it
    decides each time the graph runs.
    """
    for candidate in candidates(op, args, kwargs):
        if candidate.when is None:
            return True
        try:
            verdict = candidate.when(*args, **kwargs)
        except Exception:
            return True
        if not isinstance(verdict, str) and verdict:
            return True
    return False


def candidates(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[chain.Link]:
    """The overrides in force for an operator on the device of its arguments, in order."""
    device = device_of(args, kwargs)
    found: list[chain.Link] = []
    for override in chain.active():
        for site in override.sites.values():
            if site.op is op and site.device == device and not site.differentiates:
                found.append(override.link(site, frozenset({override})))
    return found


def device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The device type of the first tensor among the arguments."""
    for tensor in _tensors((args, tuple(kwargs.values()))):
        return str(tensor.device.type)
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in _tensors(item)]
    return []


def router_of(op: OpOverload) -> OpOverload:
    """The opaque operator that calls another one through the dispatcher when the graph runs."""
    global _library
    name = qualified(op).replace("::", "_").replace(".", "_")
    if name not in _routers:
        if _library is None:
            _library = torch.library.Library(NAMESPACE, "FRAGMENT")
        schema = str(compat.schema_of(op))
        _library.define(name + schema[schema.index("(") :])
        _library.impl(name, op, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", op, lib=_library)
        _routers[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _routers[name]


def _content() -> str:
    """The part of a cache's key; asked for before a graph may come from a cache on disk."""
    with chain.LOCK:
        for op in _users:  # such a graph names routers that nobody traced in this process
            router_of(op)
    return fingerprint() if chain.active() else ""


def fingerprint() -> str:
    """A digest of the overrides in force in this thread: their code, not their identity."""
    from tpu_kernels.dsl.source import digest

    hasher = hashlib.blake2b(current_mode().numerics.encode(), digest_size=12)
    for override in chain.active():
        parts = (qualified(override.op), override.device, override.priority, override.on_error)
        code = (digest(override.impl), digest(override.when))
        hasher.update(repr((parts, override.backward, override.impl_name, code)).encode())
    return hasher.hexdigest()


def decomposition_table(base: Mapping[Any, Function] | None = None) -> dict[Any, Function]:
    """Rules that put the overrides in force into a graph as it is traced.

    For `torch.export` and for compile backends that run no ATen operators. The choice is made when
    the graph is traced: an implementation that is an operator (or a `Kernel`) becomes a node of the
    graph, any other function is traced through.

    Args:
        base: Rules to add to, such as ``torch.export.default_decompositions()``. Where an override
            declines, the rule of the base applies.

    Returns:
        A new table for `ExportedProgram.run_decompositions` or AOTAutograd.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from tpu_kernels.registry.overrides import override
        >>> def product(a, b):
        ...     return (a[:, :, None] * b).sum(1)
        >>> with override("aten::mm", product, device="cpu"):
        ...     graph = make_fx(torch.mm, decomposition_table())(torch.ones(2, 2), torch.ones(2, 2))
        >>> "aten.mm" in graph.code, "aten.sum" in graph.code
        (False, True)
    """
    table = dict(base or {})
    for override in chain.active():
        for op in _traced(override):
            table[op] = _direct_rule(op, (base or {}).get(op))
    return table


def _direct_rule(op: OpOverload, before: Function | None) -> Function:
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        for link in candidates(op, args, kwargs):
            if link.when is not None:
                verdict = link.when(*args, **kwargs)
                if not link.override.accepts(verdict):
                    continue
            busy = chain.BUSY.overrides
            chain.BUSY.overrides = busy | link.skip
            try:
                return link.run(*args, **kwargs)
            finally:
                chain.BUSY.overrides = busy
        return NotImplemented if before is None else before(*args, **kwargs)

    return decomposition
