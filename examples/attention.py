"""Give an unmodified PyTorch model fused attention on "tpu", and ask the TPU compiler about it.

    python examples/attention.py

1. A small model with torch's attention layers trains twice from the same start on the device "tpu":
   with torch's own attention, and with `tpu::attention` in its place. The losses agree.
2. Packed documents, a sliding window and attention sinks, straight from the operator.
3. The compiler says what the kernel costs on a TPU v6e, at the size of Llama 3 8B.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import tpu_kernels as tk
import tpu_kernels.device  # makes the device "tpu" known to torch; simulated where there is none
from tpu_kernels.ops import attention, use_attention

console = Console()

# Both runs compute in float32 and differ only in the order in which sums are added up.
TOLERANCE = 1e-4


class Layer(nn.Module):
    """Causal self-attention with grouped heads, as models written for PyTorch have it."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.depth = width // heads
        self.q = nn.Linear(width, heads * self.depth, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.depth, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.depth)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 2 * self.depth)).transpose(1, 2).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def train(steps: int) -> list[float]:
    """Losses of a model that learns to repeat what it saw two tokens ago."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), Layer(), Layer(), nn.Linear(64, 32)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(32, (8, 24)).to("tpu")
        loss = F.cross_entropy(model(tokens)[:, 2:].flatten(0, 1), tokens[:, :-2].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    plain = train(6)
    with use_attention() as overrides:
        ours = train(6)
    distance = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    if distance > TOLERANCE:
        raise SystemExit(f"the losses differ by {distance:.1g}")
    console.print(
        f"trained with torch's attention and with tpu::attention: last loss {ours[-1]:.4f}"
    )
    console.print(f"The losses agree; the kernel answered {overrides.hits} calls.")

    q = torch.randn(1, 8, 100, 64)
    k, v = torch.randn(2, 1, 2, 100, 64).unbind()
    documents = torch.arange(100)[None] // 40  # three documents in one sequence
    out, lse = attention(
        q, k, v, q_segment_ids=documents, sinks=torch.zeros(8), causal=True, window=(31, -1)
    )
    console.print(f"packed documents with a window and sinks: {tuple(out.shape)}, {lse.dtype} lse")

    shapes = [(1, heads, 4096, 128) for heads in (32, 8, 8)]
    arrays = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    console.print(tk.compile(attention, arrays, "v6e", causal=True).text, markup=False)


if __name__ == "__main__":
    main()
