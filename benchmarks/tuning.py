"""What tuning costs, and what it survives: the bars of the autotuner, measured.

    python benchmarks/tuning.py [lookup] [candidates] [kill] [writers] [--short]

- ``lookup``: a call whose config is looked up beside the same call with the config passed by the
  caller, thread CPU time, interleaved. Bar: 1 µs.
- ``candidates``: the shipped matmul over its whole space for one chip, by the TPU compiler, into an
  empty cache. Bar: 5 minutes on two cores. On a busy machine look at the CPU time: half of what the
  workers used plus what the tuning process used is what two idle cores would take.
- ``kill``: a search that is killed (SIGKILL) at random moments and started again until it ends.
  Bar: nothing that was decided is tried again but what was in hand at the kill.
- ``writers``: eight processes that write one cache for a minute, to keys of their own and to common
  ones, while one reads. Bar: nothing is lost, nothing is damaged.

Exit code 1 if a bar is missed. ``--short`` takes a sixth of the time. Nothing here runs on a TPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LOOKUP_US = 1.0
CANDIDATES_S = 300.0
WRITERS = 8


def lookup(short: bool) -> bool:
    """A call with and without its config."""
    import jax
    import torch

    import tpu_kernels as tk
    from tpu_kernels.tuning import TuningCache, lookup

    @tk.tpu_kernel("bench::tuned", configs={"block": [8, 16]})
    def tuned(x: jax.Array, *, block: int = 8) -> jax.Array:
        return x + 1

    x = torch.ones(8, 128)
    with tempfile.TemporaryDirectory() as folder:
        request = tuned.bind(x).request("v6e")
        lookup.store(request, TuningCache(folder), {"block": 16}, 1.0)
        calls: dict[str, Callable[[], object]] = {
            "passed": lambda: tuned(x, block=16),
            "tuned": lambda: tuned(x),
        }
        for call in calls.values():
            for _ in range(50):
                call()
        if tuned.config_for(x).provenance != "tuned":
            raise RuntimeError("the tuned config is not in use")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(40 if short else 200):
            for name in list(calls)[:: 1 if turn % 2 else -1]:
                call, started = calls[name], time.thread_time_ns()
                for _ in range(200):
                    call()
                times[name].append((time.thread_time_ns() - started) / 200e3)
    # The lower decile: what is above it is the neighbours' work.
    low = {name: statistics.quantiles(values, n=10)[0] for name, values in times.items()}
    gap = low["tuned"] - low["passed"]
    print(
        f"lookup: a call takes {low['passed']:.2f} µs with its config passed, "
        f"{low['tuned']:.2f} µs with a tuned one; difference {gap:.2f} µs (bar {LOOKUP_US} µs)"
    )
    return gap < LOOKUP_US


def candidates(short: bool) -> bool:
    """The shipped matmul over its space."""
    import torch

    from tpu_kernels.ops.matmul import matmul
    from tpu_kernels.tuning import autotune

    size = 1024 if short else 4096
    x = torch.empty(size, size, dtype=torch.bfloat16)
    before = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TPU_KERNELS_CACHE_DIR"] = folder
        report = autotune(matmul, (x, x), target="v6e", cache=Path(folder) / "tuned")
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() - before[1]
    theirs = after.ru_utime + after.ru_stime - before[0].ru_utime - before[0].ru_stime
    critical = own + theirs / 2
    tried = sum(row.ok for row in report.results)
    print(
        f"candidates: {len(report.results)} configs ({tried} compiled) in {wall:.0f} s; CPU "
        f"{own:.0f} s here and {theirs:.0f} s in workers, so {critical:.0f} s on two idle cores "
        f"(bar {CANDIDATES_S:.0f} s, 60 configs)"
    )
    return critical < CANDIDATES_S and len(report.results) >= 60


SEARCH = """
import json, sys, jax, torch
from jax.experimental import pallas as pl
import tpu_kernels as tk

@tk.tpu_kernel("bench::killed")
def killed(x: jax.Array, *, block: int = 8) -> jax.Array:
    def body(a, out):
        out[...] = a[...] * 2
    spec = pl.BlockSpec((block, 128), lambda i: (i, 0))
    return pl.pallas_call(body, grid=(x.shape[0] // block,), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

def watch(activity):
    if activity.stage == "compiling":
        for config in activity.running:
            print(json.dumps({"begun": config["block"]}), flush=True)

tk.autotune(killed, torch.empty(4096, 128), configs={"block": [8 * 2**n for n in range(10)]},
            target="v6e", cache=sys.argv[1], watch=watch, progress=lambda progress: print(
                json.dumps({"decided": progress.row.config["block"]}), flush=True))
print(json.dumps({"end": True}), flush=True)
"""


def kill(short: bool) -> bool:
    """A search that is killed again and again."""
    kills, again, lost = 0, 0, 0
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "search.py"
        script.write_text(SEARCH)
        known: set[int] = set()
        most = 2 if short else 8
        while True:
            running = subprocess.Popen(
                [sys.executable, str(script), str(Path(folder) / "tuned")],
                stdout=subprocess.PIPE,
                text=True,
                # Without the store of compile results: the journal alone has to know.
                env={**os.environ, "TPU_KERNELS_CACHE_DIR": str(Path(folder) / str(kills))},
            )
            if running.stdout is None:
                raise RuntimeError("no pipe")
            wanted = chance.randrange(1, 6) if kills < most else sys.maxsize
            begun: set[int] = set()
            decided: list[int] = []
            ended = False
            for line in running.stdout:
                event = json.loads(line)
                ended = ended or "end" in event
                if "begun" in event:
                    begun.add(event["begun"])
                elif "decided" in event:
                    decided.append(event["decided"])
                    if len(set(decided) - known) >= wanted:
                        time.sleep(chance.random() * 0.5)
                        os.kill(running.pid, signal.SIGKILL)
                        wanted = sys.maxsize
            running.wait()
            repeated = begun & known
            again += len(repeated)
            recalled = [block for block in decided if block in known and block not in begun]
            lost += len(known - set(recalled) - repeated)
            known |= set(decided)
            if running.returncode == 0:
                break
            # What was reported in the instant of the kill may not be written yet.
            known -= set(decided[-1:])
            kills += 1
    print(
        f"kill: killed {kills} times; {again} decided candidates were compiled again, {lost} were "
        "forgotten (bar 0)"
    )
    return ended and not again and not lost


WRITER = """
import sys, time
from tpu_kernels.tuning.cache import TuningCache
cache, me, n = TuningCache(sys.argv[1]), int(sys.argv[2]), 0
until = time.time() + float(sys.argv[3])
while time.time() < until:
    cache.put({"kernel": "bench::k", "writer": me, "n": n}, {"n": n, "pad": "x" * (n % 997)}, 1.0)
    common = n % 50
    cache.put({"kernel": "bench::k", "common": common}, {"common": common, "by": me}, 1.0)
    read = cache.get({"kernel": "bench::k", "common": (n * 7) % 50})
    assert read is None or read.config["common"] == (n * 7) % 50
    n += 1
print(n)
"""


def writers(short: bool) -> bool:
    """Eight processes, one cache."""
    from tpu_kernels.tuning.cache import TuningCache

    seconds = 10 if short else 60
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", WRITER, folder, str(me), str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for me in range(WRITERS)
        ]
        counts = [int(process.communicate()[0] or -1) for process in running]
        failed = sum(process.returncode != 0 for process in running)
        cache = TuningCache(folder)
        damaged = len(cache.verify())
        lost = sum(
            (found := cache.get({"kernel": "bench::k", "writer": me, "n": n})) is None
            or found.config["n"] != n
            for me, count in enumerate(counts)
            for n in range(count)
        )
        leftovers = len(list(Path(folder).glob("*/.*")))
    print(
        f"writers: {WRITERS} processes, {seconds} s, {2 * sum(counts)} records written; "
        f"{failed} writers failed, {lost} records lost, {damaged} damaged, {leftovers} left over "
        "(bar 0)"
    )
    return not (failed or damaged or lost or leftovers)


def main() -> int:
    """Measure what was asked for, or everything."""
    parts = {"lookup": lookup, "candidates": candidates, "kill": kill, "writers": writers}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--short", action="store_true", help="a sixth of the time")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    missed = [name for name in options.parts or parts if not parts[name](options.short)]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
