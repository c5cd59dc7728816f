"""Random kernels, many of them broken, through `check` and the real TPU compiler.

python benchmarks/fuzz_compiler.py [--cases 500] [--first 0] [--verbose]

What must hold: this process survives, every case ends in a report, and every refusal says what is
wrong in words of the catalogue or of the exception that the kernel's own code raised, and where.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from fuzz_kernels import Case, make

import tpu_kernels as tk
from tpu_kernels.compiler import CompileReport, compile_function, resolve, worker_pool
from tpu_kernels.compiler.diagnose import diagnose

_TIMEOUT_S = 40.0
_STUCK_TIMEOUT_S = 8.0
_MEMORY_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        status: Status of the report.
        entry: Entry of the catalogue, ``"python"`` for an exception of the kernel's own code.
        explained: Whether the report says what is wrong, and where.
        text: The report.
    """

    status: str
    entry: str
    explained: bool
    text: str


def run(case: Case) -> Verdict:
    """Check and compile one case.

    Args:
        case: The case.

    Returns:
        The verdict.
    """
    if case.stuck:
        report = compile_function(
            *(case.fn, case.avals, case.target),
            name=case.about,
            isolate=True,
            timeout_s=_STUCK_TIMEOUT_S,
            memory_limit=_MEMORY_BYTES,
        )
        return _judge(report, report.text)
    checked = tk.check(
        case.fn, case.avals, target=case.target, passes=("grid",), timeout_s=_TIMEOUT_S
    )
    if checked.compiled is not None:
        report = checked.compiled
        verdict = _judge(report, checked.text)
        broken = [row for row in checked.rows if row.status == "unavailable"]
        if broken and report.status != "unavailable":
            return Verdict("unavailable", broken[0].name, False, checked.text)
        return verdict
    failed = next(row for row in checked.rows if row.status == "failed")
    return Verdict("vmem", "refused before compiling", bool(failed.where), checked.text)


def _judge(report: CompileReport, text: str) -> Verdict:
    if report.ok:
        return Verdict("ok", "", True, text)
    if report.status in ("timeout", "crashed"):
        return Verdict(report.status, "", bool(report.error), text)
    message = report.compiler_text or ""
    entry = diagnose(message, resolve(report.target)).name
    placed = report.where is not None and "fuzz_kernels.py" in report.where
    if entry == "unknown":
        # An exception of Python or JAX in its own words; the compiler's own must be in the
        # catalogue.
        python = "INTERNAL:" not in message and "Mosaic failed" not in message
        entry = "python" if python else "unknown"
        return Verdict(report.status, entry, python and placed, text)
    return Verdict(report.status, entry, bool(report.error) and placed, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--verbose", action="store_true", help="print every report")
    options = parser.parse_args()
    started = time.perf_counter()
    counts: Counter[tuple[str, str]] = Counter()
    unexplained = 0
    with worker_pool():
        for number in range(options.first, options.first + options.cases):
            case = make(number)
            verdict = run(case)
            counts[verdict.status, verdict.entry] += 1
            unexplained += not verdict.explained
            if options.verbose or not verdict.explained:
                mark = "" if verdict.explained else "NOT EXPLAINED "
                print(f"--- {mark}{number} on {case.target}: {case.about}")
                print(verdict.text, flush=True)
    print(f"{'cases':>6}  {'status':12} explained by")
    for (status, entry), count in counts.most_common():
        print(f"{count:6}  {status:12} {entry}")
    seconds = time.perf_counter() - started
    print(
        f"{options.cases} cases in {seconds:.0f} s, {unexplained} not explained\n"
        f"torch {torch.__version__}, numpy {np.__version__}, "
        f"libtpu {resolve('v6e') and tk.compile(abs, (torch.ones(8, 128),)).libtpu_version}"
    )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
