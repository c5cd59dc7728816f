"""Host time of one call on the real TorchTPU: operators of torch, kernels of ours, its own jax_op.

    tpu-kernels run --torch-tpu benchmarks/torch_tpu_overhead.py

Nothing is said about a TPU: the device is an XLA:CPU plug-in, arrays have 64 elements, and what is
shown is the lower decile (and the median) of the calling thread's CPU time over batches that take
turns. ``TPU_KERNELS_TORCH_TPU_CALLS=public`` measures the other way in which kernels call TorchTPU.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import torch

from tpu_kernels.backends.torch_tpu import detection

BATCHES, CALLS = 40, 100


def batch(call: Callable[[], object]) -> float:
    """CPU time of the calling thread for one call in µs, averaged over a batch."""
    torch.accelerator.synchronize()
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - start) / CALLS / 1e3


def measure(cases: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Lower decile and median of every case's batches, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(BATCHES):
        for name, call in cases.items():
            times[name].append(batch(call))
    return {
        name: (sorted(found)[len(found) // 10], statistics.median(found))
        for name, found in times.items()
    }


def main() -> None:
    """Print a table."""
    if not detection.owns_device():
        sys.stdout.write("skipped: start with `tpu-kernels run --torch-tpu`\n")
        return
    import tpu_kernels as tk
    from tpu_kernels.backends.torch_tpu import backend

    warnings.filterwarnings("ignore", message="<TorchTpu/")
    device_module: Any = torch.tpu  # type: ignore[attr-defined]

    @tk.tpu_kernel("bench::add")
    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    @tk.tpu_kernel("bench::scaled")
    def scaled(x: jax.Array, y: jax.Array, a: int, b: float, c: str) -> jax.Array:
        return a * x + y if c == "add" else b * x

    @device_module.pallas.jax_op("bench::add_theirs")
    def theirs(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    @device_module.pallas.jax_op("bench::scaled_theirs")
    def scaled_theirs(x: jax.Array, y: jax.Array, a: int, b: float, c: str) -> jax.Array:
        return a * x + y if c == "add" else b * x

    x = torch.randn(8, 8).to("tpu")
    cases: dict[str, Callable[[], object]] = {
        "aten::add": lambda: x + x,
        "aten::mm": lambda: x @ x,
        f"kernel ({backend.call_path()})": lambda: torch.ops.bench.add(x, x),
        f"kernel, 3 static arguments ({backend.call_path()})": lambda: torch.ops.bench.scaled(
            x, x, 2, 0.5, "add"
        ),
        "torch.tpu.pallas.jax_op": lambda: torch.ops.bench.add_theirs(x, x),
        "jax_op, 3 static arguments": lambda: torch.ops.bench.scaled_theirs(x, x, 2, 0.5, "add"),
    }
    with torch.no_grad():
        for call in cases.values():
            call()
        for name, (best, median) in measure(cases).items():
            sys.stdout.write(f"{name:<40} {best:6.1f} µs, median {median:6.1f} µs\n")
        with tk.override("aten::mm", torch.ops.bench.add):
            ((best, median),) = measure({"": cases["aten::mm"]}).values()
        name = "aten::mm overridden by the kernel"
        sys.stdout.write(f"{name:<40} {best:6.1f} µs, median {median:6.1f} µs\n")


if __name__ == "__main__":
    main()
