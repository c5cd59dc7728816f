"""Train with a learned bias of relative positions through PyTorch's FlexAttention, on "tpu".

    python examples/flex_attention.py

Documents are packed into one sequence; a BlockMask keeps them apart. The bias is a captured tensor,
a table by distance and head, and gets its gradient from the kernel. The same model in dense math,
on the CPU, has the same losses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tpu_kernels.device  # noqa: F401  (makes the device "tpu" known to torch)

console = Console()

LENGTH, WIDTH, HEADS, TOKENS = 96, 32, 2, 16
TOLERANCE = 1e-4  # float32, summed up in another order


class Model(nn.Module):
    """One layer of attention with a bias for each head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.table = nn.Parameter(torch.zeros(HEADS, LENGTH))
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = (dense if tokens.device.type == "cpu" else flex)(q, k, v, self.table, documents)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def flex(q: Tensor, k: Tensor, v: Tensor, table: Tensor, documents: Tensor) -> Tensor:
    """Attention by mods."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - kv_idx).abs()]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])

    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device=q.device.type)
    found: Any = flex_attention(q, k, v, score_mod, mask)
    return found  # type: ignore[no-any-return]


def dense(q: Tensor, k: Tensor, v: Tensor, table: Tensor, documents: Tensor) -> Tensor:
    """The same, written out."""
    at = torch.arange(LENGTH)
    distance = at[:, None] - at
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + table[:, distance.abs()]
    keep = (distance >= 0) & (documents[:, None] == documents)
    return scores.masked_fill(~keep, -math.inf).softmax(-1) @ v


def train(device: str, steps: int = 4) -> list[float]:
    """Losses of a model that learns to repeat the last token."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    documents = (torch.arange(LENGTH) // 40).to(device)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (2, LENGTH)).to(device)
        logits = model(tokens, documents)
        loss = F.cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    ours, plain = train("tpu"), train("cpu")
    distance = max(abs(a - b) for a, b in zip(ours, plain, strict=True))
    if distance > TOLERANCE:
        raise SystemExit(f"the losses differ by {distance:.1g}")
    console.print(f"losses on tpu {[round(x, 4) for x in ours]}, the same in dense math")


if __name__ == "__main__":
    main()
