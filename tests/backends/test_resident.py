"""Programs in memory are bounded; one that left is loaded again."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.backends import resident
from tpu_kernels.backends.resident import Resident


def test_ever_new_shapes_keep_a_bounded_number_of_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resident, "programs", Resident(limit=4))

    @tk.tpu_kernel("resident::many", cache_dir=tmp_path)
    def many(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x)

    def call(n: int) -> None:
        assert many(torch.ones(n)).tolist() == [*range(1, n + 1)]

    for n in range(1, 8):
        call(n)
    assert many.stats().kernel_compilations == 7
    assert len(resident.programs) == 4
    call(7)
    assert (many.stats().disk_cache_hits, many.stats().launches) == (0, 8)
    call(1)  # it left memory
    assert (many.stats().disk_cache_hits, many.stats().kernel_compilations) == (1, 7)
    assert caplog.text.count("the oldest leave memory; 'resident::many' alone has") == 1


def test_an_owner_that_died_is_forgotten() -> None:
    class Owner(dict[str, Any]):
        def drop(self, key: Any) -> None:
            self.pop(key, None)

    programs = Resident(limit=2)
    owner, other = Owner(a=1), Owner(b=1, c=1)
    programs.enter(owner, "a", "test::one")
    del owner
    gc.collect()
    programs.enter(other, "b", "test::other")
    programs.enter(other, "b", "test::other")  # again: no second entry
    programs.enter(other, "c", "test::other")
    assert len(programs) == 2
    assert set(other) == {"b", "c"}
