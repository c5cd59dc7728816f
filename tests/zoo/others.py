"""Models by hand, of kinds that `transformers` does not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dlrm(nn.Module):
    """Recommendation: embedding bags of categories, an MLP of numbers, their products, an MLP."""

    def __init__(self, rows: tuple[int, ...] = (20, 30, 10), width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        bags = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([dense, *bags], 1)
        products = features @ features.mT
        rows, columns = torch.tril_indices(*products.shape[1:], offset=-1, device=dense.device)
        joined = torch.cat([dense, products[:, rows, columns]], 1)
        return F.binary_cross_entropy_with_logits(self.top(joined).squeeze(1), clicked)


class UNet(nn.Module):
    """Denoising: a step's embedding, convolutions with group norm, attention, a way down and up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.mix = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)
        self.width = width

    def forward(self, image: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=step.device) * -0.5)
        angles = step[:, None] * rates
        moment = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.first(image + noise)
        x = x + self.conv(F.silu(self.norm(x + moment[:, :, None, None])))
        low = self.down(x)
        flat = low.flatten(2).transpose(1, 2)
        mixed = self.mix(flat, flat, flat, need_weights=False)[0]
        low = low + mixed.transpose(1, 2).view_as(low)
        smooth = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")
        return F.mse_loss(self.last(torch.cat([self.up(low) + smooth, x], 1)), noise)


def _clicks() -> dict[str, Tensor]:
    return {
        "numbers": torch.randn(8, 6),
        "categories": torch.randint(0, 10, (8, 3, 4)),
        "clicked": torch.randint(0, 2, (8,)).float(),
    }


def _noisy() -> dict[str, Tensor]:
    noise = torch.randn(2, 3, 8, 8)
    return {"image": torch.randn(2, 3, 8, 8), "step": torch.tensor([3.0, 40.0]), "noise": noise}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "dlrm": (Dlrm, _clicks),
    "unet": (UNet, _noisy),
}
"""Model and batch of each, made after a seed."""
