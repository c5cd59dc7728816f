"""Models of `transformers`, built from configs with random weights, with our attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.integrations import transformers_attention

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 64


@pytest.fixture(autouse=True)
def registered() -> None:
    assert tk.integrations.register_attention() == "tpu_kernels"


def build(kind: str, implementation: str, **options: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation=implementation
    )


def step(model: Any, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of real tokens, and a gradient that went through attention."""
    real = torch.ones_like(TOKENS) if padding is None else padding
    logits = model(TOKENS, attention_mask=padding).logits
    logits = logits * real[..., None]  # what padding computes is nobody's business
    logits.square().sum().backward()
    return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad


@pytest.mark.parametrize(
    ("kind", "options", "padded"),
    [
        ("Llama", {}, False),
        ("Llama", {}, True),
        ("Mistral", {"sliding_window": 5}, False),
        ("Mistral", {"sliding_window": 5}, True),
    ],
)
def test_models_compute_the_same_as_with_eager_attention(
    kind: str, options: dict[str, Any], padded: bool
) -> None:
    padding = None
    if padded:
        padding = torch.ones_like(TOKENS)
        padding[0, :3] = 0
    wanted = step(build(kind, "eager", **options), padding)
    got = step(build(kind, "tpu_kernels", **options), padding)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_causal_mask_is_never_made() -> None:
    masks = []
    model = build("Llama", "tpu_kernels")
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda _, __, options: masks.append(options.get("attention_mask")), with_kwargs=True
    )
    model(TOKENS, attention_mask=torch.ones_like(TOKENS))
    assert masks == [None]


def test_generation_with_a_cache_gives_the_same_tokens() -> None:
    results = [
        build("Mistral", name, sliding_window=5)
        .eval()
        .generate(TOKENS[:1], max_new_tokens=3, do_sample=False)
        for name in ("eager", "tpu_kernels")
    ]
    assert torch.equal(*results)


def test_a_bias_of_positions_is_refused() -> None:
    x = torch.ones(1, 1, 2, 4)
    with pytest.raises(tk.ArgumentError, match="position_bias"):
        transformers_attention.attention_forward(
            torch.nn.Module(), x, x, x, None, position_bias=torch.ones(1)
        )
