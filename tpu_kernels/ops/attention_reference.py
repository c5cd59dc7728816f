"""Attention by dense math in PyTorch: what the kernels compute, written for reading."""

from __future__ import annotations

import math

import torch

_ODD = -1640531535


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    q_offset: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    precision: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with every option, in float32, or in float64 for float64 inputs.

    Args:
        q: [batch, heads, q_len, head_dim].
        k: [batch, kv_heads, kv_len, head_dim]; `heads` is a multiple of `kv_heads`.
        v: [batch, kv_heads, kv_len, v_dim].
        mask: Broadcasts to [batch, heads, q_len, kv_len]: bool (True is seen), or added to scores.
        q_segment_ids: [batch, q_len] integers; tokens see those of their own segment only.
        kv_segment_ids: [batch, kv_len]; `q_segment_ids` if None.
        sinks: [heads] scores of a key without a value.
        seed: [1] integer, of dropout.
        causal: No query sees a later key.
        window: How many keys back and ahead a query sees, -1 for any number.
        q_offset: Position of the first query among the keys.
        scale: Factor on the scores; ``1 / sqrt(head_dim)`` by default.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for none.
        dropout: Probability to drop a weight.
        precision: Ignored; products are as exact as torch makes them.

    Returns:
        Output [batch, heads, q_len, v_dim] in the dtype of `q`, zero where a query sees nothing;
        logarithm of the sum of exponentials [batch, heads, q_len], minus infinity there.

    Example:
        >>> x = torch.ones(1, 2, 3, 4)
        >>> out, lse = reference(x, x, x)
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3]))
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(wide) @ keys.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(wide)
    keep = _kept(scores, mask, q_segment_ids, kv_segment_ids, causal, window, q_offset)
    scores = scores.masked_fill(~keep, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    weights = weights[..., : keys.shape[2]]
    if dropout:
        if seed is None:
            raise ValueError("dropout needs a seed")
        kept = dropout_mask(seed, weights.shape, dropout).to(weights.device)
        weights = weights * kept / (1 - dropout)
    return (weights @ values).to(q.dtype), lse.to(torch.promote_types(lse.dtype, torch.float32))


def _kept(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    q_segment_ids: torch.Tensor | None,
    kv_segment_ids: torch.Tensor | None,
    causal: bool,
    window: tuple[int, int],
    q_offset: int,
) -> torch.Tensor:
    queries, keys = scores.shape[2:]
    distance = torch.arange(queries, device=scores.device)[:, None] + q_offset
    distance = distance - torch.arange(keys, device=scores.device)
    keep = torch.ones_like(distance, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    if right >= 0:
        keep &= distance >= -right
    if left >= 0:
        keep &= distance <= left
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    if q_segment_ids is not None:
        other = q_segment_ids if kv_segment_ids is None else kv_segment_ids
        keep = keep & (q_segment_ids[:, None, :, None] == other[:, None, None, :])
    return keep.expand(scores.shape)


def dropout_mask(seed: torch.Tensor, shape: torch.Size, dropout: float) -> torch.Tensor:
    """Which weights dropout keeps: the kernels' own hash, for the whole matrix.

    Args:
        seed: [1] integer.
        shape: [batch, heads, q_len, kv_len].
        dropout: Probability to drop a weight.

    Returns:
        bool, of `shape`.

    Example:
        >>> kept = dropout_mask(torch.tensor([3]), torch.Size([1, 1, 64, 64]), 0.25)
        >>> 0.7 < kept.float().mean() < 0.8
        tensor(True)
    """
    batch, heads, queries, keys = shape

    def numbers(count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32)

    salt = _mix(seed.cpu().to(torch.int32).reshape(()) ^ (numbers(batch * heads) * _ODD))
    rows = _mix(numbers(queries) ^ salt[:, None])
    bits = _mix(rows[:, :, None] + numbers(keys) * _ODD)
    return (_shift(bits, 1) >= int(dropout * 2**31)).reshape(shape)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right of int32, which torch does not have."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16)) * -2048144789
    x = (x ^ _shift(x, 13)) * -1028477387
    return x ^ _shift(x, 16)
