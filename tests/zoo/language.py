"""Models of `transformers` at tiny sizes, built from configs with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 64, 2, 12
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def _next_token() -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, LENGTH - 3 :] = 0
    return {**_next_token(), "attention_mask": mask}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([1, 3])}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 32), "labels": _tokens()}


def _of(name: str, text: str = "", **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        kind, _, task = name.partition(" ")
        config = getattr(transformers, f"{kind}{text}Config")(**sizes)
        return getattr(transformers, kind + task)(config)  # type: ignore[no-any-return]

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "llama": (_of("Llama ForCausalLM", **_DECODER), _next_token),
    "qwen3": (_of("Qwen3 ForCausalLM", **_DECODER, head_dim=8), _padded),
    "gemma": (_of("Gemma ForCausalLM", **_DECODER, head_dim=8), _next_token),
    "gemma3": (
        _of("Gemma3 ForCausalLM", "Text", **_DECODER, head_dim=8, sliding_window=4,
            layer_types=["sliding_attention", "full_attention"]),
        _next_token,
    ),
    "gpt2": (
        _of("GPT2 LMHeadModel", vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2,
            n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
        _next_token,
    ),
    "bert": (_of("Bert ForMaskedLM", **_SIZES, **_NO_DROPOUT), _padded),
    "vit": (
        _of("ViT ForImageClassification", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, image_size=16, patch_size=4, num_labels=5, **_NO_DROPOUT),
        _images,
    ),
    "mixtral": (
        _of("Mixtral ForCausalLM", **_DECODER, num_local_experts=4, num_experts_per_tok=2,
            output_router_logits=True,
            experts_implementation="batched_mm"),  # torch traces grouped_mm in bfloat16 only
        _next_token,
    ),
    "whisper": (
        _of("Whisper ForConditionalGeneration", vocab_size=VOCABULARY, num_mel_bins=8, d_model=32,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
            max_source_positions=16, max_target_positions=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None, dropout=0.0),
        _speech,
    ),
    "resnet": (
        _of("ResNet ForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2],
            num_labels=5, layer_type="basic"),
        _images,
    ),
}  # fmt: skip
"""Model and batch of each, made after a seed."""
