"""What the override tests share: the state that every one of them must leave behind, and tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import tpu_kernels.device  # noqa: F401  (the tests run on the simulated device too)
from tpu_kernels import _compat_torch as compat
from tpu_kernels.registry.overrides import chain, graph, overrides
from tpu_kernels.registry.overrides.targets import resolve

DEVICES = ("cpu", "tpu")


def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a kernel, a scope or a rule behind."""
    yield
    assert chain.SLOTS == {}
    assert (chain.FLAGS.scoped, chain.FLAGS.slow) == (0, 0)
    assert chain.BUSY.overrides == frozenset()
    assert graph._users == {}
    assert graph._replaced == {}
    assert [record for record in overrides() if record.scope != "off"] == []


def tables(*names: str) -> list[str]:
    """The dispatcher's tables of operators."""
    return [compat.dispatch_table(resolve(name)) for name in names]


def matrices(device: str, *, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Two reproducible square matrices."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator).to(device)
    return a, b
