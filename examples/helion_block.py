"""Kernels written in Helion take the place of PyTorch's in a transformer block, without a TPU.

    python examples/helion_block.py            (half a minute)

1. A fused RMSNorm + residual and an attention become operators, with gradients by their references.
2. They override `aten::rms_norm` and `aten::scaled_dot_product_attention` in a model that knows
   nothing of them; results and gradients agree with PyTorch's.
3. The TPU compiler says what both cost on a TPU v6e.
"""

from __future__ import annotations

import argparse
import math

import helion
import helion.language as hl
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import tpu_kernels as tk
import tpu_kernels.device  # makes the device "tpu" known to torch; simulated where there is none

console = Console()

# Both sides compute in float32 and differ only in the order in which sums are added up.
TOLERANCE = 1e-4


def rms_norm_residual_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in torch: the norm of a sum, and the sum.

    Not by `F.rms_norm`, which the kernel takes the place of: its backward would be this kernel's.
    """
    total = x + residual
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return total * scale * weight, total


@tk.tpu_kernel(
    "helion_block::rms_norm_residual",
    reference=rms_norm_residual_reference,
    backward="reference",
)
@helion.kernel(config=helion.Config(block_sizes=[64]))
def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of ``x + residual`` along the last of two dimensions, and that sum."""
    rows, _ = x.shape
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    for tile in hl.tile(rows):
        summed = x[tile, :].to(torch.float32) + residual[tile, :].to(torch.float32)
        mean = torch.mean(summed * summed, dim=-1, keepdim=True)
        total[tile, :] = summed.to(x.dtype)
        scaled = summed * torch.rsqrt(mean + eps) * weight[:].to(torch.float32)
        out[tile, :] = scaled.to(x.dtype)
    return out, total


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the kernel computes, in torch."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


@tk.tpu_kernel("helion_block::attention", reference=attention_reference, backward="reference")
@helion.kernel(config=helion.Config(block_sizes=[1, 64, 64]))
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over ``[batch x heads, length, head_dim]``, the scores never written to memory."""
    heads, length, dynamic_dim = q.shape
    dim = hl.specialize(dynamic_dim)
    scale = 1.0 / math.sqrt(dim)
    keys = k.transpose(1, 2)
    out = torch.empty_like(q)
    for head, rows in hl.tile([heads, length]):
        top = hl.full([head, rows], float("-inf"), dtype=torch.float32)
        total = torch.full_like(top, 0.0)
        acc = hl.zeros([head, rows, dim], dtype=torch.float32)
        for columns in hl.tile(k.size(1)):
            scores = torch.bmm(q[head, rows, :], keys[head, :, columns]) * scale
            higher = torch.maximum(top, torch.amax(scores, -1))
            weights = torch.exp(scores - higher[:, :, None])
            shrink = torch.exp(top - higher)
            total = total * shrink + torch.sum(weights, -1)
            acc = torch.baddbmm(acc * shrink[:, :, None], weights.to(v.dtype), v[head, columns, :])
            top = higher
        out[head, rows, :] = (acc / total[:, :, None]).to(out.dtype)
    return out


class Block(nn.Module):
    """A transformer block in PyTorch's own functions, as models written for it have it."""

    def __init__(self, width: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normal = F.rms_norm(x, (width,), self.norm, 1e-6)
        parts = self.qkv(normal).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return x + self.down(mixed.transpose(1, 2).reshape(batch, length, width))


def rms_norm_by_helion(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`aten::rms_norm` by the fused kernel, nothing added."""
    rows = x.reshape(-1, x.shape[-1])
    scale = torch.ones_like(rows[0]) if weight is None else weight
    out, _ = rms_norm_residual(rows, torch.zeros_like(rows), scale, eps or 1e-6)
    return out.view(x.shape)


def attention_by_helion(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """`aten::scaled_dot_product_attention` by the kernel, heads and batch in one dimension."""
    flat = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    return attention(*flat).view(q.shape)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> bool:
    """Whether a call is what the kernel computes: no mask, no dropout, no other scale."""
    return q.dim() == 4 and not any(rest) and not any(options.values())


def step(model: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """The model's result and the gradient of its norm's weight, on the CPU."""
    model.zero_grad()
    result = model(x)
    result.square().mean().backward()
    gradient = model.norm.grad
    if gradient is None:
        raise SystemExit("the norm's weight has no gradient")
    return result.detach().cpu(), gradient.cpu()


def main() -> None:
    """Run the model both ways, and ask the compiler."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096, help="of the rows that are compiled")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, x = Block().to("tpu"), torch.randn(2, 64, 128).to("tpu")
    expected = step(model, x)
    norm = tk.override("aten::rms_norm", rms_norm_by_helion)
    mix = tk.override(
        "aten::scaled_dot_product_attention", attention_by_helion, when=plain_attention
    )
    with norm, mix:
        found = step(model, x)
    for what, ours, theirs in zip(("result", "gradient"), found, expected, strict=True):
        worst = float((ours - theirs).abs().max())
        if worst > TOLERANCE:
            raise SystemExit(f"the {what} is off by {worst}")
        console.print(f"{what}: largest difference {worst:.1e}")
    console.print(f"overridden: rms_norm {norm.hits} time(s), attention {mix.hits} time(s)")

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    wide = meta(2048, options.width)
    console.print(
        str(tk.compile(rms_norm_residual, (wide, wide, meta(options.width)), target="v6e"))
    )
    console.print(str(tk.compile(attention, (meta(8, 1024, 128),) * 3, target="v6e")))


if __name__ == "__main__":
    main()
