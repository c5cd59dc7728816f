"""`override`: replace an operator's implementation by another, for as long as it should last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import overload

from torch._ops import OpOverload, OpOverloadPacket

from tpu_kernels import _compat_torch as compat
from tpu_kernels.errors import OverrideError
from tpu_kernels.registry.overrides import names
from tpu_kernels.registry.overrides.chain import FLAGS, LOCK, current_scope, set_scope
from tpu_kernels.registry.overrides.composite import may_differentiate
from tpu_kernels.registry.overrides.handle import (
    Backward,
    Implementation,
    OnError,
    Override,
    Predicate,
)
from tpu_kernels.registry.overrides.targets import (
    DEVICE_KEYS,
    arity,
    is_composite,
    qualified,
    resolve,
    signature,
)

Operator = str | OpOverload | OpOverloadPacket


@overload
def override(
    aten_op: Operator,
    impl: Implementation,
    *,
    when: Predicate | None = None,
    device: str = "tpu",
    priority: int = 0,
    on_error: OnError = "raise",
    backward: Backward = "auto",
    debug: bool = False,
) -> Override: ...


@overload
def override(
    aten_op: Operator,
    impl: None = None,
    *,
    when: Predicate | None = None,
    device: str = "tpu",
    priority: int = 0,
    on_error: OnError = "raise",
    backward: Backward = "auto",
    debug: bool = False,
) -> Callable[[Implementation], Override]: ...


def override(
    aten_op: Operator,
    impl: Implementation | None = None,
    *,
    when: Predicate | None = None,
    device: str = "tpu",
    priority: int = 0,
    on_error: OnError = "raise",
    backward: Backward = "auto",
    debug: bool = False,
) -> Override | Callable[[Implementation], Override]:
    """Replace an operator of torch by another implementation, in eager and in compiled code.

    The result is inactive until it is entered (``with``: this thread, and the backward passes that
    it starts) or enabled (``.enable()``: every thread, until ``.disable()``). Without `impl` it is
    a decorator.

    Args:
        aten_op: ``"aten::mm"``, ``"aten::mm.out"``, an overload or a packet. A functional overload
            covers its in-place and out variants too.
        impl: What to call: a `Kernel`, an operator (`OpOverload`) or any function of the operator's
            arguments. If a function has a parameter ``fallback``, that is what it would have
            replaced: the next override, finally the original. Calling the operator itself from
            inside has the same meaning.
        when: Predicate on the operator's arguments. True takes the call; False or a string (or
            `Decline`) that says why leaves it to the next override, finally to the original.
        device: ``"tpu"`` or ``"cpu"``.
        priority: Higher comes first; among equals the latest activated comes first.
        on_error: ``"raise"``: an error of `impl` or `when` becomes an `OverrideError`.
            ``"fallback"``: the next in order is called, and a warning is given once.
        backward: Only for composite operators (``matmul``, ``linear``,
            ``scaled_dot_product_attention``, ...), whose gradient torch has no formula for.
            ``"impl"``: the implementation is differentiable. ``"original"``: gradients come from
            running the original again. ``"auto"``: the first where the implementation's result is
            connected to its inputs, else the second.
        debug: Compare each result with the original's in shape, stride, dtype and device.

    Returns:
        An `Override`, or a decorator that makes one.

    Raises:
        OverrideError: There is no such operator, the operator cannot be overridden, or `impl` or
            `when` cannot take its arguments.

    Example:
        >>> import torch
        >>> def exact(a, b):
        ...     return (a.double() @ b.double()).to(a.dtype)
        >>> x = torch.ones(2, 2)
        >>> with override("aten::mm", exact, device="cpu", when=lambda a, b: len(a) < 8) as o:
        ...     y = torch.mm(x, x)
        >>> y.tolist(), o.hits
        ([[2.0, 2.0], [2.0, 2.0]], 1)
    """

    def make(function: Implementation) -> Override:
        op = resolve(aten_op)
        if isinstance(function, OpOverloadPacket):
            function = resolve(function)
        _validate(op, function, when, device, on_error, backward)
        return Override(
            op,
            function,
            when=when,
            device=device,
            priority=priority,
            on_error=on_error,
            backward=backward,
            debug=debug,
        )

    return make if impl is None else make(impl)


@contextlib.contextmanager
def override_debug() -> Iterator[None]:
    """Compare overridden results with the original's shape, stride, dtype and device.

    This holds for the calling thread, and the backward passes that it starts.

    Example:
        >>> import torch
        >>> from tpu_kernels.errors import OverrideError
        >>> def wide(a, b):
        ...     return a.double() @ b.double()
        >>> try:
        ...     with override_debug(), override("aten::mm", wide, device="cpu"):
        ...         torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        ... except OverrideError as error:
        ...     print(error.problem.partition(": ")[2])
        dtype torch.float64 instead of torch.float32
    """
    with LOCK:
        FLAGS.slow += 1
        FLAGS.scoped += 1
    before = set_scope(current_scope().replaced(debug=True))
    try:
        yield
    finally:
        set_scope(before)
        with LOCK:
            FLAGS.slow -= 1
            FLAGS.scoped -= 1


def _validate(
    op: OpOverload,
    impl: Implementation,
    when: Predicate | None,
    device: str,
    on_error: str,
    backward: str,
) -> None:
    name = qualified(op)
    if not callable(impl):
        raise OverrideError(f"override({name!r}): the implementation {impl!r} cannot be called")
    for value, allowed, what in (
        (device, tuple(DEVICE_KEYS), "device"),
        (on_error, ("raise", "fallback"), "on_error"),
        (backward, ("auto", "impl", "original"), "backward"),
    ):
        if value not in allowed:
            raise OverrideError(
                f"override({name!r}): {what}={value!r} is not one of {', '.join(allowed)}"
            )
    if op.is_view:
        raise OverrideError(
            f"override({name!r}): it returns a view of its input, which no implementation can",
            hint="override the operator that computes with the view",
        )
    if impl is op or getattr(impl, "op", None) is op:
        raise OverrideError(f"override({name!r}): the implementation is the operator itself")
    call = signature(op)
    for function, what in ((impl, "implementation"), (when, "predicate")):
        if function is None:
            continue
        takes = arity(function)
        missing = set(takes.required[call.required :]).difference(call.keywords)
        if not takes.admits(call.required) or (what == "implementation" and missing):
            at_most = "any number of" if takes.positional is None else takes.positional
            raise OverrideError(
                f"override({name!r}): the {what} {names.name_of(function)} takes "
                f"{len(takes.required)} to {at_most} positional arguments, the operator passes "
                f"{call.required}",
                where=names.where(function),
                hint=f"the operator is {compat.schema_of(op)}",
            )
    if backward != "auto" and not is_composite(op, device):
        raise OverrideError(
            f"override({name!r}): backward={backward!r} is for composite operators; torch has a "
            f"gradient formula for {name} and keeps using it",
            hint="leave backward out; override the backward operator to change the gradient",
        )
    if backward == "impl" and not may_differentiate(impl):
        raise OverrideError(
            f"override({name!r}): the operator is composite, so a backward must be supplied, and "
            f"{names.name_of(impl)} has none",
            where=names.where(impl),
            hint="give it a backward, or let backward='original' borrow the original's",
        )
