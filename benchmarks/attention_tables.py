"""Compare configs of `tpu::attention` by estimated time; with --out, ship the best of each chip.

python benchmarks/attention_tables.py [--chip v6e ...] [--out tpu_kernels/tuning/tables]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import tpu_kernels as tk
from tpu_kernels.ops import attention
from tpu_kernels.tuning.nearest import Neighbour
from tpu_kernels.tuning.tables import write_table

CHIPS = ["v5e", "v5p", "v6e", "tpu7x"]
# batch, heads, kv_heads, length, head_dim; each serves calls within a factor of two of its sizes.
SHAPES = [(1, 32, 8, 4096, 128), (1, 32, 8, 16384, 128)]
TUNED = (1, 32, 8, 4096, 128)  # longer ones repeat the same blocks
CANDIDATES = [
    {"block_q": q, "block_kv": kv, "part_q": part_q, "part_kv": part_kv, "split_scale": None}
    for q, kv, part_q, part_kv in (
        (1024, 1024, 512, 512),
        (1024, 1024, 512, 256),
        (1024, 2048, 512, 512),
        (2048, 1024, 512, 512),
    )
]


def arrays(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Shapes of q, k and v."""
    batch, heads, kv_heads, length, depth = shape
    return [
        torch.empty(batch, count, length, depth, dtype=torch.bfloat16, device="meta")
        for count in (heads, kv_heads, kv_heads)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--out", type=Path, help="folder of tables to write to")
    options = parser.parse_args()
    chips = options.chip or CHIPS
    times: dict[str, list[float]] = {chip: [] for chip in chips}
    for config in CANDIDATES:
        reports = tk.compile(attention, arrays(TUNED), chips, config=config, causal=True)
        for chip, report in reports.items():
            estimate = report.estimate
            good = report.ok and estimate is not None and estimate.us is not None
            times[chip].append(estimate.us if good and estimate else float("inf"))
        shown = ", ".join(f"{chip} {times[chip][-1]:.0f} µs" for chip in chips)
        print(f"{config}: {shown}", flush=True)
    for chip in chips if options.out else ():
        best = min(range(len(CANDIDATES)), key=times[chip].__getitem__)
        config = {name: value for name, value in CANDIDATES[best].items() if value is not None}
        entries = []
        for shape in SHAPES:
            request = attention.bind(*arrays(shape), causal=True).request(chip)
            provenance = {
                "by": "estimated time, 4096 tokens, causal",
                "us": round(times[chip][best], 1),
                "candidates": len(CANDIDATES),
                "libtpu": reports[chip].libtpu_version,
            }
            entry = Neighbour(request.arrays, config, dict(request.static))
            entries.append((entry, provenance))
        print(write_table(options.out, chip, "tpu::attention", entries))


if __name__ == "__main__":
    main()
