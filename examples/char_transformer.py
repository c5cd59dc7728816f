"""A small character-level transformer in plain PyTorch: nothing here knows of TPUs or kernels.

`quickstart.py` trains it four times. Attention is written with `torch.bmm` and the linear layers
have no bias, so all multiplication in the model, forward and backward, is two ATen operators:
`aten::mm` and `aten::bmm`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and its batches."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 32  # characters that the model sees
    batch: int = 16


class Attention(nn.Module):
    """Causal self-attention: [batch, context, width] in and out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        future = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        depth = width // self.heads
        # [batch, length, 3 width] -> three of [batch x heads, length, depth]
        split = self.qkv(x).reshape(batch, length, 3, self.heads, depth)
        q, k, v = split.permute(2, 0, 3, 1, 4).reshape(3, -1, length, depth)
        scores = torch.bmm(q, k.mT) / math.sqrt(depth)
        weights = scores.masked_fill(self.future[:length, :length], -torch.inf).softmax(-1)
        mixed = torch.bmm(weights, v).reshape(batch, self.heads, length, depth)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a residual branch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharTransformer(nn.Module):
    """Predicts the next character: [batch, context] of indices to [batch, context, vocabulary]."""

    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, indices: Tensor) -> Tensor:
        positions = torch.arange(indices.shape[1], device=indices.device)
        x = self.characters(indices) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class Text:
    """A text as indices into its own alphabet."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        index = {character: i for i, character in enumerate(self.alphabet)}
        self.indices = torch.tensor([index[character] for character in text])

    def batches(self, steps: int, size: Size, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Random pieces and the characters that follow them: two of [batch, context] per step."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.indices) - size.context - 1
        for _ in range(steps):
            starts = torch.randint(last, (size.batch,), generator=generator)
            pieces = torch.stack([self.indices[s : s + size.context + 1] for s in starts])
            yield pieces[:, :-1], pieces[:, 1:]
