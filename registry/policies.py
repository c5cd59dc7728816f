"""What torch's subsystems ask of an operator beside running it: autocast and FLOP counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels import _compat_torch
from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.errors import SignatureError
from tpu_kernels.registry.layout import map_tensors
from tpu_kernels.registry.operator import Operator

AUTOCAST_KEYS = {"cpu": "AutocastCPU", "tpu": "AutocastPrivateUse1"}
MATCH = "autocast"


def check_autocast(spec: KernelSpec) -> None:
    """Refuse an ``autocast=`` option that is neither a floating dtype nor ``"autocast"``.

    Raises:
        SignatureError: Names the kernel and the value.
    """
    policy = spec.autocast
    if (
        policy is None
        or policy == MATCH
        or (isinstance(policy, torch.dtype) and policy.is_floating_point)
    ):
        return
    raise SignatureError(
        f"kernel {spec.name!r}: autocast={policy!r} is no autocast policy",
        where=str(spec.source),
        hint="pass a floating torch dtype, or 'autocast' for the dtype that torch.autocast is set "
        "to",
    )


def register_autocast(operator: Operator, device_type: str, policy: torch.dtype | str) -> None:
    """Cast floating inputs of an operator under `torch.autocast`.

    Args:
        operator: The operator.
        device_type: ``"cpu"`` or ``"tpu"``.
        policy: The dtype to cast to, or ``"autocast"`` for the one that autocast is set to.

    Raises:
        SignatureError: Another device type.
    """
    key = AUTOCAST_KEYS.get(device_type)
    if key is None:
        raise SignatureError(
            f"kernel {operator.definition.kernel!r}: no autocast for device type {device_type!r}",
            hint=f"one of {', '.join(AUTOCAST_KEYS)}",
        )
    keys = _compat_torch.key_set(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = policy if isinstance(policy, torch.dtype) else torch.get_autocast_dtype(device_type)

        def cast(value: Any) -> Any:
            # torch's own policies leave float64 alone as well: whoever uses it wants its precision.
            wanted = (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.dtype is not torch.float64
            )
            return value.to(dtype) if wanted else value

        with _compat_torch.exclude_keys(keys):
            return operator.op(
                *(map_tensors(cast, a) if isinstance(a, list) else cast(a) for a in args),
                **{
                    k: map_tensors(cast, a) if isinstance(a, list) else cast(a)
                    for k, a in kwargs.items()
                },
            )

    with operator.replacing():
        operator.library.impl(operator.opname, kernel, key)
    operator.autocast[device_type] = policy


def register_flops(operator: Operator, flops: Callable[..., int], factor: int = 1) -> None:
    """Make `torch.utils.flop_counter.FlopCounterMode` count an operator.

    Args:
        operator: The operator.
        flops: ``flops(*shapes)``: shapes in place of tensors, other arguments as they are.
        factor: Multiplies the count; a backward counts as two forwards, as torch counts matrix
            products.
    """
    from torch.utils.flop_counter import register_flop_formula

    count = len([p for p in operator.definition.parameters if not p.name.startswith("tk_")])

    def formula(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return factor * flops(*args[:count], **{k: v for k, v in kwargs.items() if k != "out_val"})

    packet = getattr(getattr(torch.ops, operator.op.namespace), operator.opname)
    register_flop_formula(packet)(formula)
