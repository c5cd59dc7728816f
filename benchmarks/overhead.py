"""Cost of calling a registered kernel, beside a plain torch operator and what peers do.

All candidates run interleaved in one process on one thread, so that a drifting machine speed hits
them alike; the figures are thread CPU time per call (µs), lower decile and median over rounds, and
ratios to ``torch.add``.

Run: ``python benchmarks/overhead.py [--rounds 60] [--calls 100]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import torch
from rich.console import Console
from rich.table import Table

import tpu_kernels as tk

SHAPE = (8, 128)


@tk.tpu_kernel("overhead::add")
def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """The smallest kernel: what remains is the way to it and back."""
    return x + y


@torch.library.custom_op("overhead::custom_op", mutates_args=())
def custom_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same as torch's own decorator does it, around a plain torch operator."""
    return x + y


@torch.library.custom_op("overhead::custom_op_grad", mutates_args=())
def custom_op_grad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With a backward, as users of `register_autograd` write it."""
    return x + y


custom_op_grad.register_autograd(
    lambda ctx, g: (g, g), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def candidates() -> dict[str, Callable[[], object]]:
    """The calls to compare; the first is the unit."""
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    x_tpu, y_tpu = x.to("tpu"), y.to("tpu")
    x_grad = x.clone().requires_grad_()
    jitted = jax.jit(lambda a, b: a + b)

    def public_dlpack() -> torch.Tensor:
        return torch.from_dlpack(jitted(jax.dlpack.from_dlpack(x), jax.dlpack.from_dlpack(y)))

    return {
        "torch.add, cpu": lambda: torch.add(x, y),
        "kernel, cpu": lambda: add(x, y),
        "kernel through torch.ops overload, cpu": lambda: add.op(x, y),
        "kernel, cpu, new input each call": lambda: add(x.clone(), y),
        "kernel, cpu, with grad": lambda: add(x_grad, y),
        "torch.add, tpu (simulated)": lambda: torch.add(x_tpu, y_tpu),
        "kernel, tpu (simulated)": lambda: add(x_tpu, y_tpu),
        "custom_op around torch.add": lambda: custom_op(x, y),
        "custom_op + register_autograd, with grad": lambda: custom_op_grad(x_grad, y),
        "public from_dlpack both ways, no operator": public_dlpack,
    }


def measure(
    calls: dict[str, Callable[[], object]], rounds: int, count: int
) -> dict[str, tuple[float, float]]:
    """Lower decile and median of thread CPU time per call in µs, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(10):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time_ns()
            for _ in range(count):
                call()
            times[name].append((time.thread_time_ns() - start) / count / 1000)
    return {name: (sorted(t)[len(t) // 10], sorted(t)[len(t) // 2]) for name, t in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(candidates(), arguments.rounds, arguments.calls)
    unit = next(iter(figures.values()))
    table = Table("call", "µs, p10", "µs, median", "× torch.add, p10", "× torch.add, median")
    for name, (low, median) in figures.items():
        table.add_row(
            name, f"{low:.1f}", f"{median:.1f}", f"{low / unit[0]:.1f}", f"{median / unit[1]:.1f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
