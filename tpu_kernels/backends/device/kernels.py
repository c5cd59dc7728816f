"""Which operators get a kernel on the simulated device, and registering them.

Any operator without a kernel of its own falls back to a generated handler. The dispatcher asks the
fallback last, though: after composite kernels that would run one operator as two or more (allocate,
then call the ``out=`` variant). Those that are worth one call get a direct kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from tpu_kernels._compat_torch import registered_operators
from tpu_kernels.backends.device.cells import CELLS
from tpu_kernels.backends.device.handlers import (
    find_operator,
    lazy_handler,
    make_handler,
    with_modes,
)
from tpu_kernels.backends.device.integers import INTEGERS
from tpu_kernels.backends.device.manual import MANUAL, MEMORY_ONLY

KEY = "PrivateUse1"

# View kernels of the CPU; the composite views (`permute`, `expand`, ...) all end in these.
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "view_as_real",
        "view_as_complex",
        "alias",
    )
)

# Composite operators that must not be sent to the CPU as a whole: they allocate, change storage or
# metadata, ask about the device, or belong to layouts and backends that the device does not have.
_LEFT_ALONE = """
sparse quantize nested resize set pin_memory is_pinned copy_from mkldnn cudnn miopen mps_
_fw_primal _make_dual lift detach squeeze_ transpose_ as_strided_ overrideable _assert _print
_test_ is_coalesced rnn lstm gru coalesce fill is_same_size allclose _efficientzerotensor q_
int_repr dequantize to_padded values indices
"""

_handlers: dict[OpOverload, Callable[..., Any]] = {}


# Whose operators may run on the CPU's kernels. Anybody else's operator needs a kernel for the
# device, here as on a real TPU.
_OWN_NAMESPACES = frozenset(
    ("aten", "prims", "prim", "profiler", "inductor", "c10d", "_c10d_functional", "rngprims")
)


def _fallback(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    handler = _handlers.get(operator)
    if handler is None:
        if operator.namespace not in _OWN_NAMESPACES:
            raise NotImplementedError(
                f"the operator '{operator.name()}' has no kernel for the device 'tpu'\n"
                "  hint: register one, with @tpu_kernel or with torch.library.impl(..., 'tpu'); "
                "its CPU kernel is not used, since a real TPU could not use it either"
            )
        handler = _handlers[operator] = make_handler(operator)
    return handler(*args, **kwargs)


def register_kernels() -> list[torch.library.Library]:
    """Register everything that the simulated device can run.

    Returns:
        The libraries that hold the registrations; they must outlive the device.
    """
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_fallback, KEY)
    library = torch.library.Library("aten", "IMPL")
    by_hand = {**MANUAL, **CELLS, **INTEGERS}
    for name, kernel in by_hand.items():
        operator = find_operator(name)
        if operator is not None and name not in MEMORY_ONLY:
            kernel = with_modes(operator, kernel)
        library.impl(name.removeprefix("aten::"), kernel, KEY)
    for name in sorted(direct_operators() - by_hand.keys()):
        operator = find_operator(name)
        if operator is not None:
            library.impl(name.removeprefix("aten::"), lazy_handler(operator), KEY)
    return [fallback, library]


def direct_operators() -> frozenset[str]:
    """Return the names of the operators that get a generated kernel of their own."""
    structured = registered_operators("CPU") & registered_operators(
        "CompositeExplicitAutogradNonFunctional"
    )
    composite = registered_operators("CompositeExplicitAutograd")
    # Composite elsewhere, with a kernel for the CPU that rounds in other places.
    fused = registered_operators("CPU") & registered_operators("CompositeImplicitAutograd")
    names = VIEWS | structured | fused | {name for name in composite if _is_one_call(name)}
    return frozenset(name for name in names if name.startswith("aten::"))


def _is_one_call(name: str) -> bool:
    """Return whether a composite operator can run on the CPU as a whole.

    It must be functional or in-place, take a tensor, return no view and no ``out=``, and have no
    say in where its result lives.
    """
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base.startswith(("_foreach_", "_fused_ada", "_fused_sgd")):
        return "out" not in overload
    if any(part in base for part in _LEFT_ALONE.split()) or "out" in overload:
        return False
    operator = find_operator(name)
    if operator is None or not operator._schema.returns:
        return False
    if torch.Tag.inplace_view in operator.tags:  # changes the tensor itself: strides, shape
        return False
    kinds = {str(a.type) for a in operator._schema.arguments}
    if kinds & {"Device", "Optional[Device]"} or not kinds & {"Tensor", "List[Tensor]"}:
        return False
    return all(r.alias_info is None or r.alias_info.is_write for r in operator._schema.returns)
