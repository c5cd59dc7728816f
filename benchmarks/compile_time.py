"""How long the TPU compiler takes for a bf16 matmul: cold, warm and from the cache.

python benchmarks/compile_time.py [--size 4096]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from published_kernels import build

from tpu_kernels.compiler import CompileReport, chips, compile_function, shutdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=4096)
    size = parser.parse_args().size
    row = {"kind": "docs_matmul", "spec": f"[{size}, {size}, {size}]FalseFalse"}
    built = build({**row, "config": [512, 512, 512]})
    if built is None:
        raise SystemExit("the matmul cannot be built")
    jax.eval_shape(jnp.zeros_like, built.avals[0])  # JAX's own start is not what is measured

    def once(chip: str, *, cache: bool) -> tuple[float, CompileReport]:
        started = time.perf_counter()
        report = compile_function(built.fn, built.avals, chip, name="matmul", cache=cache)
        return time.perf_counter() - started, report

    print(f"{'chip':6} {'cold s':>7} {'warm s':>7} {'compiler s':>10} {'cached s':>8}  estimate")
    for chip in chips():
        shutdown()
        cold, _ = once(chip, cache=False)
        warm, report = once(chip, cache=False)
        once(chip, cache=True)
        cached, _ = once(chip, cache=True)
        time_us = report.estimate.us if report.estimate else None
        shown = f"{time_us:.0f} µs" if time_us else "none"
        print(f"{chip:6} {cold:7.2f} {warm:7.2f} {report.seconds:10.2f} {cached:8.3f}  {shown}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        import os

        os.environ["TPU_KERNELS_CACHE_DIR"] = str(Path(folder))
        main()
