"""Gradients for implementations of composite operators.

torch differentiates `matmul` or `scaled_dot_product_attention` by differentiating the operators
that they are made of. An implementation in their place must therefore be differentiable itself, and
where it is not, it borrows the gradient of what it replaces: the backward runs the original again
on the saved inputs, and differentiates that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from tpu_kernels import _compat_torch as compat
from tpu_kernels.registry.autograd import NoRule
from tpu_kernels.registry.overrides.chain import BUSY
from tpu_kernels.registry.overrides.kernels import has_backward, kernel_of

if TYPE_CHECKING:
    from tpu_kernels.registry.overrides.handle import Override


def wants_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has to be differentiable."""
    return torch.is_grad_enabled() and any(
        t.requires_grad for t in tensors_in((args, tuple(kwargs.values())))
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return []


def may_differentiate(impl: Callable[..., Any]) -> bool:
    """Whether an implementation can have a gradient of its own; a plain function always can."""
    kernel = kernel_of(impl)
    if kernel is not None:
        return not isinstance(kernel.autograd.rule, NoRule)
    if not isinstance(impl, OpOverload):
        return True
    keys = ("Autograd", "AutogradCPU", "AutogradPrivateUse1", "CompositeImplicitAutograd")
    return any(compat.has_kernel(impl, key) for key in keys)


def differentiable(run: Callable[..., Any], override: Override) -> Callable[..., Any]:
    """An implementation whose gradients are right, for use above autograd.

    Args:
        run: Called with the operator's arguments.
        override: Says whose backward is wanted.

    Returns:
        A function of the same arguments.
    """
    tries_own = override.backward != "original" and may_differentiate(override.impl)
    kernel = kernel_of(override.impl) if override.backward == "auto" else None

    def implementation(*args: Any, **kwargs: Any) -> Any:
        if not wants_gradient(args, kwargs):
            return run(*args, **kwargs)
        if not tries_own or (kernel is not None and not has_backward(kernel, args, kwargs)):
            return _borrow(override, lambda: run(*args, **kwargs), args, kwargs)
        result = run(*args, **kwargs)
        if _connected(result):
            return result
        if override.backward == "impl":
            raise override.error(
                "autograd sees no connection between the result and the inputs, so the gradient "
                "would be lost; a backward must be supplied",
                hint="give it a backward, or let backward='original' borrow the original's",
            )
        return _borrow(override, lambda: result, args, kwargs)

    return implementation


def _connected(result: Any) -> bool:
    floating = [t for t in tensors_in(result) if t.is_floating_point() or t.is_complex()]
    return not floating or any(t.requires_grad for t in floating)


def _borrow(
    override: Override, thunk: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if compat.forward_ad_module()._current_level >= 0:
        raise override.error(
            "a borrowed backward has no forward-mode derivative",
            hint="leave the override while differentiating forward, or give it its own derivatives",
        )
    if torch.Tag.nondeterministic_seeded in override.op.tags:
        _require_deterministic(override, args, kwargs)
    call = _Call(override, thunk, args, kwargs)
    results = compat.apply_single_level(_function(), call, *call.tensors)
    return call.rebuild_result(results)


def _require_deterministic(
    override: Override, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse to borrow where running the original again would draw other random numbers."""
    schema = compat.schema_of(override.op)
    values = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    if (defaults | values).get("dropout_p") == 0:
        return
    raise override.error(
        "it draws random numbers, so running it again is no gradient; a backward must be supplied",
        hint="give it a backward, or decline such calls by a predicate (when=)",
    )


class _Call:
    """One call whose gradient is borrowed: what to run now, and what again in the backward."""

    def __init__(
        self,
        override: Override,
        thunk: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.override = override
        self.thunk = thunk
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensors_in((args, tuple(kwargs.values())))
        self.many = False
        self.none_at: list[int] = []
        device = self.tensors[0].device.type
        self.autocast = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
        )

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the implementation; its tensors, flat."""
        result = self.thunk()
        self.thunk = _spent  # do not keep the result alive
        self.many = isinstance(result, (tuple, list))
        return tuple(result) if self.many else (result,)

    def rebuild_result(self, results: Any) -> Any:
        """The result in the implementation's own form."""
        return results if self.many else results[0]

    def original(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run what was replaced on other tensors."""
        remaining = iter(tensors)

        def put(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(remaining)
            if isinstance(value, (tuple, list)):
                return type(value)(put(item) for item in value)
            return value

        args = put(self.args)
        kwargs = {k: put(v) for k, v in self.kwargs.items()}
        busy = BUSY.overrides
        BUSY.overrides = busy | {self.override}
        try:
            with self.autocast:
                return tensors_in(self.override.op(*args, **kwargs))
        finally:
            BUSY.overrides = busy


def _spent() -> Any:
    raise AssertionError("the implementation has been run already")


_class: type[Any] | None = None


def _function() -> type[Any]:
    """The autograd function; made on first use since its base class is private to torch."""
    global _class
    if _class is not None:
        return _class

    class BorrowedBackward(compat.single_level_function()):  # type: ignore[misc]
        """Forward of the implementation, backward of the original."""

        @staticmethod
        def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.call = call
            ctx.save_for_backward(*tensors)
            results = call.forward()
            plain = [t for t in results if not (t.is_floating_point() or t.is_complex())]
            ctx.mark_non_differentiable(*plain)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
            needed = ctx.needs_input_grad[1:]
            again = torch.is_grad_enabled()  # a gradient of this gradient will be asked for
            with torch.enable_grad():
                # Fresh names for the inputs, or a dependence of one input on another would count
                # too.
                inputs = [
                    (t.view_as(t) if again else t.detach().requires_grad_()) if need else t
                    for t, need in zip(ctx.saved_tensors, needed, strict=True)
                ]
                outputs = ctx.call.original(inputs)
            pairs = [
                (o, g)
                for o, g in zip(outputs, gradients, strict=True)
                if g is not None and o.requires_grad
            ]
            wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
            found = iter(
                torch.autograd.grad(
                    [o for o, _ in pairs],
                    wanted,
                    [g for _, g in pairs],
                    create_graph=again,
                    allow_unused=True,
                )
            )
            return (None, *(next(found) if need else None for need in needed))

    _class = BorrowedBackward
    return _class
