"""Helion kernels as operators: eager, compiled, on both devices, with gradients."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from typing import Any

import helion
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels as tk
import tpu_kernels.device
from tests.helion import kernels
from tpu_kernels import _compat_helion
from tpu_kernels.errors import DTypeError, MissingBackwardError, SignatureError, TraceError


@functools.cache
def operator(name: str) -> Any:
    """The operator of a kernel of `kernels`, made once."""
    options: dict[str, Any] = {"scale_in_place": {"mutates_args": ("x",)}}.get(name, {})
    return tk.tpu_kernel(f"helion_tests::{name}", **options)(getattr(kernels, name))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _rms(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + r
    return F.rms_norm(total, (total.shape[-1],), w, 1e-5), total


# float32 results: rounding grows with the number of terms that are added, 256 at most.
TOLERANCE = 256 * torch.finfo(torch.float32).eps

CASES: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "add": ((randn(70, 130), randn(70, 130)), torch.add),
    "exp": ((randn(64, 128),), torch.exp),
    "softmax": ((randn(50, 128),), lambda x: x.softmax(-1)),
    "rms_norm_residual": ((randn(50, 128), randn(50, 128), randn(128)), _rms),
    "matmul": ((randn(100, 256), randn(256, 130)), torch.mm),
    "matmul_of_transposed": (
        (randn(64, 128), randn(256, 128)),
        lambda x, y: (x @ y.t()[:, 128:]).sum(0),
    ),
    "attention": (
        (randn(1, 2, 64, 64), randn(1, 2, 128, 64), randn(1, 2, 128, 64)),
        F.scaled_dot_product_attention,
    ),
    "biased": ((randn(32, 128), None), lambda x, bias: x),
    "sum_of_pair": (([randn(32, 128), randn(33, 128)[:32]],), lambda xs: xs[0] + xs[1]),
    "leaky": ((randn(32, 128), 0.25), F.leaky_relu),
    "swiglu": ((randn(40, 128), randn(41, 128)[1:]), lambda gate, up: F.silu(gate) * up),
    "row_sum": ((randn(50, 128),), lambda x: x.sum(-1)),
    "layer_norm": (
        (randn(50, 128), randn(128), randn(128)),
        lambda x, w, b: F.layer_norm(x, (128,), w, b),
    ),
    "bmm": ((randn(2, 64, 64), randn(2, 64, 64)), torch.bmm),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_torch_does(name: str) -> None:
    args, reference = CASES[name]
    result, expected = operator(name)(*args), reference(*args)
    results = result if isinstance(result, tuple) else (result,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    assert len(results) == len(wanted)
    for got, want in zip(results, wanted, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, atol=TOLERANCE * float(want.abs().max()), rtol=0)


def test_nothing_private_to_helion_has_moved() -> None:
    assert _compat_helion.moved() == []
    assert _compat_helion.moved_of_searches() == []


def test_a_written_argument_is_written_back_through_a_view() -> None:
    base = randn(64, 256)
    before = base.clone()
    assert operator("scale_in_place")(base[:, 128:], 2.0) is None
    torch.testing.assert_close(base[:, 128:], 2 * before[:, 128:])
    torch.testing.assert_close(base[:, :128], before[:, :128])


def test_a_transposed_argument_is_read_by_its_values() -> None:
    x, y = randn(128, 32).t(), randn(32, 128)
    torch.testing.assert_close(operator("add")(x, y), x + y)


def test_an_undeclared_write_is_refused() -> None:
    kernel = tk.tpu_kernel("helion_tests::hidden_write")(kernels.writes_and_returns)
    with pytest.raises(SignatureError, match=r"writes to its argument 'x'[\s\S]*mutates_args"):
        kernel(randn(32, 128))


def test_a_gradient_is_never_dropped_in_silence() -> None:
    x = randn(50, 128).requires_grad_()
    result = operator("row_sum")(x)
    assert result.requires_grad
    with pytest.raises(MissingBackwardError, match="has no backward"):
        result.sum().backward()


def test_a_torch_backward_is_used() -> None:
    kernel = tk.tpu_kernel("helion_tests::add_with_backward")(kernels.add)

    @kernel.backward
    def backward(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": grad, "y": 2 * grad}

    x, y = randn(70, 130).requires_grad_(), randn(70, 130).requires_grad_()
    kernel(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(70, 130))
    torch.testing.assert_close(y.grad, torch.full((70, 130), 2.0))


def test_a_reference_is_differentiated() -> None:
    kernel = tk.tpu_kernel(
        "helion_tests::exp_by_reference", reference=lambda x: x.exp(), backward="reference"
    )(kernels.exp)
    x = randn(64, 128).requires_grad_()
    kernel(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_it_is_one_opaque_node_under_torch_compile() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    add = operator("add")
    compiled = torch.compile(lambda a, b: add(a, b) * 2, fullgraph=True, backend=backend)
    x = randn(70, 130)
    torch.testing.assert_close(compiled(x, x), 4 * x)
    (graph,) = graphs
    assert add.op in {node.target for node in graph.graph.nodes}


def test_it_runs_on_the_simulated_device_eager_and_compiled() -> None:
    x = randn(70, 130)
    there = x.to("tpu")
    add = operator("add")
    result = add(there, there)
    assert result.device.type == "tpu"
    torch.testing.assert_close(result.cpu(), 2 * x)
    compiled = torch.compile(lambda a: add(a, a) * 2, fullgraph=True, backend="tpu")
    torch.testing.assert_close(compiled(there).cpu(), 4 * x)


def test_fakes_have_the_shape_and_stride_of_results() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = operator("add")(torch.empty(130, 70).t(), torch.empty(70, 130))
    assert fake.shape == (70, 130)
    assert fake.stride() == (130, 1)


def test_64_bit_arguments_are_refused() -> None:
    with pytest.raises(DTypeError, match=r"'x' is torch\.float64"):
        operator("add")(torch.ones(8, 128, dtype=torch.float64), torch.ones(8, 128))


def test_an_error_names_the_line_of_the_helion_source() -> None:
    with pytest.raises(TraceError, match="no_such_method") as raised:
        operator("broken")(randn(64, 128))
    line = kernels.broken.fn.__code__.co_firstlineno + 4
    assert f"kernels.py:{line}" in str(raised.value)


def test_a_config_of_helion_is_taken_wherever_configs_are() -> None:
    add, x = operator("add"), randn(64, 128)
    config = helion.Config(block_sizes=[64, 128])
    bound = add.bind(x, x, config=config)
    assert helion.Config(**json.loads(bound.config["config"])) == config
    torch.testing.assert_close(add(x, x, config=config), 2 * x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_loops() -> None:
    x = randn(2, 70, 130)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torch.func.vmap(operator("add"))(x, x)
    torch.testing.assert_close(result, 2 * x)


def test_options_that_helion_cannot_honour_are_refused() -> None:
    with pytest.raises(SignatureError, match="64-bit"):
        tk.tpu_kernel("helion_tests::wide", int64="exact")(kernels.add)
    with pytest.raises(SignatureError, match="dynamic_args"):
        tk.tpu_kernel("helion_tests::dynamic", dynamic_args=("factor",), mutates_args=("x",))(
            kernels.scale_in_place
        )
