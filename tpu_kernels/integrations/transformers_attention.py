"""`tpu::attention` as an attention implementation of `transformers`.

The mask interface hands static masks (causal, sliding window) over as none at all: the kernel knows
them by their numbers and skips what they exclude. Only padding, packing and custom patterns become
a dense mask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpu_kernels.errors import ArgumentError, MissingDependency

NAME = "tpu_kernels"


def register_attention() -> str:
    """Make ``attn_implementation="tpu_kernels"`` known to `transformers`.

    Happens by itself in programs that use kernels of this package and import `transformers`.

    Returns:
        The name.

    Raises:
        MissingDependency: `transformers` is not installed, or too old to have the interface.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise MissingDependency(
            "attention for transformers needs transformers 4.53 or newer",
            hint="pip install transformers",
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What a model of `transformers` calls for attention.

    Args:
        module: The attention layer.
        query: [batch, heads, q_len, head_dim].
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, v_dim].
        attention_mask: What `attention_mask` made, or the model itself.
        dropout: Probability to drop a weight.
        scaling: Factor on the scores.
        is_causal: Overrides the layer's attribute of that name.
        sliding_window: Number of keys that a query sees, its own included.
        softcap: Bound on the scores.
        s_aux: [heads] sinks.
        position_bias: Not supported.

    Returns:
        [batch, q_len, heads, v_dim], and None for the weights, which are never there as a whole.

    Raises:
        ArgumentError: The model wants a bias of positions.
    """
    from tpu_kernels.ops import attention

    if position_bias is not None:
        raise ArgumentError(
            "attn_implementation='tpu_kernels' has no position_bias",
            hint="choose 'sdpa' or 'eager' for this model",
        )
    queries, keys = query.shape[2], key.shape[2]
    static = attention_mask is None
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    seed = torch.randint(2**31 - 1, (1,), device=query.device) if dropout else None
    out, _lse = attention(
        query,
        key,
        value,
        attention_mask,
        sinks=s_aux,
        seed=seed,
        causal=static and causal,
        window=(sliding_window - 1, -1) if static and sliding_window else (-1, -1),
        q_offset=keys - queries if static else 0,
        scale=scaling,
        softcap=softcap or 0.0,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """What a model of `transformers` calls to make its mask, once for all layers of a kind.

    Args:
        batch_size: Sequences.
        q_length: Queries.
        kv_length: Keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        attention_mask: [batch, kv_len], which tokens are not padding.
        local_size: Size of a sliding window, or of chunks.
        allow_is_causal_skip: Whether the mask is causal, with a window if there is one.
        allow_is_bidirectional_skip: Whether there is no mask but padding.
        config: The model's configuration.
        **options: What `transformers` needs to make a dense mask.

    Returns:
        bool [batch, 1, q_len, kv_len], or None where the kernel knows better.
    """
    from transformers.masking_utils import sdpa_mask

    dense = functools.partial(
        sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        config=config,
        **options,
    )
    if allow_is_bidirectional_skip:
        found: torch.Tensor | None = dense(
            allow_is_causal_skip=False, allow_is_bidirectional_skip=True
        )
        return found
    window = getattr(config, "sliding_window", None)
    known = local_size is None or local_size == window or kv_length < local_size
    aligned = not isinstance(q_offset, torch.Tensor) and (
        kv_offset + kv_length == q_offset + q_length
    )
    # Reading a mask's values while a graph is traced would break the graph.
    unpadded = attention_mask is None or (
        not torch.compiler.is_compiling() and bool(attention_mask.all())
    )
    if allow_is_causal_skip and known and aligned and unpadded:
        return None
    found = dense(allow_is_causal_skip=False)
    return found
