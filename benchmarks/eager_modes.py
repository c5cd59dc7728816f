"""The eager modes of the simulated device: an elementwise chain and a small training step.

All candidates run in turn in one process; the figures are CPU time of the process, medians of
rounds, and their ratios.

Run: ``python benchmarks/eager_modes.py [--rounds 15]``
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import tpu_kernels.device  # noqa: F401 - installs the device
from tpu_kernels.backends.deferred import deferred_stats

tpu: Any = torch.tpu  # type: ignore[attr-defined]
CANDIDATES = ("cpu", "strict", "deferred")
WARM_UP = 5  # the first calls learn, the next run one by one, then a program is compiled


def chain(device: str) -> Callable[[], object]:
    """Sixteen elementwise operators over 5000 x 5000 values of bfloat16."""
    x = torch.randn(5000, 5000).bfloat16().to(device)
    y = torch.randn(5000, 5000).bfloat16().to(device)

    def call() -> object:
        z = x
        for _ in range(4):
            z = torch.tanh(z * 0.5 + y).mul_(1.5) - x
        return z[0, 0].item()

    return call


def step(device: str) -> Callable[[], object]:
    """One AdamW step of a language model: width 64, 2 layers, batch 4, length 32."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(128, 64), body, nn.Linear(64, 128)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randint(0, 128, (4, 33)).to(device)

    def call() -> object:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return call


def measure(make: Callable[[str], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU time of one call in ms, by candidate."""
    calls = {name: make("cpu" if name == "cpu" else "tpu") for name in CANDIDATES}
    found: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for number in range(WARM_UP + rounds):
        for name, call in calls.items():
            mode: Any = contextlib.nullcontext()
            if name == "deferred":
                mode = tpu.set_eager_mode(tpu.EagerMode.DEFER_AND_FUSE)
            with mode:
                start = time.process_time_ns()
                call()
                passed = (time.process_time_ns() - start) / 1e6
            if number >= WARM_UP:
                found[name].append(passed)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    table = Table(
        "work", *(f"{name}, ms" for name in CANDIDATES), "strict / cpu", "strict / deferred"
    )
    for title, make in (("elementwise chain", chain), ("training step", step)):
        times = measure(make, rounds)
        table.add_row(
            title,
            *(f"{times[name]:.1f}" for name in CANDIDATES),
            f"{times['strict'] / times['cpu']:.2f}",
            f"{times['strict'] / times['deferred']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(str(deferred_stats()))


if __name__ == "__main__":
    main()
