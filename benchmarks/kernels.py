"""The shipped kernels beside others', by the same compiler, flags and cost model.

python benchmarks/kernels.py [--chip v6e] [--case NAME] [--peer-python PATH] [--json]

Estimates, not measurements: the compiler's bundles, simulated with copies. `--peer-python` names an
interpreter that has tokamax (and this package's dependencies but for torch), in which its rows are
computed. "Largest block" is the largest basic block of the dearest kernel: the code for one full
block of scores, which is where the time goes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matmul_peers
from attention_peers import CASES, Case, peers, step
from flex_rows import flex

from tpu_kernels.compiler import compile_function, resolve
from tpu_kernels.compiler.cost.listing import parse
from tpu_kernels.compiler.cost.translate import translate

Row = dict[str, Any]


def measure(
    case: str, what: str, name: str, fn: Callable[..., Any], avals: Sequence[Any], chip: str
) -> Row:
    """Compile a function and say what it costs."""
    row: Row = {"case": case, "what": what, "kernel": name, "chip": chip}
    with tempfile.TemporaryDirectory() as folder:
        report = compile_function(fn, avals, chip, name=name, dump=folder)
        if not report.ok or report.estimate is None or report.estimate.us is None:
            return {**row, "status": report.status, "error": report.error}
        dearest = max(report.estimate.kernels, key=lambda kernel: kernel.us * kernel.count)
        blocks = _blocks(Path(folder), dearest.name, chip)
    largest = max(blocks, key=lambda block: block["bundles"], default={})
    return {
        **row,
        "status": report.status,
        "us": report.estimate.us,
        "confidence": report.estimate.confidence,
        "kernels": {k.name: k.us * k.count for k in report.estimate.kernels if k.us > 1},
        "mxu_busy": dearest.mxu_busy / dearest.cycles,
        "largest_block": largest,
        "bundles": dearest.static_bundles,
        "spills": dearest.spills,
        "compile_s": report.seconds,
    }


def _blocks(folder: Path, kernel: str, chip: str) -> list[dict[str, int]]:
    """Basic blocks of a kernel: their bundles, cycles of the MXU, and spills."""
    details = resolve(chip).chip
    for path in folder.rglob(f"*{kernel}-*final_bundles.txt"):
        if "schedule-analysis" in path.name:
            continue
        program = translate(
            parse(path.read_text(errors="replace")),
            details.branch_delay_slots,
            details.cycles_per_vmatmul,
        )
        return [
            {
                "bundles": block.bundles,
                "mxu": block.mxu_busy,
                "matmuls": block.counts["mxu"],
                "spills": block.counts["spill"],
            }
            for block in program.blocks.values()
        ]
    return []


def ours(case: Case, chip: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """This package's attention, at its own choice of blocks."""
    import torch

    from tpu_kernels.ops import attention

    arrays = [torch.empty(a.shape, dtype=torch.bfloat16, device="meta") for a in case.avals()]
    bound = attention.bind(*arrays, causal=True)
    function = bound.function(interpret=False, target=chip)
    yield "tpu::attention", lambda q, k, v: jax.tree.leaves(function(q, k, v))[0]


def rows(case: Case, chip: str) -> Iterator[Row]:
    """Forward and training step of ours (where torch is) and of the peers at hand."""
    candidates = list(peers(case))
    if importlib.util.find_spec("torch") is not None:
        candidates = [*ours(case, chip), *candidates]
    avals = case.avals()
    grad = jax.ShapeDtypeStruct(avals[0].shape, jnp.bfloat16)
    for name, forward in candidates:
        yield measure(case.name, "forward", name, forward, avals, chip)
        yield measure(case.name, "step", name, step(forward), [*avals, grad], chip)
    if importlib.util.find_spec("torch") is not None:
        for name, forward, both in flex(case):
            yield measure(case.name, "forward", name, forward, avals, chip)
            yield measure(case.name, "step", name, both, [*avals, grad], chip)


def products(case: matmul_peers.Case, chip: str) -> Iterator[Row]:
    """Ours (where torch is), XLA's and a peer's product, with shares of the chip's peaks."""
    candidates = list(matmul_peers.peers(case))
    if importlib.util.find_spec("torch") is not None:
        candidates = [_our_product(case, chip), *candidates]
    details = resolve(chip).chip
    # v5p: both cores of a device work on one program
    peak = details.peak_ops_per_s["bf16"] * details.cores_per_device / 1e6
    for name, function in candidates:
        row = measure(case.name, "forward", name, function, case.avals(), chip)
        if "us" in row:
            passes = {"high": 3, "highest": 6}.get(case.precision or "", 1)
            row["of_peak"] = case.operations * passes / peak / row["us"]
            bandwidth = details.hbm_bytes_per_s * details.cores_per_device / 1e6
            row["of_hbm"] = case.bytes / bandwidth / row["us"]
        yield row


def _our_product(case: matmul_peers.Case, chip: str) -> tuple[str, Callable[..., Any]]:
    import torch

    from tpu_kernels.ops import gated_matmul, matmul

    arrays = [
        torch.empty(a.shape, dtype=getattr(torch, case.dtype), device="meta") for a in case.avals()
    ]
    options: dict[str, Any] = {"precision": case.precision, "activation": case.activation}
    options["transpose_y"] = case.transposed
    kernel = gated_matmul if case.gated else matmul
    if not case.gated:
        right = arrays[2:]
        options["bias"] = right.pop(0) if case.bias else None
        options["residual"] = right.pop(0) if case.residual else None
        arrays = arrays[:2]
    function = kernel.bind(*arrays, **options).function(interpret=False, target=chip)
    return kernel.name, lambda *given: jax.tree.leaves(function(*given))[0]


def _elsewhere(python: str, arguments: Sequence[str]) -> list[Row]:
    """The rows of another interpreter, which finds this package where this one does."""
    import tpu_kernels.compiler
    import tpu_kernels.dsl

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "tpu_kernels")
        package.mkdir()
        for part in Path(tpu_kernels.compiler.__file__).parent.parent.iterdir():
            (package / part.name).symlink_to(part)
        if not (package / "dsl").exists():  # a source tree keeps it elsewhere
            (package / "dsl").symlink_to(Path(tpu_kernels.dsl.__file__).parent)
        done = subprocess.run(
            [python, __file__, "--json", *arguments],
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _text(row: Row) -> str:
    head = f"{row['case']:34} {row['what']:8} {row['kernel']:36}"
    if row["status"] != "ok" or "us" not in row:
        return f"{head} {row['status']}: {row.get('error')}"
    block = row["largest_block"]
    if "of_peak" in row:
        return (
            f"{head} {row['us']:8.1f} µs  {row['of_peak']:4.0%} of peak, {row['of_hbm']:4.0%} of "
            f"HBM's, MXU busy {row['mxu_busy']:4.0%}"
        )
    return (
        f"{head} {row['us']:8.0f} µs  MXU {row['mxu_busy']:4.0%}  "
        f"largest block {block.get('bundles', 0):5} bundles, {block.get('matmuls', 0):5} matmuls, "
        f"{block.get('spills', 0):5} spills"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", default="v6e")
    parser.add_argument("--case", choices=[*CASES, *matmul_peers.CASES], action="append")
    parser.add_argument("--peer-python")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.case or ["llama3-8b/prefill_s4096"]
    arguments = ["--chip", options.chip]
    for name in names:
        arguments += ["--case", name]
    if not options.json:
        print(f"jax {jax.__version__}, {options.chip}: estimates of the compiler's code, no TPU")
    for row in _all_rows(options, names, arguments):
        print(json.dumps(row) if options.json else _text(row), flush=True)


def _all_rows(
    options: argparse.Namespace, names: Sequence[str], arguments: Sequence[str]
) -> Iterator[Row]:
    for name in names:
        if name in CASES:
            yield from rows(CASES[name], options.chip)
        else:
            yield from products(matmul_peers.CASES[name], options.chip)
    if options.peer_python:
        yield from _elsewhere(options.peer_python, arguments)


if __name__ == "__main__":
    sys.exit(main())
