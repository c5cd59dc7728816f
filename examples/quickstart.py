"""Put your own kernel into a PyTorch model and ask the TPU compiler about it, without a TPU.

    python examples/quickstart.py            (or `make demo`; about a minute)
    python examples/quickstart.py --steps 200

1. A small transformer learns this repository's README, four times from the same start: on the CPU,
   on the simulated device "tpu", there with every matrix product replaced by a Pallas kernel, and
   the same under torch.compile. The losses agree: the kernel and its gradients are right.
2. The kernel's block sizes are tuned for a TPU v6e by the real TPU compiler.
3. The compiler says what it makes of the kernel on three generations of TPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from char_transformer import CharTransformer, Size, Text
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn import functional as F

import tpu_kernels as tk
import tpu_kernels.device  # makes the device "tpu" known to torch; simulated where there is none
from tpu_kernels.ops import bmm, matmul  # the Pallas kernels behind torch.ops.tpu.matmul and bmm

README = Path(__file__).parents[1] / "README.md"

# All runs compute in float32 and differ only in the order in which sums are added up. That moves a
# loss by about 1e-6 over a hundred steps; one wrong gradient moves it by more than 1e-2.
TOLERANCE = 1e-4

console = Console()


@dataclasses.dataclass
class Run:
    """One training run: how it went, and how many Pallas kernels it launched."""

    name: str
    losses: list[float]
    seconds: float
    launches: int

    def distance(self, other: Run) -> float:
        """The largest difference between the losses of two runs."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


@contextlib.contextmanager
def pallas_products() -> Iterator[None]:
    """Within this block, every matrix product on "tpu" runs the Pallas kernel, gradients too."""
    with tk.override("aten::mm", matmul), tk.override("aten::bmm", bmm):
        yield


def train(name: str, device: str, steps: int, *, compiled: bool = False) -> Run:
    """Train a new model on the README for some steps; always the same weights and batches."""
    size = Size()
    text = Text(README.read_text())
    torch.manual_seed(0)
    model = CharTransformer(len(text.alphabet), size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    forward = torch.compile(model, backend="tpu") if compiled else model

    losses: list[float] = []
    started, launched = time.perf_counter(), launches()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(name, total=steps)
        for pieces, following in text.batches(steps, size):
            scores = forward(pieces.to(device))
            loss = F.cross_entropy(scores.flatten(0, 1), following.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"{name}: loss {losses[-1]:.3f}")
    return Run(name, losses, time.perf_counter() - started, launches() - launched)


def launches() -> int:
    """How often this process has launched one of the two kernels."""
    return matmul.stats().launches + bmm.stats().launches


def compare_training(steps: int) -> bool:
    """Train in four ways and show that they agree."""
    console.rule(f"[bold]A transformer learns the README, {steps} steps")
    runs = [train("CPU", "cpu", steps), train("tpu", "tpu", steps)]
    with pallas_products():
        runs.append(train("tpu, Pallas products", "tpu", steps))
        runs.append(train("tpu, Pallas products, torch.compile", "tpu", steps, compiled=True))

    table = Table("run", "first loss", "last loss", "from CPU", "kernel launches", "seconds")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"{run.distance(runs[0]):.1e}",
            f"{run.launches}",
            f"{run.seconds:.1f}",
        )
    console.print(table)
    agree = all(run.distance(runs[0]) <= TOLERANCE for run in runs)
    console.print(f"Losses {'agree' if agree else 'do NOT agree'} within {TOLERANCE:g}.\n")
    return agree


def tune_and_compile(quick: bool) -> bool:
    """Tune the kernel for one chip and compile it for three, all with the real TPU compiler."""
    size = 1024 if quick else 4096
    x = torch.empty(size, size, dtype=torch.bfloat16)  # only shape and dtype matter from here on
    blocks = [(128, 128, 128), (512, 512, 512), (512, 1024, 512), (1024, 1024, 512)]
    configs = [{"block_m": m, "block_n": n, "block_k": k} for m, n, k in blocks]
    too_large = {"block_m": 4096, "block_n": 4096, "block_k": 4096}  # refused without compiling

    console.rule(f"[bold]Block sizes for [{size}, {size}] bfloat16 on v6e")
    with console.status("compiling candidates") as status:
        report = tk.autotune(
            matmul,
            (x, x),
            configs=configs[:2] if quick else [*configs, too_large],
            target="v6e",
            progress=lambda at: status.update(f"compiled {at.done} of {at.total} candidates"),
        )
    console.print(f"{report}\nThe next call uses it: {matmul.explain(x, x)}\n")

    console.rule("[bold]What the TPU compiler makes of it")
    with console.status("compiling for three generations"):
        answers = tk.compile(matmul, (x, x), target=["v5e", "v6e", "tpu7x"])
    table = Table("target", "verdict", "compiler", "VMEM", "HBM", "code", "bundles", "spills")
    for target, answer in answers.items():
        hbm = (answer.hbm_argument_bytes or 0) + (answer.hbm_output_bytes or 0)
        table.add_row(
            target,
            answer.error or "compiles",
            "cached" if answer.cached else f"{answer.seconds:.1f} s",
            f"{(answer.vmem_bytes or 0) / 2**20:.1f} MiB",
            f"{hbm / 2**20:.0f} MiB",
            f"{(answer.code_bytes or 0) / 2**10:.0f} KiB",
            f"{answer.bundles}",
            f"{answer.spills}",
        )
    console.print(table)
    return report.ok and all(answer.ok for answer in answers.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, override, tune and compile: the tour.")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    parser.add_argument("--quick", action="store_true", help="few steps and candidates")
    options = parser.parse_args()

    torch.set_num_threads(1)  # matrices this small only get slower on more
    fine = compare_training(3 if options.quick else options.steps)
    try:
        fine &= tune_and_compile(options.quick)
    except tk.MissingDependency as missing:
        console.print(f"[yellow]Nothing was compiled for a TPU.[/] {missing}")
    return 0 if fine else 1


if __name__ == "__main__":  # the compiler runs in processes of its own, which import this file
    raise SystemExit(main())
