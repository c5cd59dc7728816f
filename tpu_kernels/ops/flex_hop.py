"""`torch.nn.attention.flex_attention` on the device "tpu": its two higher-order operators.

PyTorch turns a call of `flex_attention` into the operator ``flex_attention`` with graphs of the
mods as arguments, eager and compiled, and its derivative into ``flex_attention_backward``. Eager
calls arrive here as tensors (`run`, `run_backward`); those in a compiled graph while JAX traces
(`lower`, `lower_backward`).

Mods that no kernel computes are left to PyTorch's own dense math; a note says why.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from tpu_kernels import _compat_torch
from tpu_kernels.errors import TraceError
from tpu_kernels.lowering import kernels
from tpu_kernels.lowering.evaluate import Evaluator
from tpu_kernels.lowering.rules import Unlowered
from tpu_kernels.lowering.values import is_array, torch_dtype
from tpu_kernels.ops.flex import flex_attention_backward, flex_attention_kernel
from tpu_kernels.ops.flex_call import (
    LN2,
    FlexCall,
    call_of,
    narrow,
    wanted_gradients,
    why_not,
)
from tpu_kernels.registry import backend_table

log = logging.getLogger("tpu_kernels.flex_attention")

_fallbacks: collections.Counter[str] = collections.Counter()


def flex_fallbacks() -> dict[str, int]:
    """How often PyTorch's dense math answered for a kernel in eager mode, by reason.

    What a compiled graph leaves to PyTorch is in `tpu_kernels.backends.graphs.compile_stats`.

    Example:
        >>> all(count > 0 for count in flex_fallbacks().values())
        True
    """
    return dict(_fallbacks)


def _tell(reason: str) -> None:
    if not _fallbacks[reason]:
        log.warning("flex_attention is computed by dense math: %s", reason)
    _fallbacks[reason] += 1


def _call(
    query: Any, score_mod: Any, block_mask: Sequence[Any], score: Any, mask: Any, device: Any = None
) -> FlexCall:
    *_, q_size, kv_size, mask_mod = block_mask
    blocks = block_mask[2:6]
    lowered = device is not None
    return call_of(
        score_mod,
        mask_mod,
        blocks,
        (int(q_size), int(kv_size)),
        device or query.device,
        score,
        mask,
        stand_ins=_stand_in if lowered else lambda buffer: buffer,
    )


def _stand_in(array: Any) -> Any:
    if not is_array(array):
        return array
    return torch.empty(array.shape, dtype=torch_dtype(array), device="meta")


# Eager --------------------------------------------------------------------------------------------


def run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator ``flex_attention`` on tensors."""
    score, mask = score_mod_other_buffers, mask_mod_other_buffers
    reason = why_not(query, key, value)
    try:
        call = None if reason else _call(query, score_mod, block_mask, score, mask)
    except TraceError as error:
        call, reason = None, error.problem
    if call is None:
        _tell(str(reason))
        dense = _compat_torch.flex_dense_math()[0]
        return dense(  # type: ignore[no-any-return]
            query, key, value, score_mod, block_mask, scale, kernel_options, score, mask
        )
    blocks, buffers, *rest = call.arguments
    out, lse, most = flex_attention_kernel(
        query, key, value, blocks, narrow(buffers), *rest, float(scale)
    )
    return _laid_out_as(out, query), lse / LN2, most / LN2


def run_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Any, ...]:
    """The operator ``flex_attention_backward`` on tensors."""
    score, mask = score_mod_other_buffers, mask_mod_other_buffers
    reason = why_not(query, key, value)
    try:
        call = None if reason else _call(query, fw_graph, block_mask, score, mask)
        wanted = wanted_gradients(joint_graph, score)
    except TraceError as error:
        call, reason = None, error.problem
    if call is None:
        _tell(str(reason))
        dense = _compat_torch.flex_dense_math()[1]
        return dense(  # type: ignore[no-any-return]
            query, key, value, out, logsumexp, grad_out, grad_logsumexp, fw_graph, joint_graph,
            block_mask, scale, kernel_options, score, mask,
        )  # fmt: skip
    blocks, buffers, *rest = call.arguments
    places = [n for n in wanted if call.scored[n] is not None]
    dq, dk, dv, captured = flex_attention_backward(
        torch.zeros_like(out) if grad_out is None else grad_out,
        None if grad_logsumexp is None else grad_logsumexp / LN2,
        query, key, value, out, logsumexp * LN2, blocks, narrow(buffers), *rest, float(scale),
        tuple(call.scored[n] for n in places),
    )  # fmt: skip
    grads = dict(zip(places, captured, strict=True))
    for n in set(wanted) - set(places):  # the score_mod does not read it
        grads[n] = torch.zeros_like(score[n])
    found = tuple(grads.get(n) for n in range(len(score)))
    inputs = zip((dq, dk, dv), (query, key, value), strict=True)
    return (*(_laid_out_as(x, like) for x, like in inputs), found)


def _laid_out_as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result with its dimensions in the order of another's in memory, as PyTorch announces it."""
    strides = like.stride()
    order = sorted(range(like.dim() - 1), key=lambda n: (-strides[n], n))
    if order == list(range(like.dim() - 1)):
        return x
    found = torch.empty_permuted(x.shape, (*order, like.dim() - 1), dtype=x.dtype, device=x.device)
    return found.copy_(x)


# Compiled -----------------------------------------------------------------------------------------


def _inline(evaluator: Evaluator, kernel: Any, args: Sequence[Any]) -> Any:
    operator = backend_table.operator_of(kernel.op)
    if operator is None:
        raise Unlowered(f"{kernel.name} is not registered")
    result = kernels.inline(operator, args, {}, evaluator.engine)
    evaluator.launches.append(operator)
    return result


class _Shaped:
    """Dtypes of arrays, for `why_not`."""

    def __init__(self, array: Any) -> None:
        self.dtype = torch_dtype(array)


def _lowered_call(
    node: Node, arrays: Sequence[Any], mod: Any, block_mask: Any, score: Any, mask: Any
) -> FlexCall:
    reason = why_not(*(_Shaped(array) for array in arrays))
    if reason is not None:
        raise Unlowered(reason)
    source: Any = node.args[0]
    device = source.meta["val"].device
    try:
        call = _call(None, mod, block_mask, score, mask, device)
    except TraceError as error:
        raise Unlowered(error.problem) from error
    if any(isinstance(x, torch.Tensor) for x in call.buffers):
        raise Unlowered("a mod with a tensor of its own")
    return call


def _narrow(buffers: Sequence[Any]) -> list[Any]:
    return [x.astype("int32") if str(x.dtype) == "int64" else x for x in buffers]


def lower(
    evaluator: Evaluator,
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    kernel_options: Any,
    score_mod_other_buffers: Any = (),
    mask_mod_other_buffers: Any = (),
) -> tuple[Any, Any, Any]:
    """The operator ``flex_attention`` on arrays of the program that is being traced."""
    call = _lowered_call(
        node,
        (query, key, value),
        score_mod,
        block_mask,
        score_mod_other_buffers,
        mask_mod_other_buffers,
    )
    blocks, buffers, *rest = call.arguments
    args = (query, key, value, _narrow(blocks), _narrow(buffers), *rest, float(scale))
    out, lse, most = _inline(evaluator, flex_attention_kernel, args)
    return out, lse / LN2, most / LN2


def lower_backward(
    evaluator: Evaluator,
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    grad_out: Any,
    grad_logsumexp: Any,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: Any,
    scale: float,
    kernel_options: Any,
    score_mod_other_buffers: Any = (),
    mask_mod_other_buffers: Any = (),
) -> tuple[Any, ...]:
    """The operator ``flex_attention_backward`` on arrays of the program that is being traced."""
    import jax.numpy as jnp

    score = score_mod_other_buffers
    arrays = (query, key, value)
    call = _lowered_call(node, arrays, fw_graph, block_mask, score, mask_mod_other_buffers)
    try:
        wanted = wanted_gradients(joint_graph, score)
    except TraceError as error:
        raise Unlowered(error.problem) from error
    places = [n for n in wanted if call.scored[n] is not None]
    blocks, buffers, *rest = call.arguments
    grad_lse = None if grad_logsumexp is None else grad_logsumexp / LN2
    args = (
        jnp.zeros_like(out) if grad_out is None else grad_out, grad_lse, *arrays, out,
        logsumexp * LN2, _narrow(blocks), _narrow(buffers), *rest, float(scale),
        tuple(call.scored[n] for n in places),
    )  # fmt: skip
    *grads, captured = _inline(evaluator, flex_attention_backward, args)
    found: list[Any] = [None] * len(score)
    for n in wanted:
        found[n] = jnp.zeros_like(score[n])
    for n, grad in zip(places, captured, strict=True):
        found[n] = grad
    return (*grads, tuple(found))
