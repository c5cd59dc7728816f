"""What an operator costs on the simulated device, beside the same operator on the CPU.

All candidates run interleaved in one process on one thread, so that a drifting machine speed hits
them alike; the figures are thread CPU time per call (µs), best and median over rounds.

Run: ``python benchmarks/device_overhead.py [--rounds 40] [--calls 200]``
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import tpu_kernels.device  # noqa: F401 - installs the device

DEVICES = ("cpu", "tpu")
STEP_CALLS = 2  # a training step takes a thousand times as long as an operator


def operators(device: str) -> dict[str, Callable[[], object]]:
    """The calls to compare, on small tensors, where the cost is the way to the kernel."""
    x, y = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)
    big = torch.randn(64, 64).to(device)
    weight = torch.randn(64, 64).to(device).requires_grad_()
    scale, bias = torch.ones(64).to(device), torch.zeros(64).to(device)
    empty = torch.empty(0).to(device)
    return {
        "x + y": lambda: x + y,
        "x + 1": lambda: x + 1,
        "x.add_(y)": lambda: x.add_(y),
        "relu": lambda: torch.relu(x),
        "softmax": lambda: torch.softmax(x, -1),
        "mm 64x64": lambda: torch.mm(big, big),
        "layer_norm": lambda: F.layer_norm(big, (64,), scale, bias),
        "x.view(64)": lambda: x.view(64),
        "x.t()": lambda: x.t(),
        "x[1]": lambda: x[1],
        "clone": lambda: x.clone(),
        "empty_like": lambda: torch.empty_like(x),
        "cat": lambda: torch.cat((x, y)),
        "mul(out=empty)": lambda: torch.mul(x, y, out=empty.resize_(0)),
        "linear, recording": lambda: F.linear(big, weight),
    }


def training_step(device: str) -> Callable[[], object]:
    """One AdamW step of a transformer encoder: width 64, 2 layers, batch 4, length 32."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(4, 32, 64).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure(call: Callable[[], object], calls: int) -> float:
    """CPU time of this thread and of the autograd engine's, per call, in µs."""
    start = time.process_time_ns()
    for _ in range(calls):
        call()
    return (time.process_time_ns() - start) / calls / 1e3


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_device = {device: operators(device) for device in DEVICES}
    names = list(by_device["cpu"])
    steps = {device: training_step(device) for device in DEVICES}
    times: dict[tuple[str, str], list[float]] = {}
    for round_number in range(options.rounds + 1):
        for name in names:
            for device in DEVICES:
                spent = measure(by_device[device][name], options.calls)
                if round_number:  # the first round generates the handlers
                    times.setdefault((name, device), []).append(spent)
        for device in DEVICES:
            spent = measure(steps[device], STEP_CALLS)
            if round_number:
                times.setdefault(("training step", device), []).append(spent)
    table = Table(
        title=f"µs of CPU time per call; torch {torch.__version__}, {os.cpu_count()} cores"
    )
    for heading in (
        "operator",
        "cpu best",
        "cpu median",
        "tpu best",
        "tpu median",
        "more",
        "ratio",
    ):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for name in [*names, "training step"]:
        here, there = times[name, "cpu"], times[name, "tpu"]
        medians = statistics.median(here), statistics.median(there)
        figures = (min(here), medians[0], min(there), medians[1], medians[1] - medians[0])
        table.add_row(name, *(f"{f:.1f}" for f in figures), f"{medians[1] / medians[0]:.1f}")
    console = Console()
    console.print(table)
    console.print(
        "'more' and 'ratio' compare the medians: what an operator pays for being simulated."
    )


if __name__ == "__main__":
    main()
