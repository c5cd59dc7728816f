"""Small models by hand: what people train, at sizes that compile in seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpu_kernels.device  # noqa: F401 - before the first backward, which counts the devices


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """A GPT: token and position embeddings, blocks, a head, cross entropy."""

    def __init__(
        self,
        vocabulary: int = 64,
        width: int = 32,
        layers: int = 1,
        length: int = 16,
        heads: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        place = torch.arange(inputs.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(inputs) + self.places(place))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class ResNet(nn.Module):
    """Two convolutions with batch norm around a shortcut, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm0(self.stem(images))), 2)
        x = F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        logits = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return F.cross_entropy(logits, torch.arange(len(images), device=images.device) % 5)


def mlp() -> nn.Module:
    """Two layers that end in one number."""

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    return Perceptron()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(4, 8)),
    "gpt": (lambda: LanguageModel(dropout=0.1), lambda: torch.randint(0, 64, (2, 17))),
    "resnet": (ResNet, lambda: torch.randn(4, 3, 8, 8)),
}
"""Model and input of each, made after a seed."""


def train(
    name: str, device: str, wrap: Callable[[nn.Module], nn.Module], steps: int = 3
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some AdamW steps, and the state at their end."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make().to(device)
    batch = data().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = wrap(model)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
