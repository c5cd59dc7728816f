"""Put your own kernel into a PyTorch model and ask the TPU compiler about it, without a TPU.

    python examples/quickstart.py            (or `make demo`; about a minute)
    python examples/quickstart.py --steps 200

1. The block sizes of a Pallas matmul are tuned for a TPU v6e by the real TPU compiler.
2. A small transformer learns this repository's README, four times from the same start: on the CPU,
   on the simulated device "tpu", there with every matrix product replaced by the Pallas kernel, and
   the same under torch.compile. The losses agree: the kernel and its gradients are right.
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

# All runs compute in float32 and differ only in the order in which sums are added up. That moves
# the loss by less than 1e-6 in 60 steps; zeros in one column of one gradient move it by 3e-3.
TOLERANCE = 1e-4

NAME_WIDTH = 22  # of the names of runs, so that their progress bars line up

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
    with Progress(console=console) as progress:
        task = progress.add_task(f"{name:{NAME_WIDTH}}", total=steps)
        for pieces, following in text.batches(steps, size):
            scores = forward(pieces.to(device))
            loss = F.cross_entropy(scores.flatten(0, 1), following.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.update(
                task, advance=1, description=f"{name:{NAME_WIDTH}} loss {losses[-1]:.3f}"
            )
    return Run(name, losses, time.perf_counter() - started, launches() - launched)


def launches() -> int:
    """How often this process has launched one of the two kernels."""
    return matmul.stats().launches + bmm.stats().launches


def compare_training(steps: int) -> bool:
    """Train in four ways and show that they agree."""
    console.rule(f"[bold]A transformer learns the README: {steps} steps, four ways")
    runs = [train("CPU", "cpu", steps), train("tpu", "tpu", steps)]
    with pallas_products():
        runs.append(train("tpu + Pallas", "tpu", steps))
        runs.append(train("tpu + Pallas, compiled", "tpu", steps, compiled=True))

    table = Table("run", "first loss", "last", "off CPU", "launches", "seconds")
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
    console.print(f"The losses {'agree' if agree else 'do NOT agree'} within {TOLERANCE:g}.\n")
    return agree


def tune(x: torch.Tensor, y: torch.Tensor, blocks: list[tuple[int, int, int]]) -> bool:
    """Let the compiler choose blocks for x @ y on v6e; calls with such operands use them."""
    console.rule(f"[bold]Blocks for {list(x.shape)} @ {list(y.shape)}, {x.dtype}, on v6e")
    with console.status("compiling candidates") as status:
        report = tk.autotune(
            matmul,
            (x, y),
            configs=[{"block_m": m, "block_n": n, "block_k": k} for m, n, k in blocks],
            target="v6e",
            progress=lambda at: status.update(f"compiled {at.done} of {at.total} candidates"),
        )
    console.print(report.text, matmul.explain(x, y), "", sep="\n", markup=False, soft_wrap=True)
    return report.ok


def compile_for_three(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Show what the compiler makes of x @ y on three generations of TPU."""
    console.rule("[bold]What the TPU compiler makes of it")
    with console.status("compiling for three generations"):
        reports = tk.compile(matmul, (x, y), target=["v5e", "v6e", "tpu7x"])
    table = Table("target", "verdict", "compiled in", "VMEM", "code", "bundles", "spills")
    for target, report in reports.items():
        table.add_row(
            target,
            "ok" if report.ok else f"{report.status}: {report.error}",
            "(cached)" if report.cached else f"{report.seconds:.1f} s",
            f"{(report.vmem_bytes or 0) / 2**20:.1f} MiB",
            f"{(report.code_bytes or 0) / 2**10:.0f} KiB",
            f"{report.bundles}",
            f"{report.spills}",
        )
    console.print(table)
    return all(report.ok for report in reports.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Tune, train with, and compile a Pallas matmul.")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    parser.add_argument("--quick", action="store_true", help="few steps and few candidates")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices as small as this model's only get slower on more

    # The compiler looks at shapes and dtypes only: those of a product in the model, and large ones.
    size = Size()
    rows = torch.empty(size.batch * size.context, size.width)
    weight = torch.empty(size.width, 4 * size.width)
    large = torch.empty(4096, 4096, dtype=torch.bfloat16)

    fine = has_compiler = True
    try:
        fine &= tune(rows, weight, [(128, 128, 64), (512, 256, 64)])
        if not options.quick:
            too_large = (4096, 4096, 4096)  # refused at once, with the reason
            squares = [(128, 128, 128), (512, 512, 512), (1024, 1024, 512)]
            fine &= tune(large, large, [*squares, too_large])
    except tk.MissingDependency as missing:
        has_compiler = False
        console.print(f"Nothing is tuned or compiled for a TPU: {missing}\n", markup=False)
    fine &= compare_training(3 if options.quick else options.steps)
    if has_compiler:
        fine &= compile_for_three(large, large)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
