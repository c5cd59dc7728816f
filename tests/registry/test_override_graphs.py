"""Overrides in compiled graphs: every backend sees them, and no graph outlives a change of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.registry.override_checks import matrices, nothing_left
from tpu_kernels.registry.overrides import chain, decomposition_table, graph, override

clean = pytest.fixture(autouse=True)(nothing_left)

BACKENDS = [("aot_eager", "cpu"), ("inductor", "cpu"), ("tpu", "tpu")]

# torch's own deprecated calls, made while it compiles
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    with override("aten::mm", plus_one, device="cpu"):
        pass  # the first override of a process drops the graphs made before it
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plus_one(a: torch.Tensor, b: torch.Tensor, fallback: Any) -> torch.Tensor:
    return fallback(a, b) + 1


def compiled(function: Any, backend: str, **options: Any) -> tuple[Any, list[int]]:
    """A function compiled with a backend, and a list with one entry for each compilation."""
    compilations: list[int] = []

    def counting(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        compilations.append(len(compilations))
        return torch._dynamo.lookup_backend(backend)(gm, inputs, **kwargs)

    return torch.compile(function, backend=counting, fullgraph=True, **options), compilations


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_graph_follows_the_overrides_in_force(backend: str, device: str) -> None:
    a, b = matrices(device)
    function, compilations = compiled(lambda x, y: torch.mm(torch.mm(x, y), y), backend)
    plain, changed = a @ b @ b, (a @ b + 1) @ b + 1
    torch.testing.assert_close(function(a, b), plain)
    for _ in range(2):
        with override("aten::mm", plus_one, device=device) as handle:
            torch.testing.assert_close(function(a, b), changed)
            torch.testing.assert_close(function(a, b), changed)
        assert handle.hits == 4
        torch.testing.assert_close(function(a, b), plain)
    assert len(compilations) == 2, "the same overrides must find the same graph again"


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_forward_and_backward_graphs_call_the_override(backend: str, device: str) -> None:
    a, b = matrices(device)
    function, _ = compiled(lambda x, y: torch.mm(x, y).pow(2).sum(), backend)
    results = []
    for call in (function, function, lambda x, y: torch.mm(x, y).pow(2).sum()):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        with override("aten::mm", plus_one, device=device) as handle:
            call(x, y).backward()
        assert handle.hits == 3
        results.append((x.grad, y.grad))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_composites_are_traced_with_their_gradients(backend: str, device: str) -> None:
    a, b = matrices(device)

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(2) * y.unsqueeze(0)).sum(1) * 2

    function, _ = compiled(lambda x, y: torch.matmul(x, y).pow(2).sum(), backend)
    x = a.clone().requires_grad_()
    function(x, b).backward()
    plain = x.grad
    for options in ({}, {"backward": "original"}):
        x = a.clone().requires_grad_()
        with override("aten::matmul", twice, device=device, **options):  # type: ignore[call-overload]
            function(x, b).backward()
        factor = 2 if options else 4
        torch.testing.assert_close(x.grad, plain * factor, rtol=1e-4, atol=1e-4)
    x = a.clone().requires_grad_()
    function(x, b).backward()
    torch.testing.assert_close(x.grad, plain)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("_softmax", lambda x: torch.softmax(x, -1)),
        ("native_layer_norm", lambda x: torch.nn.functional.layer_norm(x, (8,))),
        ("relu", torch.relu),
        ("addmm", lambda x: torch.addmm(x, x, x)),
    ],
)
def test_operators_that_a_backend_would_decompose(
    backend: str, device: str, name: str, call: Any
) -> None:
    def marked(*args: Any, fallback: Any, **kwargs: Any) -> Any:
        result = fallback(*args, **kwargs)
        return (result[0] + 1, *result[1:]) if isinstance(result, tuple) else result + 1

    a, _ = matrices(device)
    function, _ = compiled(call, backend)
    plain = call(a)
    with override(f"aten::{name}", marked, device=device) as handle:
        torch.testing.assert_close(function(a), plain + 1)
    assert handle.hits == 1


def test_declined_operators_are_left_to_inductor() -> None:
    a, b = matrices("cpu")
    graphs: list[str] = []

    def look(graph_module: Any) -> None:
        graphs.append(graph_module.code if hasattr(graph_module, "code") else str(graph_module))

    def small(x: torch.Tensor, y: torch.Tensor) -> bool:
        return x.shape[0] <= 4

    with (
        torch._inductor.config.patch(post_grad_custom_post_pass=look, fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        override("aten::mm", plus_one, device="cpu", when=small) as handle,
    ):
        function = torch.compile(torch.mm, fullgraph=True)
        torch.testing.assert_close(function(a, b), torch.mm(a, b))
        torch.testing.assert_close(function(a[:4], b), torch.mm(a[:4], b))
    assert graph.NAMESPACE not in graphs[0]
    assert graph.NAMESPACE in graphs[-1]
    assert handle.hits >= 1


def test_predicates_on_symbolic_sizes_become_guards() -> None:
    a, b = matrices("cpu")

    def even(x: torch.Tensor, y: torch.Tensor) -> bool | str:
        return x.shape[0] % 2 == 0 or "odd"

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        function, _ = compiled(torch.mm, backend, dynamic=True)
        with override("aten::mm", plus_one, device="cpu", when=even):
            for rows in (6, 5, 4, 3, 8):
                expected = torch.mm(a[:rows], b)
                torch.testing.assert_close(function(a[:rows], b), expected)
        for rows in (6, 5):
            expected = torch.mm(a[:rows], b)
            torch.testing.assert_close(function(a[:rows], b), expected)


def test_predicates_on_values_decide_when_the_graph_runs() -> None:
    a, b = matrices("cpu")
    for backend in ("aot_eager", "inductor"):
        function, _ = compiled(torch.mm, backend)
        with override("aten::mm", plus_one, device="cpu", when=lambda x, y: bool(x.sum() > 0)) as h:
            torch.testing.assert_close(function(a.abs(), b), torch.mm(a.abs(), b))
            torch.testing.assert_close(function(-a.abs(), b), torch.mm(-a.abs(), b))
        assert (h.hits, h.declines) == (2, 2)


def test_other_threads_overrides_do_not_reach_a_compiled_graph() -> None:
    import threading

    a, b = matrices("cpu")
    function, _ = compiled(torch.mm, "inductor")
    expected = torch.mm(a, b)
    seen: list[torch.Tensor] = []
    with override("aten::mm", plus_one, device="cpu"):
        torch.testing.assert_close(function(a, b), expected + 1)
        thread = threading.Thread(target=lambda: seen.append(function(a, b)))
        thread.start()
        thread.join()
    torch.testing.assert_close(seen[0], expected)


def test_tracing_after_removal_does_not_look_for_the_override() -> None:
    # torch's Python dispatcher remembers which kernel a key resolves to.
    a, b = matrices("tpu")
    for name, call in (("mm", torch.mm), ("matmul", torch.matmul)):
        plain = call(a, b)
        for change in (1, 0, 2, 0):
            torch._dynamo.reset()
            function, _ = compiled(call, "aot_eager")
            if change:
                with override(f"aten::{name}", lambda x, y, fallback, n=change: fallback(x, y) + n):
                    torch.testing.assert_close(function(a, b), plain + change)
            else:
                torch.testing.assert_close(function(a, b), plain)


def test_matmul_precision_is_part_of_what_graphs_depend_on() -> None:
    a, b = matrices("cpu")

    def by_precision(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if torch.get_float32_matmul_precision() == "highest" else 2.0)

    function, compilations = compiled(torch.matmul, "aot_eager")
    before = torch.get_float32_matmul_precision()
    try:
        with override("aten::matmul", by_precision, device="cpu"):
            torch.set_float32_matmul_precision("highest")
            torch.testing.assert_close(function(a, b), a)
            torch.set_float32_matmul_precision("medium")
            torch.testing.assert_close(function(a, b), a * 2)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(compilations) == 2


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_export_takes_overrides_by_a_decomposition_table(device: str) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, y).relu()

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * y).sum(1) + 1

    a, b = matrices(device)
    program = torch.export.export(Net(), (a, b))
    with override("aten::mm", product, device=device):
        changed = program.run_decompositions(decomposition_table())
    with override("aten::mm", product, device=device, when=lambda x, y: False):
        same = program.run_decompositions(decomposition_table())
    assert "aten.mm" not in changed.graph_module.code
    assert "aten.mm" in same.graph_module.code
    torch.testing.assert_close(changed.module()(a, b), (a @ b + 1).relu())


def test_cache_tag_follows_the_content_of_the_overrides() -> None:
    config: Any = torch.compiler.config

    def tag(**options: Any) -> str:
        with override("aten::mm", options.pop("impl", plus_one), device="cpu", **options):
            compiled(torch.mm, "eager")[0](*matrices("cpu"))
            return str(config.cache_key_tag)

    with config.patch(cache_key_tag="mine"):
        compiled(torch.mm, "eager")[0](*matrices("cpu"))
        without = str(config.cache_key_tag)  # other tests' kernels may be in it
        tags = [
            without,
            tag(),
            tag(impl=lambda a, b: a + b),
            tag(impl=lambda a, b: a - b),
            tag(when=lambda a, b: True),
            tag(when=lambda a, b: False),
            tag(priority=1),
        ]
        assert len(set(tags)) == len(tags)
        assert tag(impl=lambda a, b: a + b) == tags[2]
        assert all(t.startswith("mine;tpu_kernels:") for t in tags[1:])
        torch._dynamo.reset()
        compiled(torch.mm, "eager")[0](*matrices("cpu"))
        assert config.cache_key_tag == without


# Nothing but matrix products, so that Inductor has no C++ to compile.
PROGRAM = """
import sys
import torch
from tpu_kernels.registry.overrides import override

a = 2 * torch.eye(4)
f = torch.compile(lambda x: (torch.mm(x, x), torch.matmul(x, x)))

def impl(x, y, fallback):
    product = fallback(x, y)
    return fallback(product, y) if sys.argv[1] == "changed" else product

def show():
    print(*(y[0, 0].item() for y in f(a)))

if sys.argv[1] == "none":
    show()
else:
    with override("aten::mm", impl, device="cpu"), override("aten::matmul", impl, device="cpu"):
        show()
"""


@pytest.mark.slow
def test_the_next_process_does_not_load_another_processs_graph(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for mode, expected in (("changed", ["8.0", "32.0"]), ("none", ["4.0", "4.0"])):
        done = subprocess.run(
            [sys.executable, str(script), mode],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == expected, done.stderr


def test_graphs_from_before_the_first_override_are_dropped() -> None:
    # Only a fresh process has a first override.
    program = (
        "import torch\n"
        "a = torch.eye(4)\n"
        "f = torch.compile(torch.matmul, backend='aot_eager')\n"
        "f(a, a)\n"
        "from tpu_kernels.registry.overrides import override\n"
        "with override('aten::matmul', lambda x, y: x * 5, device='cpu'):\n"
        "    print(f(a, a)[0, 0].item())\n"
        "print(f(a, a)[0, 0].item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["5.0", "1.0"], done.stderr


def test_inductor_may_be_imported_while_an_override_is_in_force(tmp_path: Path) -> None:
    # Only a fresh process has not imported it.
    program = (
        "import sys, torch\n"
        "from tpu_kernels.registry.overrides import override\n"
        "with override('aten::relu', lambda x: x * 5, device='cpu'):\n"
        "    assert 'torch._inductor.lowering' not in sys.modules\n"
        "    print(torch.compile(torch.relu)(torch.ones(2))[0].item())\n"
        "print(torch.compile(torch.relu)(torch.ones(2))[0].item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["5.0", "1.0"], done.stderr


def test_no_override_costs_a_compiled_graph_nothing_but_an_empty_key() -> None:
    assert chain.active_key() == ()
    with override("aten::mm", plus_one, device="cpu"):
        first = chain.active_key()
    with override("aten::mm", plus_one, device="cpu"):
        assert chain.active_key() == first
    assert chain.active_key() == ()


def test_what_an_implementation_falls_back_on_is_in_the_program_too() -> None:
    from tpu_kernels.backends.graphs import compile_stats

    a, b = matrices("tpu")
    expected = torch.mm(a, b)
    compiled = torch.compile(torch.mm, backend="tpu")
    left = dict(compile_stats().left)
    with override("aten::mm", plus_one) as first, override("aten::mm", plus_one) as second:
        torch.testing.assert_close(compiled(a, b), expected + 2)
    assert (first.hits, second.hits) == (1, 1)
    assert compile_stats().left == left, "nothing runs outside of the program"
