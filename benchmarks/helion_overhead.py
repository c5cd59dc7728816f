"""Cost of calling a Helion kernel's operator, beside a Pallas kernel of the same shape and grid.

Both run interleaved in one process on one thread; figures are thread CPU time per call (µs), lower
decile and median over rounds, and the difference to the Pallas operator. The program of both is
the interpreted kernel, so that what differs beyond the host's part is what the interpreter makes of
the two bodies.

Run: ``python benchmarks/helion_overhead.py [--rounds 60] [--calls 100]``
"""

from __future__ import annotations

import argparse

import helion
import helion.language as hl
import jax
import torch
from jax.experimental import pallas as pl
from overhead import measure
from rich.console import Console
from rich.table import Table

import tpu_kernels as tk

ROWS, COLUMNS = 8, 128
MOST_US = 10.0
"""What a call of a Helion operator may cost more."""


@tk.tpu_kernel("helion_overhead::helion_add")
@helion.kernel(config=helion.Config(block_sizes=[ROWS, COLUMNS]))
def helion_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smallest kernel in Helion."""
    out = torch.empty_like(x)
    for tile in hl.tile(x.shape):
        out[tile] = x[tile] + y[tile]
    return out


@tk.tpu_kernel("helion_overhead::pallas_add")
def pallas_add(x: jax.Array, y: jax.Array) -> jax.Array:
    """The same in Pallas."""

    def body(a: jax.Array, b: jax.Array, out: jax.Array) -> None:
        out[...] = a[...] + b[...]

    spec = pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    grid = (x.shape[0] // ROWS, x.shape[1] // COLUMNS)
    call = pl.pallas_call(body, grid=grid, in_specs=[spec, spec], out_specs=spec, out_shape=x)
    return call(x, y)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("shape", "call", "µs, p10", "µs, median", "above Pallas, p10", "median")
    worst = 0.0
    for shape in ((ROWS, COLUMNS), (4 * ROWS, 2 * COLUMNS)):
        x, y = torch.randn(shape), torch.randn(shape)
        calls = {
            "Pallas operator": lambda x=x, y=y: pallas_add(x, y),
            "Helion operator": lambda x=x, y=y: helion_add(x, y),
            "torch.add": lambda x=x, y=y: torch.add(x, y),
        }
        figures = measure(calls, options.rounds, options.calls)  # type: ignore[arg-type]
        unit = figures["Pallas operator"]
        for name, (low, median) in figures.items():
            above = (f"{low - unit[0]:+.1f}", f"{median - unit[1]:+.1f}")
            table.add_row(str(shape), name, f"{low:.1f}", f"{median:.1f}", *above)
        worst = max(worst, figures["Helion operator"][0] - unit[0])
    console = Console()
    console.print(table)
    console.print(f"a Helion call costs at most {worst:+.1f} µs more; the bar is {MOST_US:g}")


if __name__ == "__main__":
    main()
