"""A small language model and one way of training it, for the tests of the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 40


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def losses(
    device: str,
    steps: int = 4,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    autocast: bool = False,
    **optimizer_options: Any,
) -> list[float]:
    """Train from a fixed start and return the loss of each step."""
    torch.manual_seed(1)
    model = LanguageModel().to(device)
    tokens = torch.randint(0, VOCABULARY, (4, 12)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer_options)
    call = wrap(model)
    found = []
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = call(tokens).flatten(0, 1).float()
            loss = F.cross_entropy(logits, tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found
