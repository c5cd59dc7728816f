"""Between a user's function and the dispatcher: `fallback`, trimmed arguments, derived variants."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from tpu_kernels.registry.overrides import composite, gateways
from tpu_kernels.registry.overrides.chain import BUSY
from tpu_kernels.registry.overrides.kernels import follow, kernel_of
from tpu_kernels.registry.overrides.targets import Arity, Site, qualified

if TYPE_CHECKING:
    from tpu_kernels.registry.overrides.handle import Override

Function = Callable[..., Any]


class Fallback:
    """The operator without one override and those before it: the next one, finally the original."""

    __slots__ = ("_op", "_override")

    def __init__(self, op: OpOverload, override: Override) -> None:
        self._op = op
        self._override = weakref.ref(override)  # not to keep alive what holds this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with the operator's arguments."""
        busy, override = BUSY.overrides, self._override()
        BUSY.overrides = busy if override is None else busy | {override}
        try:
            return self._op(*args, **kwargs)
        finally:
            BUSY.overrides = busy


def with_fallback(impl: Function, override: Override) -> Function:
    """The implementation as a function of the operator's arguments alone."""
    kernel = kernel_of(impl)
    if kernel is not None:
        return follow(kernel)
    if isinstance(impl, OpOverload):
        return impl
    try:
        parameters = inspect.signature(impl).parameters
    except (TypeError, ValueError):  # built-in functions
        return impl
    if "fallback" not in parameters:
        return impl
    fallback = Fallback(override.op, override)

    def implementation(*args: Any, **kwargs: Any) -> Any:
        return impl(*args, **kwargs, fallback=fallback)

    return implementation


def trimmed(when: Function, takes: Arity) -> Function:
    """A predicate that may be called with more arguments than it looks at."""
    if takes.positional is None and takes.names is None:
        return when

    def predicate(*args: Any, **kwargs: Any) -> Any:
        if not takes.admits(len(args), kwargs):
            args = args[: takes.positional]
            kwargs = {k: v for k, v in kwargs.items() if takes.names is None or k in takes.names}
        return when(*args, **kwargs)

    predicate.__wrapped__ = when  # type: ignore[attr-defined]
    return predicate


def predicate_for_site(predicate: Function | None, site: Site) -> Function | None:
    """The predicate as one site calls it: never with the tensors that an out variant writes to."""
    if predicate is None:
        return None
    if site.variant == "out":
        outputs = site.outputs
        return lambda *args, **kwargs: predicate(*args, **_split(kwargs, outputs)[0])
    if site.variant == "direct" and site.exact:
        return getattr(predicate, "__wrapped__", predicate)
    return predicate


def for_site(run: Function, override: Override, site: Site) -> Function:
    """The implementation as one site calls it."""
    rule = gateways.result_rule(qualified(site.op), site.device)
    if rule is not None:
        run = _adjusted(run, rule)
    if site.differentiates:
        run = composite.differentiable(run, override)
    if site.variant == "inplace":
        return lambda target, *args, **kwargs: _write_back(target, run(target, *args, **kwargs))
    if site.variant == "out":
        refusing = Fallback(site.op, override)
        outputs = site.outputs

        def into_out(*args: Any, **kwargs: Any) -> Any:
            if site.differentiates and composite.wants_gradient(args, kwargs):
                return refusing(*args, **kwargs)  # torch's own error: out= has no gradient
            plain, outs = _split(kwargs, outputs)
            return _write_outs(outs, run(*args, **plain))

        return into_out
    return run


def _adjusted(run: Function, rule: gateways.ResultRule) -> Function:
    return lambda *args, **kwargs: rule.adjust(run(*args, **kwargs))


def _split(
    kwargs: dict[str, Any], outputs: frozenset[str]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Split keyword arguments into the functional operator's and the tensors to write to."""
    plain = {k: v for k, v in kwargs.items() if k not in outputs}
    return plain, [v for k, v in kwargs.items() if k in outputs]


def _write_back(target: Any, result: Any) -> Any:
    if isinstance(target, torch.Tensor):
        _check_castable(result, target)
        return target.copy_(result)
    for one, value in zip(target, result, strict=True):
        _check_castable(value, one)
        one.copy_(value)
    return None


def _check_castable(value: torch.Tensor, target: torch.Tensor) -> None:
    """What torch checks before it writes a result: `copy_` alone would cut 0.5 to 0."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )


def _write_outs(outs: list[Any], result: Any) -> Any:
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    for out, value in zip(outs, results, strict=True):
        _check_castable(value, out)
        if out.shape != value.shape:
            out.resize_(value.shape)
        out.copy_(value)
    return outs[0] if len(outs) == 1 else tuple(outs)
