"""Graphs in programs: random numbers, views, writes, sizes, kernels, and what is left over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels as tk
import tpu_kernels.device
from tpu_kernels.backends import graphs
from tpu_kernels.backends.graphs import compile_stats


@tk.tpu_kernel("lowering_test::twice")
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


@tk.tpu_kernel("lowering_test::shifted", dynamic_args=("by", "count"))
def shifted(x: jax.Array, by: float, count: int = 0) -> jax.Array:
    return x + by + count


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="tpu", fullgraph=True, **options)


def test_forward_and_backward_use_one_mask_and_the_seed_of_torch() -> None:
    x = torch.ones(64, requires_grad=True)
    dropped = compiled(lambda y: F.dropout(y, 0.5) * 1.0)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        out = dropped(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, gradient)
        results.append(out.detach())
    assert torch.equal(*results)
    torch.manual_seed(3)
    assert torch.equal(results[0], F.dropout(x, 0.5).detach())
    assert 0 < int((results[0] == 0).sum()) < 64
    assert not torch.equal(results[0], dropped(x))


def test_outputs_have_the_strides_of_eager() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.t(), y.transpose(0, 1).relu(), x.sum(0, keepdim=True).expand(3, 5), y[:, ::2]

    x = torch.randn(4, 5)
    for found, expected in zip(compiled(views)(x), views(x), strict=True):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)


def test_64_bit_integers_stay_exact_and_small_dtypes_wrap() -> None:
    def arithmetic(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 3 + 1, (x // 7) % 5, y + 250, x.double() * 3

    x, y = torch.tensor([2**40 + 1, -5]), torch.tensor([10], dtype=torch.uint8)
    for found, expected in zip(compiled(arithmetic)(x, y), arithmetic(x, y), strict=True):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


def test_one_graph_serves_all_sizes_and_each_is_counted() -> None:
    step = compiled(lambda x: F.softmax(x @ x.t(), -1).sum(0), dynamic=True)
    before = compile_stats()
    for n in (3, 4, 3, 4, 5):
        x = torch.randn(n, 2)
        torch.testing.assert_close(step(x), F.softmax(x @ x.t(), -1).sum(0))
    after = compile_stats()
    assert (after.graphs - before.graphs, after.specialisations - before.specialisations) == (1, 3)


def test_what_has_no_lowering_splits_the_graph_and_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_told", set())

    def odd(x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_y1(x.exp()).sin() + x.cos()

    x = torch.rand(8)
    before = compile_stats()
    with caplog.at_level(logging.WARNING, logger="tpu_kernels.compile"):
        torch.testing.assert_close(compiled(odd)(x), odd(x))
        torch._dynamo.reset()
        compiled(odd)(x)
    notes = [r.message for r in caplog.records if r.name == "tpu_kernels.compile"]
    assert len(notes) == 1
    assert "aten.special_bessel_y1.default" in notes[0]
    assert compile_stats().programs - before.programs == 4  # one before it and one after, twice


def test_kernels_are_inlined_and_counted(tmp_path: Path) -> None:
    x = torch.randn(4, requires_grad=True)
    function = compiled(lambda y: (twice(y.sin()) + 1).sum(), options={"dump": str(tmp_path)})
    before = twice.stats()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(gradient, 2 * x.detach().cos())
    assert twice.stats().launches - before.launches == 6
    texts = [p.read_text() for p in sorted(tmp_path.glob("*.stablehlo.mlir"))]
    assert len(texts) == 2
    assert "sine" in texts[0]


def test_programs_are_not_specialised_on_dynamic_numbers() -> None:
    x = torch.tensor([-0.0, 1.0])
    for by in (0.0, -0.0):
        found, expected = compiled(lambda x, by=by: shifted(x, by))(x), shifted(x, by)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # signs of zeros


def test_a_dynamic_integer_without_32_bits_is_refused_as_in_eager() -> None:
    for call in (shifted, compiled(shifted)):
        with pytest.raises(tk.errors.KernelError, match="count"):
            call(torch.ones(2), 0.0, 2**40)


def test_writes_to_inputs_and_buffers() -> None:
    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total[1:].add_(x.sum())
        total.mul_(2)
        return total * x

    x, found, expected = torch.ones(3), torch.zeros(3), torch.zeros(3)
    run = compiled(step)
    for _ in range(2):
        torch.testing.assert_close(run(x, found), step(x, expected))
    assert torch.equal(found, expected)


# torch's own deprecated calls, made while it compiles an optimiser
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_optimiser_step_in_a_program() -> None:
    def make() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        w = torch.linspace(-1, 1, 6, requires_grad=True)
        return w, torch.optim.AdamW([w], lr=0.1, foreach=True)

    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="tpu")):
        w, optimizer = make()
        step = wrap(optimizer.step)
        for _ in range(3):
            w.grad = w.detach() * 2
            step()
        results.append(w.detach().clone())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_higher_modes_run_node_by_node() -> None:
    from tpu_kernels.registry.overrides import explain_overrides, override

    x = torch.eye(4)
    run = compiled(lambda a: torch.mm(a, a).relu())
    with override("aten::mm", lambda a, b, fallback: fallback(a, b) * 3, device="cpu") as handle:
        torch.testing.assert_close(run(x), 3 * x)
        rows = explain_overrides(run, x).rows
    assert handle.hits == 2
    assert [row.op for row in rows] == ["aten::mm"]


def test_programs_are_kept_for_other_processes() -> None:
    def run(factor: float) -> int:
        torch._dynamo.reset()
        before = compile_stats().loaded
        x = torch.linspace(0, 1, 5)
        torch.testing.assert_close(compiled(lambda a: (a * factor).cosh())(x), (x * factor).cosh())
        return compile_stats().loaded - before

    # A graph of its own each time, as in another process; the second finds the first's program.
    assert [run(3.25), run(3.25), run(4.25)] == [0, 1, 0]
