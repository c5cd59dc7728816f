"""Overrides in eager mode: forms, order, predicates, variants, errors, scopes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.registry.override_checks import DEVICES, matrices, nothing_left, tables
from tpu_kernels.errors import OverrideError
from tpu_kernels.registry.overrides import (
    Decline,
    chain,
    explain_overrides,
    override,
    override_debug,
    overrides,
)
from tpu_kernels.registry.overrides.targets import derived, resolve, sites

clean = pytest.fixture(autouse=True)(nothing_left)


def plus_one(a: torch.Tensor, b: torch.Tensor, fallback: Any) -> torch.Tensor:
    return fallback(a, b) + 1


@pytest.mark.parametrize("device", DEVICES)
def test_with_block_replaces_the_operator_and_restores_the_dispatcher(device: str) -> None:
    a, b = matrices(device)
    expected = torch.mm(a, b)
    names = ("aten::mm", "aten::mm.out")
    before = tables(*names)
    with override("aten::mm", plus_one, device=device) as handle:
        assert torch.equal(torch.mm(a, b), expected + 1)
        assert torch.equal(a @ b, expected + 1), "matmul is made of mm"
        assert tables(*names) != before
    assert torch.equal(torch.mm(a, b), expected)
    assert tables(*names) == before
    assert (handle.hits, handle.declines, handle.errors) == (2, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    ["matmul", "linear", "addmm", "_softmax", "relu", "embedding", "native_layer_norm", "add"],
)
def test_every_kind_of_operator_is_restored_exactly(device: str, name: str) -> None:
    overloads = [resolve(f"aten::{name}"), *(op for op, _ in derived(resolve(f"aten::{name}")))]
    names = [op.name() for op in overloads]
    before = tables(*names)
    handle = override(f"aten::{name}", lambda *args, **kwargs: None, device=device).enable()
    assert all(x != y for x, y in zip(tables(*names), before, strict=True))
    handle.disable()
    assert tables(*names) == before


def test_enabled_handle_serves_every_thread_until_disabled() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    handle = override("aten::mm", plus_one, device="cpu").enable()
    assert handle.scope == "process"
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(torch.equal(torch.mm(a, b), expected + 1)))
    thread.start()
    thread.join()
    assert seen == [True]
    assert handle.enable() is handle, "enabling twice is enabling once"
    handle.disable()
    handle.disable()
    assert torch.equal(torch.mm(a, b), expected)


def test_with_block_is_invisible_to_other_threads() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    entered, checked = threading.Event(), threading.Event()
    seen: dict[str, bool] = {}

    def other() -> None:
        entered.wait()
        seen["outside"] = torch.equal(torch.mm(a, b), expected)
        with override("aten::mm", lambda x, y: x * 0, device="cpu"):
            seen["own scope"] = not torch.mm(a, b).any()
        checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with override("aten::mm", plus_one, device="cpu"):
        entered.set()
        checked.wait()
        assert torch.equal(torch.mm(a, b), expected + 1)
    thread.join()
    assert seen == {"outside": True, "own scope": True}


@pytest.mark.parametrize("device", DEVICES)
def test_backward_inside_the_block_sees_it_in_autograds_threads(device: str) -> None:
    a, b = matrices(device)
    a.requires_grad_()
    with override("aten::mm", plus_one, device=device) as handle:
        torch.mm(a, b).sum().backward()
    assert handle.hits == 2
    torch.testing.assert_close(a.grad, torch.ones_like(a) @ b.t() + 1)


def test_many_threads_enter_and_leave_without_disturbing_each_other() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            with override("aten::mm", lambda x, y, fallback: fallback(x, y) + number, device="cpu"):
                if not torch.equal(torch.mm(a, b), expected + number):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_decorator_makes_an_inactive_override() -> None:
    @override("aten::mm", device="cpu", when=lambda a, b: a.shape[0] == 8)
    def zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.new_zeros(a.shape[0], b.shape[1])

    a, b = matrices("cpu")
    assert torch.mm(a, b).any()
    assert not zeros(a, b).any(), "calling it calls the implementation"
    with zeros:
        assert not torch.mm(a, b).any()
        assert torch.mm(a[:4], b).any()
    assert (zeros.hits, zeros.declines) == (1, 1)


def test_order_is_priority_then_latest_first() -> None:
    a, b = matrices("cpu")
    calls: list[str] = []

    def named(name: str) -> Any:
        def impl(x: torch.Tensor, y: torch.Tensor, fallback: Any) -> torch.Tensor:
            calls.append(name)
            return fallback(x, y)

        return override("aten::mm", impl, device="cpu", priority=1 if name == "high" else 0)

    first, high, second = (named(n) for n in ("first", "high", "second"))
    with first, high, second:
        torch.mm(a, b)
    assert calls == ["high", "second", "first"]
    calls.clear()
    second.enable()
    with first:
        torch.mm(a, b)
    second.disable()
    assert calls == ["first", "second"], "the with block was entered later"


def test_nested_blocks_of_one_handle_count_once() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    handle = override("aten::mm", plus_one, device="cpu")
    with handle:
        with handle:
            assert torch.equal(torch.mm(a, b), expected + 1)
        assert torch.equal(torch.mm(a, b), expected + 1)
    assert torch.equal(torch.mm(a, b), expected)


def test_declined_calls_go_to_the_next_and_then_to_the_original() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)

    def why_not(x: torch.Tensor, y: torch.Tensor) -> bool | str:
        return x.shape[0] % 8 == 0 or Decline(f"{x.shape[0]} rows are not a multiple of 8")

    outer = override("aten::mm", plus_one, device="cpu", when=lambda x, y: x.shape[0] > 4)
    inner = override("aten::mm", plus_one, device="cpu", when=why_not)
    with outer, inner:
        assert torch.equal(torch.mm(a, b), expected + 2)
        torch.testing.assert_close(torch.mm(a[:6], b), expected[:6] + 1)
        torch.testing.assert_close(torch.mm(a[:2], b), expected[:2])
    assert (inner.hits, inner.declines) == (1, 2)
    assert inner.last_decline == "2 rows are not a multiple of 8"
    assert outer.last_decline == "the predicate said no"


def test_implementation_that_calls_the_operator_reaches_the_original() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    with override("aten::mm", lambda x, y: torch.mm(x, y) * 2, device="cpu") as handle:
        assert torch.equal(torch.mm(a, b), expected * 2)
        out = torch.empty(8, 8)
        torch.mm(a, b, out=out)
        assert torch.equal(out, expected * 2)
    assert handle.hits == 2


def test_mutual_overrides_do_not_recurse() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    batched = override("aten::bmm", lambda x, y: torch.mm(x[0], y[0])[None], device="cpu")
    single = override("aten::mm", lambda x, y: torch.bmm(x[None], y[None])[0], device="cpu")
    with batched, single:
        torch.testing.assert_close(torch.mm(a, b), expected)


def test_predicates_may_ignore_arguments_that_torch_passes_only_sometimes() -> None:
    c = torch.ones(8, 8)
    a, b = matrices("cpu")

    def impl(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return bias * 0 + 7

    handle = override("aten::addmm", impl, device="cpu", when=lambda bias, x, y: True)
    with handle:
        assert (torch.addmm(c, a, b) == 7).all()
        assert not (torch.addmm(c, a, b, beta=2.0) == 7).any()
    assert (handle.hits, handle.declines) == (1, 1)
    assert handle.last_decline is not None
    assert "does not take beta" in handle.last_decline


@pytest.mark.parametrize("device", DEVICES)
def test_inplace_and_out_variants_follow_the_functional_overload(device: str) -> None:
    x = torch.tensor([-1.0, 2.0], device=device)
    doubled = torch.tensor([-2.0, 4.0], device=device)
    with override("aten::relu", lambda t: t * 2, device=device) as handle:
        y = x.clone()
        assert y.relu_() is y
        assert torch.equal(y, doubled)
        out = torch.empty(0, device=device)
        assert torch.ops.aten.relu.out(x, out=out) is out
        assert torch.equal(out, doubled)
        view = torch.zeros(3, 2, device=device)
        view[1] = x
        view[1].relu_()
        assert torch.equal(view[1], doubled)
        assert not view[::2].any()
    assert handle.hits == 3
    with (
        override(
            "aten::max.dim",
            lambda t, d: (t * 0, torch.zeros_like(t, dtype=torch.int64)),
            device=device,
        ),
        pytest.raises(RuntimeError, match="can't be cast"),
    ):
        torch.max(x, 0, out=(torch.empty(2, device=device, dtype=torch.int64),) * 2)


def test_out_overload_and_mutating_operators_can_be_overridden_themselves() -> None:
    a, b = matrices("cpu")
    out = torch.empty(8, 8)
    with override("aten::mm.out", lambda x, y, out: out.fill_(3), device="cpu") as handle:
        torch.mm(a, b, out=out)
        assert torch.mm(a, b).ne(3).any(), "the functional overload is another operator"
    assert (out == 3).all()
    assert handle.hits == 1

    def add_lists(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x + y + 1 for x, y in zip(xs, ys, strict=True)]

    xs = [torch.zeros(2), torch.ones(3)]
    with override("aten::_foreach_add.List", add_lists, device="cpu"):
        torch._foreach_add_(xs, [torch.ones(2), torch.ones(3)])
    assert [x.tolist() for x in xs] == [[2.0, 2.0], [3.0, 3.0, 3.0]]


def test_fused_optimizer_step_can_be_overridden() -> None:
    w = torch.nn.Parameter(torch.ones(4))
    steps: list[int] = []

    def step(params: Any, grads: Any, *rest: Any, **options: Any) -> None:
        steps.append(len(params))
        for p, g in zip(params, grads, strict=True):
            p.sub_(g)

    w.grad = torch.ones(4)
    with override("aten::_fused_adamw_", step, device="cpu"):
        torch.optim.AdamW([w], fused=True).step()
    assert steps == [1]
    assert not w.any()


def test_backward_operators_can_be_overridden() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with override("aten::native_layer_norm_backward", _zero_layer_norm_backward, device="cpu") as h:
        torch.nn.functional.layer_norm(x, (8,)).sum().backward()
    assert h.hits == 1
    assert x.grad is not None
    assert not x.grad.any()


def _zero_layer_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    return torch.zeros_like(x), None, None


def test_errors_name_operator_and_implementation() -> None:
    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    a, b = matrices("cpu")
    with override("aten::mm", broken, device="cpu") as handle:
        with pytest.raises(
            OverrideError, match=r"broken: it raised ValueError: no such luck"
        ) as info:
            torch.mm(a, b)
        assert isinstance(info.value.__cause__, ValueError)
        assert info.value.where is not None
        assert __file__ in info.value.where
    assert (handle.hits, handle.errors) == (1, 1)
    with (
        override("aten::mm", plus_one, device="cpu", when=lambda x, y: x.nonsense),
        pytest.raises(OverrideError, match=r"predicate .*<lambda>.* raised AttributeError"),
    ):
        torch.mm(a, b)


def test_fallback_on_error_warns_once_and_calls_the_next() -> None:
    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    lower = override("aten::mm", plus_one, device="cpu", priority=-1)
    with lower, override("aten::mm", broken, device="cpu", on_error="fallback") as handle:
        with pytest.warns(RuntimeWarning, match=r"aten::mm.*no such luck; falling back"):
            assert torch.equal(torch.mm(a, b), expected + 1)
        assert torch.equal(torch.mm(a, b), expected + 1)
    assert handle.errors == 2
    assert handle.last_error == "ValueError: no such luck"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("aten::no_such_op", plus_one), "no such operator"),
        (("mm", plus_one), "no such operator"),
        (("aten::mm.nope", plus_one), "no overload 'nope'"),
        (("aten::mm", lambda a: a), "takes 1 to 1 positional arguments, the operator passes 2"),
        (("aten::mm", lambda a, b, c: a), "takes 3 to 3"),
        (("aten::view", lambda a, shape: a), "view of its input"),
        (("aten::mm", 3), "cannot be called"),
        (("aten::mm", torch.ops.aten.mm), "the operator itself"),
    ],
)
def test_refused_at_registration(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OverrideError, match=message):
        override(*arguments, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device='gpu' is not one of tpu, cpu"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"backward": "original"}, "gradient formula"),
        ({"when": lambda: True}, "the predicate .* takes 0 to 0"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OverrideError, match=message):
        override("aten::mm", plus_one, **{"device": "cpu"} | options)


def test_removed_override_is_gone_even_from_open_blocks() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    handle = override("aten::mm", plus_one, device="cpu")
    before = tables("aten::mm")
    with handle:
        handle.remove()
        assert torch.equal(torch.mm(a, b), expected)
        assert tables("aten::mm") == before
    assert handle not in overrides()
    with pytest.raises(OverrideError, match="removed"):
        handle.enable()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (lambda a, b: (a @ b).double(), "dtype torch.float64 instead of torch.float32"),
        (lambda a, b: (a @ b)[:4], r"shape \[4, 8\] instead of \[8, 8\]"),
        (lambda a, b: (b.t() @ a.t()).t(), r"stride \[1, 8\] instead of \[8, 1\]"),
        (lambda a, b: (a @ b, a), "2 results instead of 1"),
    ],
)
def test_debug_mode_catches_results_of_another_form(device: str, impl: Any, message: str) -> None:
    a, b = matrices(device)
    with override_debug(), override("aten::mm", impl, device=device) as handle:
        with pytest.raises(OverrideError, match=message):
            torch.mm(a, b)
        assert handle.errors == 1
    with override("aten::mm", impl, device=device, debug=True), pytest.raises(OverrideError):
        torch.mm(a, b)


def test_debug_mode_accepts_what_is_right_and_keeps_random_numbers() -> None:
    a, b = matrices("cpu")
    with override_debug():
        with override("aten::mm", plus_one, device="cpu") as handle:
            torch.mm(a, b)
        torch.manual_seed(0)
        with override("aten::bernoulli", lambda t: torch.rand_like(t), device="cpu"):
            torch.bernoulli(a.sigmoid())
            drawn = torch.rand(3)
    assert (handle.hits, handle.errors) == (1, 0)
    torch.manual_seed(0)
    torch.rand_like(a)
    assert torch.equal(drawn, torch.rand(3))


def test_records_show_what_happened() -> None:
    def only_large(a: torch.Tensor, b: torch.Tensor) -> bool | str:
        return a.shape[0] >= 8 or "too small"

    a, b = matrices("cpu")
    handle = override("aten::mm", plus_one, device="cpu", when=only_large, priority=3)
    with handle:
        torch.mm(a, b)
        torch.mm(a[:4], b)
        record = next(r for r in overrides() if r.scope == "thread")
    assert (record.op, record.device, record.scope, record.priority) == (
        "aten::mm",
        "cpu",
        "thread",
        3,
    )
    assert record.impl.endswith("plus_one")
    assert record.predicate is not None
    assert record.predicate.endswith("only_large")
    assert record.variants == ("aten::mm.out",)
    assert (record.hits, record.declines, record.last_decline) == (1, 1, "too small")
    assert handle.scope == "off"


def test_explanation_names_the_line_and_the_reason() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x @ x
            return x[:4] @ x

    a, _ = matrices("cpu")
    when = lambda x, y: x.shape[0] == 8 or "small"  # noqa: E731
    with override("aten::mm", plus_one, device="cpu", when=when):
        explanation = explain_overrides(Net(), a)
    big, small = explanation.rows
    assert (big.calls, small.calls) == (3, 1)
    assert (big.shapes, small.shapes) == ("[8, 8], [8, 8]", "[4, 8], [8, 8]")
    assert big.ran is not None
    assert big.ran.endswith("plus_one")
    assert small.ran is None
    assert [reason for _, reason in small.declined] == ["small"]
    assert big.where.rpartition(":")[0] == __file__
    assert "small" in str(explanation)


def test_packets_mean_their_obvious_overload() -> None:
    assert resolve("aten::add") is torch.ops.aten.add.Tensor
    assert resolve(torch.ops.aten.mm) is torch.ops.aten.mm.default
    with pytest.raises(OverrideError, match="none of its overloads"):
        resolve("aten::pow")


def test_composites_sit_above_autograd_and_others_below() -> None:
    assert {s.key for s in sites(resolve("aten::mm"), "tpu")} == {"PrivateUse1"}
    assert {s.key for s in sites(resolve("aten::matmul"), "tpu")} == {
        "PrivateUse1",
        "AutogradPrivateUse1",
    }


def test_precision_of_float32_matmuls_is_visible() -> None:
    a, b = matrices("cpu")
    seen: list[str] = []

    def impl(x: torch.Tensor, y: torch.Tensor, fallback: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return fallback(x, y)

    before = torch.get_float32_matmul_precision()
    try:
        with override("aten::mm", impl, device="cpu"):
            torch.mm(a, b)
            torch.set_float32_matmul_precision("medium")
            torch.mm(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [before, "medium"]


def test_blocks_may_be_left_in_another_order_than_the_reverse() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    first = override("aten::mm", plus_one, device="cpu")
    second = override("aten::mm", lambda x, y: x * 0, device="cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not torch.mm(a, b).any(), "the second is still in force"
    second.__exit__()
    assert torch.equal(torch.mm(a, b), expected)
    assert chain.active() == []


def test_leaving_in_a_thread_that_has_not_entered_is_refused() -> None:
    refused: list[str] = []
    handle = override("aten::mm", plus_one, device="cpu")

    def leave() -> None:
        try:
            handle.__exit__()
        except OverrideError as error:
            refused.append(error.problem)

    with handle:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "not entered" in refused[0]


@pytest.mark.parametrize("act", ["remove", "disable"])
def test_an_implementation_may_end_its_own_override(act: str) -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)

    def once(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        getattr(handle, act)()
        return torch.mm(x, y) + 1

    handle = override("aten::mm", once, device="cpu").enable()
    assert torch.equal(torch.mm(a, b), expected + 1)
    assert torch.equal(torch.mm(a, b), expected)


def test_an_implementation_may_enter_another_override() -> None:
    a, b = matrices("cpu")
    expected = torch.mm(a, b)
    inner = override("aten::mm", plus_one, device="cpu")

    def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with inner:
            return torch.mm(x, y) + 1

    with override("aten::mm", outer, device="cpu"):
        assert torch.equal(torch.mm(a, b), expected + 2)


def test_derived_inplace_variant_casts_no_more_than_torch() -> None:
    def through(x: torch.Tensor, y: torch.Tensor, fallback: Any) -> torch.Tensor:
        return fallback(x, y)

    whole, half = torch.ones(2, dtype=torch.int64), torch.full((2,), 0.5)
    with (
        override("aten::add", through, device="cpu"),
        pytest.raises(OverrideError, match="can't be cast"),
    ):
        whole.add_(half)
    assert whole.tolist() == [1, 1]


def test_debug_mode_catches_a_result_in_an_arguments_memory() -> None:
    x = torch.ones(3)
    with (
        override_debug(),
        override("aten::relu", lambda x: x, device="cpu"),
        pytest.raises(OverrideError, match="shares the memory"),
    ):
        torch.relu(x)


def test_decisions_are_logged_where_debug_messages_are_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = matrices("cpu")
    with caplog.at_level("DEBUG", logger="tpu_kernels.overrides"):
        only_small = override("aten::mm", plus_one, device="cpu", when=lambda x, y: "too large")
        with override("aten::mm", plus_one, device="cpu", when=lambda x, y: True), only_small:
            torch.mm(a, b)
    (message,) = caplog.messages
    name = plus_one.__module__ + ".plus_one"
    assert message == f"aten::mm([8, 8], [8, 8]): {name}; {name} declined: too large"
