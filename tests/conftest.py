"""What every test shares: skips for absent packages, and a cache folder of the run's own."""

from __future__ import annotations

import importlib.util
import os
import tempfile

import pytest

# The package reads its settings once, and tests start worker processes that read them too: the
# variable is set before anything is imported, so that no test sees or fills the user's own cache.
_CACHE = tempfile.TemporaryDirectory(prefix="tpu_kernels-tests-", ignore_cleanup_errors=True)
os.environ["TPU_KERNELS_CACHE_DIR"] = _CACHE.name

_OPTIONAL = {"libtpu": "aot", "torch_tpu": "tpu"}  # marker (and package) -> extra that brings it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose optional package is absent, naming the extra that brings it."""
    for package, extra in _OPTIONAL.items():
        if importlib.util.find_spec(package) is not None:
            continue
        skip = pytest.mark.skip(reason=f"needs {package}: pip install 'tpu_kernels[{extra}]'")
        for item in items:
            if package in item.keywords:
                item.add_marker(skip)
