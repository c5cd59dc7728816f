"""How far the cost model is from published times of kernels on real TPUs.

    python benchmarks/cost_model.py FOLDER [--chip v5e] [--kind docs_matmul] [--limit 20] [--json]

FOLDER (or a file) holds rows with ``chip``, ``kind``, ``spec``, ``config`` and ``measured_us``. A
row's kernel is built and compiled for its chip, and the estimate compared with the measurement.
Kernels of the JAX documentation are built here; those of tokamax only where tokamax is installed
(it needs a newer Python and JAX than this package). Elsewhere a row counts with the simulated time
that it carries (``simulated_us``, before calibration), which is marked.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import published_kernels

from tpu_kernels.compiler import Request, chips, compile_all, resolve, worker_pool
from tpu_kernels.compiler.cost.calibration import calibration


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of all files in a folder that are lists of measurements."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows: list[dict[str, Any]] = []
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, list):
            rows.extend(row for row in data if {"chip", "kind", "measured_us"} <= row.keys())
    return rows


def predict(rows: Sequence[dict[str, Any]], *, rebuild: bool) -> None:
    """Add ``predicted_us`` and its ``source``, ``"compiled"`` or ``"recorded"``, where possible."""
    requests, owners = [], []
    for row in rows:
        built = published_kernels.build(row) if rebuild else None
        if built is None:
            if "simulated_us" in row:
                scale = calibration(chips()[row["chip"]]).scale
                row.update(predicted_us=row["simulated_us"] * scale, source="recorded")
            continue
        request = Request(
            fn=built.fn,
            avals=built.avals,
            target=resolve(row["chip"]),
            name=row.get("id", row["kind"]),
            concrete=built.concrete,
        )
        requests.append(request)
        owners.append(row)
    with worker_pool():
        for done, (index, report) in enumerate(compile_all(requests), 1):
            if report.estimate is not None and report.estimate.us is not None:
                owners[index].update(predicted_us=report.estimate.us, source="compiled")
            else:
                sys.stderr.write(f"{report}\n")
            sys.stderr.write(f"\r{done}/{len(requests)} kernels compiled ")
    sys.stderr.write("\n" if requests else "")


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation."""
    if len(a) < 3:
        return math.nan
    ranks = [np.argsort(np.argsort(np.asarray(values))) for values in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def regrets(rows: Sequence[dict[str, Any]]) -> list[float]:
    """What choosing by the estimate costs over the best, for each shape with several configs."""
    shapes: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        shapes[row["chip"], row["kind"], str(row["spec"])].append(row)
    found = []
    for group in shapes.values():
        if len({str(row["config"]) for row in group}) > 1:
            chosen = min(group, key=lambda row: row["predicted_us"])
            best = min(row["measured_us"] for row in group)
            found.append(chosen["measured_us"] / best - 1)
    return found


def score(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a set of rows."""
    measured = np.array([row["measured_us"] for row in rows])
    predicted = np.array([row["predicted_us"] for row in rows])
    errors = np.abs(predicted / measured - 1)
    costs = regrets(rows)
    return {
        "n": len(rows),
        "compiled": sum(row["source"] == "compiled" for row in rows),
        "mean": float(errors.mean()),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "max": float(errors.max()),
        "spearman": spearman(measured.tolist(), predicted.tolist()),
        "shapes": len(costs),
        "regret": float(np.mean(costs)) if costs else math.nan,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="folder or file with measured rows")
    parser.add_argument("--chip", action="append", help="only this chip; may be repeated")
    parser.add_argument("--kind", action="append", help="only this kind of kernel; may be repeated")
    parser.add_argument("--limit", type=int, help="at most so many rows of each chip and kind")
    parser.add_argument("--recorded", action="store_true", help="compile nothing")
    parser.add_argument(
        "--bar",
        type=float,
        metavar="PERCENT",
        help="exit code 1 if choosing by the estimate costs more than this on average",
    )
    parser.add_argument("--json", action="store_true", help="print rows and figures as JSON")
    options = parser.parse_args()
    rows = read_rows(options.path)
    rows = [row for row in rows if row["chip"] in (options.chip or [row["chip"]])]
    rows = [row for row in rows if row["kind"] in (options.kind or [row["kind"]])]
    if options.limit:
        seen: dict[tuple[str, str], int] = defaultdict(int)
        kept = []
        for row in rows:
            seen[row["chip"], row["kind"]] += 1
            if seen[row["chip"], row["kind"]] <= options.limit:
                kept.append(row)
        rows = kept
    predict(rows, rebuild=not options.recorded)
    rows = [row for row in rows if "predicted_us" in row]
    if not rows:
        sys.stderr.write("no row can be estimated here\n")
        return 1
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[f"{row['chip']} {row['kind']}"].append(row)
        groups[f"{row['chip']} all"].append(row)
        groups["all"].append(row)
    scores = {name: score(group) for name, group in sorted(groups.items())}
    if options.json:
        print(json.dumps({"scores": scores, "rows": rows}, indent=1, default=str))
        return 0
    print(
        f"{'chip, kernel':22} {'n':>4} {'compiled':>8} {'mean':>7} {'median':>7} {'p90':>7} "
        f"{'max':>7} {'Spearman':>8} {'shapes':>6} {'regret':>7}"
    )
    for name, row in scores.items():
        print(
            f"{name:22} {row['n']:4} {row['compiled']:8} {row['mean']:7.1%} {row['median']:7.1%} "
            f"{row['p90']:7.1%} {row['max']:7.1%} {row['spearman']:8.3f} {row['shapes']:6} "
            f"{row['regret']:7.2%}"
        )
    regret = scores["all"]["regret"]
    if options.bar is not None and not 100 * regret <= options.bar:
        print(
            f"missed: the choice costs {regret:.2%} more than the best, the bar is {options.bar}%"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
