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

# With torch, torch_tpu would load itself where it is installed: ten seconds in each of the many
# processes, and no simulated device in any of them. Its tests start their own processes.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

# marker -> extra that brings it
_EXTRAS = {"libtpu": "aot", "ray": "ray", "torch_tpu": "torch-tpu-cpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose optional package is absent, naming the extra that brings it."""
    for marker, extra in _EXTRAS.items():
        reason = _missing(marker)
        if reason is None:
            continue
        skip = pytest.mark.skip(reason=f"{reason}: pip install 'tpu_kernels[{extra}]'")
        for item in items:
            if item.get_closest_marker(marker) is not None:
                item.add_marker(skip)


def _missing(marker: str) -> str | None:
    if marker == "torch_tpu":
        from tpu_kernels.backends.torch_tpu import cpu_plugin

        return cpu_plugin.why_not()
    return None if importlib.util.find_spec(marker) is not None else f"needs {marker}"
