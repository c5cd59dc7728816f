"""``torch.compile(..., backend="tpu")``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.device.models import losses
from tpu_kernels.backends import compile_backend
from tpu_kernels.errors import ArgumentError


@pytest.fixture(autouse=True)
def _no_code_of_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect the operators of each graph that is lowered."""
    seen: list[list[str]] = []
    lower = compile_backend.lower_graph

    def spy(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function"])
        return lower(gm, inputs)

    monkeypatch.setattr(compile_backend, "lower_graph", spy)
    return seen


def test_the_backend_is_listed() -> None:
    assert "tpu" in torch._dynamo.list_backends()


def test_training_agrees_with_eager(graphs: list[list[str]]) -> None:
    compiled = losses("tpu", wrap=lambda m: torch.compile(m, backend="tpu", fullgraph=True))
    assert compiled == pytest.approx(losses("tpu"), abs=1e-5)
    assert len(graphs) == 2  # one forward and one backward for all steps
    assert "aten.addmm.default" in graphs[0]


def test_mutation_views_and_dynamic_shapes(graphs: list[list[str]]) -> None:
    @torch.compile(backend="tpu", dynamic=True, fullgraph=True)
    def step(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total.add_(x.sum())
        return x.t(), F.relu(x @ x.t())

    total = torch.zeros(1, device="tpu")
    for n in (3, 4, 5):
        x = torch.ones(n, 2, device="tpu")
        transposed, product = step(x, total)
        assert transposed.data_ptr() == x.data_ptr()
        assert product.cpu().tolist() == [[2.0] * n] * n
    assert total.item() == 24
    assert len(graphs) == 1


def test_random_numbers_are_those_of_eager() -> None:
    x = torch.ones(64, device="tpu")
    compiled = torch.compile(lambda y: F.dropout(y, 0.5) + torch.rand_like(y), backend="tpu")
    torch.manual_seed(5)
    found = compiled(x)
    torch.manual_seed(5)
    assert torch.equal(found.cpu(), (F.dropout(x, 0.5) + torch.rand_like(x)).cpu())


def test_autocast_inside() -> None:
    x = torch.randn(4, 4, device="tpu")
    compiled = torch.compile(lambda y: y @ y, backend="tpu")
    with torch.autocast("tpu", torch.bfloat16):
        assert compiled(x).dtype is torch.bfloat16


def test_graph_passes_edit_what_is_lowered(
    graphs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sin_for_cos(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.cos.default:
                node.target = torch.ops.aten.sin.default

    monkeypatch.setattr(compile_backend, "graph_passes", [sin_for_cos])
    x = torch.randn(4, device="tpu")
    assert torch.equal(torch.compile(torch.cos, backend="tpu")(x).cpu(), x.cpu().sin())
    assert graphs == [["aten.sin.default"]]


def test_decompositions_are_applied(
    graphs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compile_backend,
        "decompositions",
        {torch.ops.aten.silu.default: lambda x: x * x.sigmoid()},
    )
    x = torch.randn(4, device="tpu")
    torch.compile(F.silu, backend="tpu")(x)
    assert graphs == [["aten.sigmoid.default", "aten.mul.Tensor"]]


def test_options_of_torch_tpu_pass_and_others_raise() -> None:
    x = torch.ones(2, device="tpu")
    compiled = torch.compile(torch.sin, backend="tpu", options={"serializable": False})
    assert compiled(x).device.type == "tpu"
    with pytest.raises(Exception, match="unknown options") as caught:
        torch.compile(torch.cos, backend="tpu", options={"no_such": 1})(x)
    assert isinstance(caught.value.__cause__ or caught.value, ArgumentError) or "no_such" in str(
        caught.value
    )
