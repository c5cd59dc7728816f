"""What the FlexAttention tests share: mods as users write them, and exact results by dense math."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, create_block_mask

from tpu_kernels._compat_torch import items_are_indices

Mod = Callable[..., torch.Tensor]


@dataclasses.dataclass
class Problem:
    """One call: queries, keys and values, mods, and the captured tensors that have gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    captured: tuple[torch.Tensor, ...] = ()

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What has a gradient."""
        return [self.q, self.k, self.v, *self.captured]

    def block_mask(self, size: int = 128) -> Any:
        """The mask as a BlockMask, None for none."""
        if self.mask_mod is None:
            return None
        batch, heads, queries, _ = self.q.shape
        return create_block_mask(
            self.mask_mod, batch, heads, queries, self.k.shape[2],
            device=self.q.device.type, BLOCK_SIZE=size,
        )  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random numbers that want a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def inputs(
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    lengths: tuple[int, int] = (150, 150),
    depth: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k and v."""
    sizes = [(heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1])]
    return [normal(batch, h, n, depth, dtype=dtype, seed=i) for i, (h, n) in enumerate(sizes)]


def exact(problem: Problem) -> list[torch.Tensor]:
    """Output, lse, and gradients of `weighted`, in float64."""
    q, k, v = (x.double() for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    indices = [torch.arange(n) for n in scores.shape]
    with items_are_indices():
        if problem.score_mod is not None:
            scores = _vmap_for_bhqkv(problem.score_mod, prefix=(0,))(scores, *indices)
        if problem.mask_mod is not None:
            keep = _vmap_for_bhqkv(problem.mask_mod, prefix=())(*indices)
            scores = scores.masked_fill(~keep, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    seen = lse > -math.inf
    weights = torch.exp(scores - lse.masked_fill(~seen, 0.0)[..., None])
    return results(weights @ v, lse, problem.leaves)


def results(out: torch.Tensor, lse: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and lse, and gradients of a weighted sum of both, unless gradients are off."""
    if not torch.is_grad_enabled():
        return [out.cpu(), lse.cpu()]
    weights = torch.linspace(-1, 1, out.numel(), device="cpu").bfloat16().reshape(out.shape)
    weights = weights.to(out.device, out.dtype)
    total = (out * weights).sum()
    total = total + (lse.masked_fill(lse == -math.inf, 0.0) * weights[..., 0]).sum()
    return [x.detach().cpu() for x in (out, lse, *torch.autograd.grad(total, leaves))]


def alibi() -> Problem:
    slopes = normal(2)
    return Problem(
        *inputs(),
        score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q) / 50,
        mask_mod=lambda b, h, q, k: q >= k,
        captured=(slopes,),
    )


def relative_table() -> Problem:
    table = normal(2, 301)
    return Problem(
        *inputs(batch=2),
        score_mod=lambda s, b, h, q, k: s + table[h, q - k + 150],
        captured=(table,),
    )


def dense_bias_in_a_window() -> Problem:
    bias = normal(2, 150, 170)
    return Problem(
        *inputs(lengths=(150, 170)),
        score_mod=lambda s, b, h, q, k: 2 * torch.tanh(s / 2) + bias[h, q, k],
        mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 40),
        captured=(bias,),
    )


def softcap_of_documents() -> Problem:
    ids = torch.arange(150) // 47
    return Problem(
        *inputs(),
        score_mod=lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
        mask_mod=lambda b, h, q, k: ids[q] == ids[k],
    )


def everything_captured() -> Problem:
    """A number, a row, a column and a gather, all with gradients; a prefix for each batch."""
    slopes, row, column, table = normal(2), normal(2, 150), normal(150), normal(301)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        s = torch.where(q % 7 == k % 5, -math.inf, s * row[b, q] + column[k])
        return s + slopes[h] * (k - q) / 50 + table[q - k + 150]

    return Problem(
        *inputs(batch=2),
        score_mod=score_mod,
        mask_mod=lambda b, h, q, k: (k <= q) | (k < 5 * (b + 1)),
        captured=(slopes, row, column, table),
    )


def neighbourhood() -> Problem:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        near = (q // 12 - k // 12).abs() <= 2
        return near & ((q % 12 - k % 12).abs() <= h + 1)

    return Problem(*inputs(lengths=(144, 144)), mask_mod=mask_mod)


def pages() -> Problem:
    """Keys of both batches in pages of one pool."""
    q, (_, k, v) = inputs(batch=2)[0], inputs(lengths=(150, 256))
    owner = torch.tensor([0, 1, 1, 0, -1, 1, 0, -1])  # of each page of 32 keys
    place = torch.tensor([0, 1, 0, 2, 0, 2, 1, 0])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (owner[k // 32] == b) & (place[k // 32] * 32 + k % 32 <= q)

    return Problem(q, k, v, mask_mod=mask_mod)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    made.__name__: made
    for made in (
        alibi,
        relative_table,
        dense_bias_in_a_window,
        softcap_of_documents,
        everything_captured,
        neighbourhood,
        pages,
    )
}
