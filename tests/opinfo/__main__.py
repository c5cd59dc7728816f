"""``python -m tests.opinfo device|lowering``: the whole of torch's operator database.

Prints what does not agree and a line with the numbers of entries and samples that do. Ends with
status 1 if that is not what ``known.json`` says.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import tpu_kernels.device  # noqa: F401 - installs the device
from tests.opinfo import database, known, on_device, on_lowering

# For each suite: its dtypes, and what yields None or a complaint for each sample.
Compare = Callable[[Any, torch.dtype, int], Iterator[str | None]]


def main() -> int:
    """Run one suite and print its summary."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__)
    parser.add_argument("suite", choices=["device", "lowering"])
    parser.add_argument("names", nargs="*", help="entries to run, all by default")
    parser.add_argument("--dtype", action="append", help="default: those of known.json")
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--part", default="0/1", help="k/n runs every n-th entry from the k-th")
    options = parser.parse_args()
    torch.set_num_threads(1)  # operators are small
    dtypes = [getattr(torch, name) for name in options.dtype or ()]
    part, parts = map(int, options.part.split("/"))
    chosen = [
        info
        for info in database.entries()[part::parts]
        if not options.names or {info.name, database.name_of(info)} & set(options.names)
    ]
    if options.suite == "device":
        dtypes = dtypes or list(on_device.DTYPES)
        return _run("device", chosen, dtypes, options.samples or 6, on_device.disagreements)
    news = 0
    for dtype in dtypes or on_lowering.DTYPES:
        suite = f"lowering {str(dtype).removeprefix('torch.')}"
        count = options.samples or 3
        news |= _run(suite, chosen, [dtype], count, on_lowering.disagreements)
    return news


def _run(
    suite: str, chosen: Iterable[Any], dtypes: list[torch.dtype], count: int, compare: Compare
) -> int:
    started = time.process_time()
    failed: dict[str, str] = {}
    checked: list[str] = []
    samples = agree = left = 0
    for info in chosen:
        name = database.name_of(info)
        complaints = []
        for dtype in dtypes:
            if dtype in info.supported_dtypes("cpu"):
                complaints += list(compare(info, dtype, count))
        if not complaints:
            continue
        checked.append(name)
        samples += len(complaints)
        wrong = [c for c in complaints if c is not None]
        agree += len(complaints) - len(wrong)
        if wrong:
            failed[name] = wrong[0]
            left += all(c.startswith(on_lowering.LEFT) for c in wrong)
            print(f"{name:44} {len(wrong)} of {len(complaints)}: {wrong[0]}", flush=True)
    seconds = time.process_time() - started
    also = f" ({left} more with operators that torch runs)" if left else ""
    print(
        f"{suite}: {len(checked) - len(failed)} of {len(checked)} entries{also} and {agree} of "
        f"{samples} samples agree; {seconds:.0f} s of CPU time"
    )
    news = known.changes(suite, failed, checked)
    for line in news:
        print(f"not as known: {line}", file=sys.stderr)
    return int(bool(news))


if __name__ == "__main__":
    sys.exit(main())
