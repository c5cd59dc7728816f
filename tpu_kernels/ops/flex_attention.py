"""`flex_attention`: PyTorch's FlexAttention on every device that the package knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu_kernels.errors import ArgumentError
from tpu_kernels.ops.flex import flex_attention_kernel
from tpu_kernels.ops.flex_call import call_of, narrow


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_aux: Any = None,
    mask_mod: Callable[..., torch.Tensor] | None = None,
    precision: str | None = None,
    **config: Any,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` by `tpu::flex_attention`.

    On CPU tensors it has a backward, which PyTorch's own lacks there, and no matrix of scores is
    made. On the device "tpu", PyTorch's function runs the same kernels; use it with
    `torch.compile`. This function traces its mods at every call, which takes some milliseconds.

    Args:
        query: [batch, heads, q_len, head_dim]; bfloat16, float16 or float32.
        key: [batch or 1, kv_heads, kv_len, head_dim].
        value: [batch or 1, kv_heads, kv_len, v_dim].
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` on numbers. Tensors that it captures
            get gradients.
        block_mask: A `BlockMask`; its mask_mod says which pairs count.
        scale: Factor on the products; ``1 / sqrt(head_dim)`` by default.
        enable_gqa: Whether `query` may have more heads than `key`.
        return_aux: An `AuxRequest`: which of ``lse`` and ``max_scores`` to return as well.
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool`` without a BlockMask: no block is skipped.
        precision: As in `attention`.
        **config: Blocks, as in `attention`.

    Returns:
        [batch, heads, q_len, v_dim], zero where a query sees nothing; with `return_aux`, also an
        `AuxOutput`.

    Raises:
        ArgumentError: Arguments do not fit.
        TraceError: A mod has no form that a kernel computes.

    Example:
        >>> x = torch.randn(1, 2, 5, 8, requires_grad=True)
        >>> slopes = torch.ones(2, requires_grad=True)
        >>> out = flex_attention(x, x, x, lambda s, b, h, q, k: s + slopes[h] * (k - q))
        >>> out.sum().backward()
        >>> slopes.grad.shape
        torch.Size([2])
    """
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ArgumentError(
            f"flex_attention: {query.shape[1]} query heads, {key.shape[1]} key heads",
            hint="pass enable_gqa=True",
        )
    blocks: list[Any] = []
    size = (128, 128)
    if block_mask is not None:
        if mask_mod is not None:
            raise ArgumentError("flex_attention: a mask_mod beside a BlockMask, which has one")
        if tuple(block_mask.seq_lengths) != (query.shape[2], key.shape[2]):
            raise ArgumentError(
                f"flex_attention: a BlockMask for lengths {tuple(block_mask.seq_lengths)}, "
                f"not {(query.shape[2], key.shape[2])}"
            )
        mask_mod, size = block_mask.mask_mod, tuple(block_mask.BLOCK_SIZE)
        blocks = [
            block_mask.kv_num_blocks, block_mask.kv_indices,
            block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
        ]  # fmt: skip
    call = call_of(score_mod, mask_mod, blocks, size, query.device)
    tensors, buffers, *rest = call.arguments
    out, lse, most = flex_attention_kernel(
        query, key, value, tensors, narrow(buffers), *rest, scale, precision=precision, **config
    )
    if return_aux is None:
        return out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(
        lse=lse if return_aux.lse else None, max_scores=most if return_aux.max_scores else None
    )
