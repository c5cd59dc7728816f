"""A training step of a small language model: eager on the CPU, on the simulated device, compiled.

Width 256, 4 layers, batch 8, length 128, AdamW. The candidates run interleaved in one process, so
that a drifting machine speed hits them alike.

Run: ``python benchmarks/compiled_models.py [--rounds 5] [--layers 4] [--width 256]``
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import tpu_kernels.device  # noqa: F401 - installs the device
from tpu_kernels.backends.graphs import compile_stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lowering.models import LanguageModel

Step = Callable[[], float]
CANDIDATES = {
    "CPU eager": ("cpu", False),
    "tpu strict": ("tpu", False),
    "CPU tensors compiled": ("cpu", True),
    "tpu compiled": ("tpu", True),
}


def training_step(device: str, options: argparse.Namespace, *, compiled: bool) -> Step:
    """One AdamW step; returns the loss."""
    torch.manual_seed(0)
    model = LanguageModel(512, options.width, options.layers, options.length, heads=4).to(device)
    tokens = torch.randint(0, 512, (options.batch, options.length + 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    run = torch.compile(model, backend="tpu", fullgraph=True) if compiled else model

    def step() -> float:
        optimizer.zero_grad()
        loss = run(tokens)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    steps = {
        name: training_step(device, options, compiled=compiled)
        for name, (device, compiled) in CANDIDATES.items()
    }
    first: dict[str, float] = {}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for round_number in range(options.rounds + 1):
        for name, step in steps.items():
            started, busy = time.perf_counter(), time.process_time()
            losses[name] = step()
            if round_number == 0:  # compiles
                first[name] = time.perf_counter() - started
                continue
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - busy)
    table = Table(title=f"ms per AdamW step; torch {torch.__version__}, {os.cpu_count()} cores")
    for heading in (
        "candidate",
        "first",
        "median",
        "best",
        "CPU time",
        "median / CPU eager",
        "loss",
    ):
        table.add_column(heading, justify="left" if heading == "candidate" else "right")
    base = statistics.median(wall["CPU eager"])
    for name in steps:
        median = statistics.median(wall[name])
        figures = (first[name], median, min(wall[name]), statistics.median(cpu[name]))
        table.add_row(
            name,
            *(f"{1e3 * f:.0f}" for f in figures),
            f"{median / base:.2f}",
            f"{losses[name]:.4f}",
        )
    console = Console()
    console.print(table)
    stats = compile_stats()
    console.print(
        f"{stats.graphs} graphs, {stats.programs} programs, {stats.nodes} operators in them; "
        f"outside: {stats.left or 'none'}. The optimiser runs by torch, operator by operator."
    )


if __name__ == "__main__":
    main()
