"""Tune `tpu::matmul` for each chip by estimated time; with --out, ship the best of each.

python benchmarks/matmul_tables.py [--chip v6e ...] [--out tpu_kernels/tuning/tables]

The heuristic's own choice is a candidate, and shipped as the blocks that it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import tpu_kernels as tk
from tpu_kernels.compiler import resolve
from tpu_kernels.compiler.lowering import target_scope
from tpu_kernels.compiler.versions import libtpu_version
from tpu_kernels.ops import matmul
from tpu_kernels.ops.matmul_blocks import choose_blocks
from tpu_kernels.ops.matmul_plan import Operands, abstract, make_plan
from tpu_kernels.tuning.nearest import Neighbour
from tpu_kernels.tuning.report import TuneReport
from tpu_kernels.tuning.tables import write_table

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


def operands(index: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Operands of a shape, without data, and its options."""
    m, n, k, dtype, options = SHAPES[index]
    right = (n, k) if options.get("transpose_y") else (k, n)
    x = torch.empty(m, k, dtype=dtype, device="meta")
    return x, torch.empty(right, dtype=dtype, device="meta"), options


def entry(
    chip: str, index: int, config: dict[str, Any], us: float, candidates: int
) -> tuple[Neighbour, dict[str, Any]]:
    """A table's entry: the config, with open blocks as the heuristic chooses them on the chip."""
    x, y, options = operands(index)
    arrays = Operands(abstract(x), abstract(y))
    plan = make_plan(
        matmul.name,
        2,
        arrays,
        transposed=(False, options.get("transpose_y", False)),
        precision=options.get("precision"),
        blocks=(config["block_m"], config["block_n"], config["block_k"]),
        activation=None,
        interpret=False,
    )
    with target_scope(resolve(chip)):
        blocks = choose_blocks(arrays, plan)
    chosen = {f"block_{name}": size for name, size in zip("mnk", blocks, strict=True)}
    request = matmul.bind(x, y, **options).request(chip)
    provenance = {
        "by": "estimated time",
        "us": round(us, 1),
        "candidates": candidates,
        "libtpu": libtpu_version(),
    }
    return Neighbour(request.arrays, chosen, dict(request.static)), provenance


def tuned(chip: str, index: int) -> TuneReport:
    """Compile the candidates of a shape for a chip."""
    x, y, options = operands(index)
    configs = [
        dict(zip(("block_m", "block_n", "block_k"), blocks, strict=True))
        for blocks in BLOCKS[x.dtype]
    ]
    return tk.autotune(matmul, (x, y), configs=configs, target=chip, store=False, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--out", type=Path, help="folder of tables to write to")
    options = parser.parse_args()
    for chip in options.chip or CHIPS:
        entries = []
        for index in range(len(SHAPES)):
            report = tuned(chip, index)
            print(report, flush=True)
            best = report.best
            if best is not None and best.cost is not None:
                entries.append(
                    entry(chip, index, dict(best.config), best.cost, len(report.results))
                )
        if options.out:
            print(write_table(options.out, chip, matmul.name, entries))


if __name__ == "__main__":
    main()
