"""Kernels that read globals see what these are bound to now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.dsl.source import globals_read

SCALE = 2.0
WIDTH = 3
TABLE = np.array([1.0], np.float32)
TRACES = 0


def _helper(x: jax.Array) -> jax.Array:
    return x * SCALE


@tk.tpu_kernel("freshness::line")
def line(x: jax.Array) -> jax.Array:
    global TRACES
    TRACES += 1
    return _helper(x) + TABLE[0]


@tk.tpu_kernel("freshness::wide")
def wide(x: jax.Array) -> jax.Array:
    return jnp.ones((WIDTH,)) * x.sum()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = SCALE, WIDTH, TABLE
    yield
    _bind(*before)


def _bind(scale: float, width: int, table: Any) -> None:
    global SCALE, WIDTH, TABLE
    SCALE, WIDTH, TABLE = scale, width, table


def test_what_is_read_is_data_that_is_not_assigned() -> None:
    names = {name for _, name, _ in globals_read(line.spec.jax_fn)}
    assert names == {"SCALE", "TABLE"}


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_rebound_global_is_seen_by_every_shape_and_transform(device: str) -> None:
    torch._dynamo.reset()
    x = torch.ones(2, device=device)
    compiled = torch.compile(lambda t: line(t), backend="aot_eager", fullgraph=True)

    def answers() -> tuple[float, ...]:
        leaf = x.clone().requires_grad_()
        line(leaf).sum().backward()
        batched = torch.vmap(line)(x[None])
        found = (line(x), line(torch.ones(3, device=device)), compiled(x), batched[0], leaf.grad)
        return tuple(float(t[0]) for t in found)

    assert answers() == (3.0, 3.0, 3.0, 3.0, 2.0)
    traces = TRACES
    line(x)
    assert traces == TRACES  # nothing changed, nothing is traced
    _bind(5.0, 3, TABLE)
    assert answers() == (6.0, 6.0, 6.0, 6.0, 5.0)
    _bind(5.0, 3, np.array([10.0], np.float32))
    assert answers() == (15.0, 15.0, 15.0, 15.0, 5.0)


def test_shapes_follow_globals() -> None:
    x = torch.ones(2)
    assert wide(x).shape == wide(x.to("meta")).shape == (3,)
    _bind(SCALE, 4, TABLE)
    assert wide(x.to("meta")).shape == wide(x).shape == (4,)
