"""`check` of overrides: what differs from the original is found, what does not is passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpu_kernels.device  # noqa: F401
from tests.registry.override_checks import nothing_left
from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.overrides import override
from tpu_kernels.verify.check import check
from tpu_kernels.verify.override_samples import torch_samples

clean = pytest.fixture(autouse=True)(nothing_left)

SAMPLES = [(torch.ones(3, 4), torch.ones(4, 2)), (torch.eye(2), torch.ones(2, 2))]


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def through(*args: Any, fallback: Any, **kwargs: Any) -> Any:
    return fallback(*args, **kwargs)


def only_float32(a: torch.Tensor, b: torch.Tensor) -> bool | str:
    return a.dtype == torch.float32 or "only float32"


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_right_override_passes_on_torchs_own_samples(device: str) -> None:
    handle = override("aten::mm", exact, device=device, when=only_float32)
    report = check(handle)
    assert report.ok, report.text
    assert "mm float32" in report.row("samples").what
    assert "3 answered" in report.row("samples").what
    assert report.row("declines").what == "3 calls: 3x only float32"
    assert [row.name for row in report.rows][2:] == ["contract", "numerics", "grad"]
    assert (handle.hits, handle.declines, handle.scope) == (0, 0, "off"), (
        "the check leaves no trace"
    )


@pytest.mark.parametrize(
    "op",
    [
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::embedding",
        "aten::_fused_rms_norm",
        "aten::native_layer_norm_backward",
        "aten::linear",
        "aten::scaled_dot_product_attention",
        "aten::_foreach_add.List",
        "aten::add_.Tensor",
    ],
)
def test_torch_has_samples_for_operators_of_every_kind(op: str) -> None:
    handle = override(op, through, device="cpu")
    samples = torch_samples(handle.op, "cpu", 2)
    assert len(samples) >= 2
    report = check(handle, samples=[(s.args, s.kwargs) for s in samples if s.function is handle.op])
    assert all(row.status in ("ok", "skipped", "unavailable") for row in report.rows), report.text


def fail(impl: Any, name: str, **options: Any) -> str:
    report = check(override("aten::mm", impl, device="cpu", **options), samples=SAMPLES)
    row = report.row(name)
    assert row.status == "failed", report.text
    assert row.where is not None
    assert __file__ in row.where
    return row.what


def test_wrong_values_are_found_with_the_smallest_call() -> None:
    said = fail(lambda a, b, fallback: fallback(a, b) * 1.001, "numerics")
    assert "error 1.0e-03" in said
    assert "float32[2, 2]" in said, "the smaller of the two calls"
    assert "smallest of 2 calls" in said


def test_wrong_dtype_stride_and_shape_are_found() -> None:
    assert "dtype torch.float64" in fail(lambda a, b: a.double() @ b.double(), "contract")
    assert "stride" in fail(lambda a, b: (a @ b).t().contiguous().t(), "contract")
    assert "shape" in fail(lambda a, b: (a @ b)[:1], "contract")


def test_writing_into_an_argument_is_found() -> None:
    assert "writes into tensor 1" in fail(lambda a, b: a @ b.mul_(1.5), "contract")


def test_an_error_is_found_also_where_it_falls_back() -> None:
    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    assert "not today" in fail(broken, "contract")
    with pytest.warns(RuntimeWarning, match="falling back"):
        assert "fell back" in fail(broken, "contract", on_error="fallback")


def test_a_wrong_gradient_is_found() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return g @ b.t(), 2 * (a.t() @ g)

    handle = override("aten::matmul", Wrong.apply, device="cpu", backward="impl")
    report = check(handle, samples=SAMPLES)
    assert report.row("numerics").status == "ok"
    assert report.row("grad").status == "failed"
    assert "gradient 1" in report.row("grad").what


def test_a_backward_operator_is_checked_too() -> None:
    def wrong(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        return grad * output

    report = check(override("aten::_softmax_backward_data", wrong, device="cpu"))
    assert report.row("numerics").status == "failed"


def test_random_results_are_compared_in_form_only() -> None:
    report = check(override("aten::bernoulli", through, device="cpu"), (torch.rand(100),))
    assert report.row("contract").status == "ok"
    assert report.row("numerics").what == "the operator draws random numbers"


def test_nothing_to_compare_is_not_a_pass() -> None:
    never = override("aten::mm", exact, device="cpu", when=lambda a, b: "never")
    report = check(never, samples=SAMPLES)
    assert not report.ok
    assert report.row("samples").status == "unavailable"
    assert "2x never" in report.row("declines").what
    report = check(override("aten::_grouped_mm", through, device="cpu"))
    assert "no samples" in report.row("samples").what


def test_other_overrides_in_force_do_not_disturb_the_comparison() -> None:
    with override("aten::mm", lambda a, b, fallback: fallback(a, b) * 2, device="cpu", priority=-1):
        report = check(override("aten::mm", exact, device="cpu"), samples=SAMPLES)
    assert report.ok, report.text


def test_wrong_usage_is_refused() -> None:
    handle = override("aten::mm", exact, device="cpu")
    with pytest.raises(ArgumentError, match="contract, numerics, grad"):
        check(handle, passes=("races",))
    with pytest.raises(ArgumentError, match="not of overrides"):
        check(handle, SAMPLES[0], target="v6e")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="args="):
        check(exact)  # type: ignore[call-overload]
