"""`torch.nn.functional.scaled_dot_product_attention` by `tpu::attention`, for unmodified models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels.errors import ArgumentError
from tpu_kernels.ops.attention import attention, attention_backward
from tpu_kernels.registry.overrides import override
from tpu_kernels.registry.overrides.group import OverrideGroup

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SEEDS = 2**31 - 1


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the same arguments and meaning.

    Args:
        query: [batch, heads, q_len, head_dim], or without batch, or without both.
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, v_dim].
        attn_mask: Broadcasts to [batch, heads, q_len, kv_len]; bool (True is seen) or added.
        dropout_p: Probability to drop a weight, drawn from torch's generator.
        is_causal: No query sees a later key; the first query is at the first key.
        scale: Factor on the scores; ``1 / sqrt(head_dim)`` by default.
        enable_gqa: Ignored: fewer heads of keys than of queries need no permission.

    Returns:
        [batch, heads, q_len, v_dim].

    Example:
        >>> x = torch.randn(1, 2, 8, 4)
        >>> exact = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> torch.allclose(sdpa(x, x, x, is_causal=True), exact, atol=1e-5)
        True
    """
    rank = query.dim()
    if rank > 4:
        raise ArgumentError(
            f"scaled dot product attention of {rank}-d tensors",
            hint="flatten the dimensions before heads into one",
        )
    query, key, value = (_to_4d(x) for x in (query, key, value))
    seed = torch.randint(_SEEDS, (1,), device=query.device) if dropout_p else None
    out: torch.Tensor = attention(
        query,
        key,
        value,
        None if attn_mask is None else _to_4d(attn_mask),
        seed=seed,
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
    )[0]
    for _ in range(4 - rank):
        out = out.squeeze(0)
    return out


def _to_4d(x: torch.Tensor) -> torch.Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def suits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
) -> bool | str:
    """Whether `tpu::attention` computes a call of `scaled_dot_product_attention`.

    Args:
        query: As in `sdpa`; likewise the others.
        key: As in `sdpa`.
        value: As in `sdpa`.
        attn_mask: As in `sdpa`.
        dropout_p: As in `sdpa`.
        is_causal: As in `sdpa`.
        enable_gqa: Whether fewer heads of keys than of queries are meant.

    Returns:
        True, or why not in a few words, for an override's ``when``.

    Example:
        >>> suits(*[torch.ones(1, 2, 8, 4, dtype=torch.float64)] * 3)
        'torch.float64 is not a dtype of the kernel'
    """
    rank = query.dim()
    if rank not in (2, 3, 4) or key.dim() != rank or value.dim() != rank:
        return f"{rank}-d tensors"
    if query.dtype not in _DTYPES:
        return f"{query.dtype} is not a dtype of the kernel"
    if not query.dtype == key.dtype == value.dtype:
        return "several dtypes"
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an empty tensor"
    heads = [x.shape[-3] if rank > 2 else 1 for x in (query, key, value)]
    if heads[1] != heads[2] or heads[0] % heads[1] or (heads[0] != heads[1] and not enable_gqa):
        return f"{heads[0]}, {heads[1]} and {heads[2]} heads"
    if rank == 4 and not query.shape[0] == key.shape[0] == value.shape[0]:
        return "batches that broadcast"
    if attn_mask is None:
        return True
    if is_causal:
        return "a mask beside is_causal"
    if attn_mask.dim() > 4:
        return f"a {attn_mask.dim()}-d mask"
    if attn_mask.requires_grad and dropout_p:
        return "a mask that needs a gradient, with dropout"
    return True


# The operators of ATen that stand for a fused implementation --------------------------------------


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_fused_attention_overrideable`."""
    seed = torch.randint(_SEEDS, (1,), device=query.device) if dropout_p else None
    out, lse = attention(
        query,
        key,
        value,
        None if attn_bias is None else _to_4d(attn_bias),
        seed=seed,
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
    )
    kept = torch.zeros((), dtype=torch.int64, device=query.device) if seed is None else seed[0]
    empty = torch.empty(0, dtype=torch.int64, device=query.device)
    sizes = (query.shape[-2], key.shape[-2])
    return out, lse, empty, empty.clone(), *sizes, kept, torch.zeros_like(kept), query.new_empty(0)


def _fused_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: Sequence[bool],
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """`aten::_scaled_dot_product_fused_attention_overrideable_backward`."""
    grads = attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        None if attn_bias is None else _to_4d(attn_bias),
        seed=philox_seed.reshape(1) if dropout_p else None,
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
    )
    return (*(g if want else None for g, want in zip(grads, grad_input_mask, strict=False)), None)


def _suits_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
) -> bool | str:
    if return_debug_mask:
        return "the debug mask"
    if query.dim() != 4:
        return f"{query.dim()}-d tensors"
    if attn_bias is not None and attn_bias.requires_grad:
        return "a mask that needs a gradient"
    return suits(query, key, value, attn_bias, dropout_p, is_causal, enable_gqa=True)


def _suits_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: Sequence[bool],
    *_: Any,
) -> bool | str:
    if attn_bias is not None and grad_input_mask[3]:
        return "a mask that needs a gradient"
    return suits(query, key, value, attn_bias, enable_gqa=True)


class AttentionOverrides(OverrideGroup):
    """The overrides that `use_attention` makes, as one: a context manager and a switch."""

    @property
    def hits(self) -> int:
        """Calls that `tpu::attention` answered, backward operators of ATen not counted."""
        return sum(m.hits for name, m in self.members.items() if "backward" not in name)


def use_attention(*, device: str = "tpu", priority: int = 0) -> AttentionOverrides:
    """Let `tpu::attention` answer `torch.nn.functional.scaled_dot_product_attention`.

    Models that call it, eager and compiled, forward and backward, run unchanged; so do calls of the
    operators of ATen that stand for a fused implementation
    (``_scaled_dot_product_fused_attention_overrideable`` and its backward). What the kernel does
    not compute (float64, batches that broadcast, ...) is left to torch; the reason is counted.

    Args:
        device: ``"tpu"`` or ``"cpu"``.
        priority: Among several overrides; see `override`.

    Returns:
        Inactive overrides: enter them by ``with`` (this thread), or call ``enable()``.

    Example:
        >>> import tpu_kernels.device
        >>> x = torch.randn(1, 2, 8, 4, device="tpu")
        >>> with use_attention() as overrides:
        ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> overrides.hits
        1
    """
    prefix = "aten::_scaled_dot_product_fused_attention_overrideable"
    parts: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "aten::scaled_dot_product_attention": (sdpa, suits),
        prefix: (_fused, _suits_fused),
        f"{prefix}_backward": (_fused_backward, _suits_backward),
    }
    return AttentionOverrides(
        {
            name: override(name, impl, when=when, device=device, priority=priority)
            for name, (impl, when) in parts.items()
        }
    )
