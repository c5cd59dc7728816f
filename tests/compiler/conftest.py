"""Kernels for the compiler layer's tests, from a file that no import statement can find."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tpu_kernels.compiler import worker_pool


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """The module `kernels.py` beside this file."""
    name = "compiler_test_kernels"
    path = Path(__file__).with_name("kernels.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warm_workers() -> Iterator[None]:
    """Keep workers between the tests of a module, and none after them."""
    with worker_pool():
        yield
