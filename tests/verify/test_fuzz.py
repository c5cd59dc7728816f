"""A sample of random kernels, many of them broken: every refusal is explained, nothing crashes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpu_kernels.compiler import worker_pool

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = 20
FIRST = 50  # one of these aborts the process that traces it


@pytest.fixture(scope="module", autouse=True)
def _benchmarks() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        with worker_pool():
            yield
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.libtpu
@pytest.mark.parametrize("number", range(FIRST, FIRST + CASES))
def test_a_random_kernel_ends_in_a_report(number: int) -> None:
    import fuzz_compiler
    import fuzz_kernels

    case = fuzz_kernels.make(number)
    verdict = fuzz_compiler.run(case)
    assert verdict.explained, f"{case.about} on {case.target}\n{verdict.text}"
    assert verdict.status != "unavailable"
