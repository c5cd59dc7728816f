"""Tune `tpu::matmul` for each chip by estimated time; with --out, ship what beats the heuristic.

python benchmarks/matmul_tables.py [--chip v6e ...] [--out tpu_kernels/tuning/tables]

The heuristic's own choice is a candidate; where it is the best, there is nothing to ship.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import tpu_kernels as tk
from tpu_kernels.ops import matmul
from tpu_kernels.tuning import TuningCache
from tpu_kernels.tuning.shipping import write_tables

CHIPS = ["v5e", "v5p", "v6e", "tpu7x"]
# Each serves calls within a factor of two of its sizes. M, N, K, dtype, options.
SHAPES: list[tuple[int, int, int, torch.dtype, dict[str, Any]]] = [
    (4096, 4096, 4096, torch.bfloat16, {}),
    (8192, 28672, 4096, torch.bfloat16, {"transpose_y": True}),
    (2048, 2048, 2048, torch.float32, {"precision": "high"}),
]
BLOCKS = {
    torch.bfloat16: [(1024, 2048, 512), (2048, 2048, 512), (2048, 1024, 1024), (1024, 1024, 1024)],
    torch.float32: [(1024, 1024, 512), (512, 1024, 1024), (1024, 512, 1024), (512, 512, 2048)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--shape", type=int, action="append", help="index of a shape")
    parser.add_argument("--out", type=Path, help="folder of tables to write to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = TuningCache(folder)
        for chip in options.chip or CHIPS:
            for index in options.shape or range(len(SHAPES)):
                m, n, k, dtype, fixed = SHAPES[index]
                right = (n, k) if fixed.get("transpose_y") else (k, n)
                x = torch.empty(m, k, dtype=dtype, device="meta")
                y = torch.empty(right, dtype=dtype, device="meta")
                configs = [
                    dict(zip(("block_m", "block_n", "block_k"), blocks, strict=True))
                    for blocks in BLOCKS[dtype]
                ]
                report = tk.autotune(
                    matmul, (x, y), configs=configs, target=chip, cache=cache, **fixed
                )
                print(report, flush=True)
            if options.out:
                done = write_tables(cache.records(), options.out, {matmul.name: matmul})
                print(done, flush=True)


if __name__ == "__main__":
    main()
