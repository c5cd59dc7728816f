"""What overrides cost when a model is compiled: a 12-layer transformer, forward and backward.

Run ``python benchmarks/override_compile_time.py [--backend aot_eager] [--repeats 5]``. Compilations
with and without 20 overridden operators take turns in one process; the medians of their CPU time
are compared. The *bar* is what the project promises: at most 10 % more with overrides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tpu_kernels.device  # noqa: F401  (for the backend "tpu")
from tpu_kernels.registry.overrides import override

BAR = 1.10
OPERATORS = (
    "linear",
    "layer_norm",
    "scaled_dot_product_attention",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_softmax",
    "_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "gelu",
    "gelu_backward",
    "embedding",
    "embedding_dense_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
    "add",
)
VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 12


class Block(nn.Module):
    """One layer: attention and a feed-forward part, each normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, WIDTH] to the same."""
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length] tokens to the loss of predicting them."""
        logits = self.head(self.blocks(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def through(*args: Any, fallback: Any, **kwargs: Any) -> Any:
    """The override that changes nothing but who is asked."""
    return fallback(*args, **kwargs)


def compiled_once(model: Model, tokens: torch.Tensor, backend: str, *, overridden: bool) -> float:
    """CPU seconds of this process for the first forward and backward of a fresh compilation."""
    torch.compiler.reset()
    device = tokens.device.type
    with contextlib.ExitStack() as stack:
        if overridden:
            for name in OPERATORS:
                stack.enter_context(override(f"aten::{name}", through, device=device))
        compiled = torch.compile(model, backend=backend)
        started = time.process_time()
        compiled(tokens).backward()
        return time.process_time() - started


def main(arguments: list[str] | None = None) -> int:
    """Print the medians; the exit code says whether the bar holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = False  # the compilation is what is measured
    torch._functorch.config.enable_autograd_cache = False
    device = "tpu" if options.backend == "tpu" else "cpu"
    model = Model().to(device)
    tokens = torch.arange(2 * 16).view(2, 16).to(device)
    times: dict[bool, list[float]] = {False: [], True: []}
    for overridden in (False, True):  # imports and caches of the first time
        compiled_once(model, tokens, options.backend, overridden=overridden)
    for _ in range(options.repeats):
        for overridden, seconds in times.items():
            seconds.append(compiled_once(model, tokens, options.backend, overridden=overridden))
    plain, with_overrides = (statistics.median(times[key]) for key in (False, True))
    ratio = with_overrides / plain
    if options.json:
        found = {"plain_s": plain, "overridden_s": with_overrides, "ratio": ratio}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(
            f"{options.backend}: plain {plain:.2f} s, {len(OPERATORS)} operators overridden "
            f"{with_overrides:.2f} s of CPU time, ratio {ratio:.3f} (bar {BAR:.2f})\n"
        )
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
