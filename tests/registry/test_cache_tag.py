"""The tag by which torch's caches on disk notice what changed in kernels and configurations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.registry import cache_tag, config_table
from tpu_kernels.tuning import lookup


@pytest.fixture(autouse=True)
def users_tag() -> Iterator[None]:
    """A tag of the user's, and theirs again afterwards."""
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag="mine"):
        yield


def tag() -> str:
    """The tag that the next graph would be compiled with."""
    cache_tag.set_tag()
    return str(torch.compiler.config.cache_key_tag)


def define(value: float, **options: Any) -> tk.Kernel:
    """A kernel, always of the same name and place."""

    @tk.tpu_kernel("tag::kernel", **options)
    def kernel(x: jax.Array, *, size: int = 1) -> jax.Array:
        return x * value

    return kernel


def test_it_follows_what_a_kernel_computes() -> None:
    define(1.0)
    first = tag()
    assert first.startswith(f"mine{cache_tag.MARK}")
    assert tag() == first  # not appended once more
    define(2.0)
    second = tag()
    assert second != first
    define(1.0)
    assert tag() == first


def test_it_follows_gradients_and_implementations_that_are_registered_by_hand() -> None:
    tags = []
    for factor in (2, 3):
        kernel = define(1.0)
        tags.append(tag())

        @kernel.backward
        def backward(grad: torch.Tensor, factor: int = factor) -> dict[str, torch.Tensor]:
            return {"x": grad * factor}

        tags.append(tag())
    assert tags[0] == tags[2]
    assert len(set(tags)) == 3


def test_it_follows_tuned_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_source", source := lookup.TunedConfigs())
    monkeypatch.setattr(config_table, "_sources", [source])
    kernel = define(1.0, configs={"size": [1, 2]})
    request = kernel.bind(torch.ones(2)).request("v6e")
    tags = [tag()]
    for size in (1, 2, 1):
        lookup.store(request, tk.TuningCache(tmp_path), {"size": size}, None)
        tags.append(tag())
    assert tags[1] == tags[3]
    assert len(set(tags)) == 3
    source.add(tk.TuningCache(tmp_path / "other"))  # an empty one changes nothing
    assert tag() == tags[3]


def test_it_follows_other_sources_and_leaves_the_users_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_tag, "_sources", {})
    monkeypatch.setattr(cache_tag.naming, "kernels", dict)
    assert tag() == "mine"
    cache_tag.add_source("test", lambda: "one")
    assert tag().startswith("mine;tpu_kernels:")
    cache_tag.add_source("test", lambda: "")
    assert tag() == "mine"


# The sum is generated code that knows how long the kernel's result is; the kernel itself is called
# through the dispatcher.
PROGRAM = """
import sys
import jax, jax.numpy as jnp, torch
import tpu_kernels as tk

times, device, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if device == "tpu":
    import tpu_kernels.device

@tk.tpu_kernel("stale::longer")
def longer(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x] * times)

f = torch.compile(lambda x: longer(x).mul(2), backend=backend)
print(f(torch.ones(2, 2, device=device)).shape[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend"), [("cpu", "inductor"), ("tpu", "tpu")])
def test_the_next_process_does_not_load_a_graph_of_before_a_change(
    device: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    for times in (1, 3):
        command = [sys.executable, str(script), str(times), device, backend]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == 2 * times
