"""What PyTorch asks of an operator, of Helion kernels: autocast, DTensor, vmap, symbolic sizes, and
no collision with what Helion itself registers with Dynamo."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch

import tpu_kernels as tk
from tests.helion import kernels
from tests.helion.test_operator import operator, randn
from tpu_kernels.dsl import helion_capture


def test_helions_own_capture_finds_nothing_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    # what HELION_TPU_COMPILE_CAPTURE=1 sets when Helion is imported
    module = importlib.import_module("helion.runtime.kernel")
    monkeypatch.setattr(module, "_TPU_COMPILE_CAPTURE", True)
    add = tk.tpu_kernel("helion_torch_tests::opaque_add")(kernels.add)
    targets: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = randn(32, 128)
    compiled = torch.compile(lambda a: add(a, a) * 2, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), 4 * x)
    # nothing of the namespace "helion_capture"
    assert [getattr(t, "namespace", None) for t in targets] == ["helion_torch_tests", None]
    assert targets[0] == add.op


def test_dynamo_may_be_the_first_to_ask_a_kernel() -> None:
    # Dynamo holds its lock while it asks; Helion takes the same one, in a thread of ours.
    kernel = tk.tpu_kernel("helion_torch_tests::cold_add")(kernels.add)
    x = randn(32, 128)
    compiled = torch.compile(lambda a: kernel(a, a), fullgraph=True, backend="eager")
    outcome: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outcome.append(compiled(x)), daemon=True)
    thread.start()
    thread.join(timeout=240)
    assert not thread.is_alive(), "waits for itself"
    torch.testing.assert_close(outcome[0], 2 * x)


def test_autocast_casts_the_arguments() -> None:
    kernel = tk.tpu_kernel("helion_torch_tests::autocast_add", autocast=torch.bfloat16)(kernels.add)
    x = randn(32, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = kernel(x, x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, 2 * x.bfloat16())


def test_fakes_are_made_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tk.tpu_kernel("helion_torch_tests::fake_add")(kernels.add)
    calls: list[Any] = []
    real = helion_capture.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr("tpu_kernels.dsl.helion_function.capture", counted)
    with torch._subclasses.FakeTensorMode():
        for _ in range(3):
            fake = kernel(torch.empty(130, 64).t(), torch.empty(64, 130))
    assert (fake.shape, fake.stride()) == ((64, 130), (130, 1))
    assert len(calls) == 1


def test_symbolic_sizes_give_each_size_its_program() -> None:
    add = operator("add")
    compiled = torch.compile(lambda a: add(a, a) + 1, backend="aot_eager", dynamic=True)
    for rows in (32, 64):
        x = randn(rows, 128)
        torch.testing.assert_close(compiled(x), 2 * x + 1)


def test_a_mutating_kernel_is_functionalised() -> None:
    scale = operator("scale_in_place")

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        scale(y, 2.0)
        return y

    x = randn(32, 128)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(x), 2 * (x + 1))


def test_a_sharding_rule_is_kept() -> None:
    kernel = tk.tpu_kernel("helion_torch_tests::sharded_add", sharding="m n, m n -> m n")(
        kernels.add
    )
    assert kernel.sharding is not None


def test_a_batching_rule_of_the_authors_replaces_the_loop() -> None:
    kernel = tk.tpu_kernel("helion_torch_tests::batched_add")(kernels.add)
    seen: list[Any] = []

    @kernel.register_vmap
    def batched(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor, config: Any) -> Any:
        seen.append(in_dims)
        return kernel(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2]), 0

    x = randn(2, 32, 128)
    torch.testing.assert_close(torch.func.vmap(kernel)(x, x), 2 * x)
    assert len(seen) == 1
