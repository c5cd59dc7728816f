"""Generated code of small kernels, kept so that these tests need no compiler."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_kernels.compiler.cost.listing import Listing, parse

FOLDER = Path(__file__).with_name("listings")


@pytest.fixture(scope="session")
def listing() -> Callable[[str], Listing]:
    """Load a listing by name, such as ``"matmul.v6e"``."""
    known: dict[str, Listing] = {}

    def load(name: str) -> Listing:
        if name not in known:
            known[name] = parse(gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode())
        return known[name]

    return load
