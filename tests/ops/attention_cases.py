"""What the attention tests share: problems, exact results, and what rounding explains."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tpu_kernels.ops.attention_reference import reference

OPTIONAL = ("mask", "sinks")  # optional operands that have gradients


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and options of one call; operands are made of them."""

    heads: tuple[int, int] = (2, 1)
    lengths: tuple[int, int] = (200, 200)
    depths: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.float32
    batch: int = 1
    mask: str | None = None
    segments: int = 0
    sinks: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def arrays(self, seed: int = 0) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """q, k and v; other tensors by name."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        (heads, kv_heads), (queries, keys), (depth, depth_v) = self.heads, self.lengths, self.depths
        main = [
            normal(self.batch, heads, queries, depth),
            normal(self.batch, kv_heads, keys, depth),
            normal(self.batch, kv_heads, keys, depth_v),
        ]
        others: dict[str, Any] = {}
        if self.mask == "bool":
            others["mask"] = torch.rand(1, heads, queries, keys, generator=generator) > 0.4
        elif self.mask == "padding":
            others["mask"] = torch.rand(self.batch, 1, 1, keys, generator=generator) > 0.4
        elif self.mask == "bias":
            others["mask"] = normal(self.batch, 1, queries, keys)
        if self.segments:
            for name, length in (("q_segment_ids", queries), ("kv_segment_ids", keys)):
                ids = torch.randint(
                    self.segments, (self.batch, length), generator=generator, dtype=torch.int32
                )
                others[name] = ids.sort(dim=1).values
        if self.sinks:
            others["sinks"] = normal(heads)
        options = dict(self.options)
        if options.get("dropout"):
            others["seed"] = torch.tensor([seed + 7], dtype=torch.int32)
        return main, {**others, **options}


def results(
    function: Any, main: list[torch.Tensor], keywords: dict[str, Any], **more: Any
) -> list[torch.Tensor]:
    """Output, lse, and the gradients of a weighted sum of both where they are finite."""
    leaves = [x.detach().clone().requires_grad_() for x in main]
    keywords = dict(keywords)
    for name in OPTIONAL:
        x = keywords.get(name)
        if x is not None and x.is_floating_point() and not keywords.get("dropout"):
            keywords[name] = x.detach().clone().requires_grad_()
            leaves.append(keywords[name])
    out, lse = function(*leaves[:3], **keywords, **more)
    # weights that every dtype holds exactly, so that all calls differentiate the same function
    weights = torch.linspace(-1, 1, out.numel()).bfloat16().double().reshape(out.shape)
    total = (out * weights.to(out.dtype)).sum()
    finite = lse > -torch.inf
    total = total + (lse.masked_fill(~finite, 0.0) * weights[..., 0].to(lse.dtype)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def exact(main: list[torch.Tensor], keywords: dict[str, Any]) -> list[torch.Tensor]:
    """The same in float64."""
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in keywords.items()
    }
    return results(reference, [x.double() for x in main], wide)


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Normwise, within what rounding explains.

    float32: sums of a few hundred terms twice in a row, each off by at most some hundred eps32 of
    the terms' absolute values, which cancel: 1e-5 leaves a factor of ten. bfloat16: no more than
    twice the error of the exact result rounded to bfloat16, which is what a perfect kernel has.
    """
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite), f"result {number}: not finite elsewhere"
        error = (a.double() - b)[finite].norm()
        size = b[finite].norm()
        rounded = (b.to(a.dtype).double() - b)[finite].norm()
        allowed = max(2 * rounded, 1e-5 * size) if dtype == torch.bfloat16 else 1e-5 * size
        assert error <= allowed + 1e-7, f"result {number}: off by {error / size:.2g} of its norm"
