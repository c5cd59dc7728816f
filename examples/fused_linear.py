"""Matrix products with what follows them in one kernel: by an override, and in one's own model.

    python examples/fused_linear.py

1. An unmodified model trains twice from the same start on the device "tpu": with torch's products,
   and with `tpu::matmul` in their place. The losses agree.
2. The same block written with fused layers: bias, activation, gate and residual in two kernels.
3. The compiler says what the gated kernel costs on a TPU v6e, for 64 tokens of Llama 3 8B.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import tpu_kernels as tk
import tpu_kernels.device  # makes the device "tpu" known to torch; simulated where there is none
from tpu_kernels.ops import gated_linear, gated_matmul, linear, use_matmul

console = Console()

# Both runs compute in float32 and differ only in the order in which sums are added up.
TOLERANCE = 1e-4


class Block(nn.Module):
    """A gated feed-forward block with a residual connection, as PyTorch models have it."""

    def __init__(self, width: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class FusedBlock(Block):
    """The same block: nothing between its two kernels is written to memory but their results."""

    def forward(self, x: Tensor) -> Tensor:
        inner = gated_linear(x, self.gate.weight, self.up.weight)
        return linear(inner, self.down.weight, self.down.bias, residual=x)


def train(block: type[Block], steps: int = 5) -> list[float]:
    """Losses of a model that learns to sort the coordinates of points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), block(), nn.Linear(32, 8)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        points = torch.randn(64, 8)
        loss = F.mse_loss(model(points.to("tpu")), points.sort(dim=1).values.to("tpu"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    plain = train(Block)
    with use_matmul() as overrides:
        overridden = train(Block)
    fused = train(FusedBlock)
    distance = max(
        abs(a - b) for run in (overridden, fused) for a, b in zip(plain, run, strict=True)
    )
    if distance > TOLERANCE:
        raise SystemExit(f"the losses differ by {distance:.1g}")
    console.print(f"trained with torch's products, overridden and fused: last loss {fused[-1]:.4f}")
    console.print(f"The losses agree; the override answered {overrides.hits} products.")

    shapes = [(64, 4096), (14336, 4096), (14336, 4096)]  # 64 tokens, a layer of Llama 3 8B
    arrays = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    report = tk.compile(gated_matmul, arrays, "v6e", transpose_y=True)
    console.print(report.text, markup=False)


if __name__ == "__main__":
    main()
