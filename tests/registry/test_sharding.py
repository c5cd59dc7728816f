"""Sharding rules: what they mean, and what is said about wrong ones. No processes are needed."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from tpu_kernels.dsl.jax_frontend import Options, from_function
from tpu_kernels.dsl.spec import KernelSpec
from tpu_kernels.errors import ArgumentError, SignatureError
from tpu_kernels.registry.layout import Layout
from tpu_kernels.registry.sharding import Choice, EinsumRule, read_rule

Array = jax.Array


def two(x: Array, w: Array) -> Array: ...
def one(x: Array) -> Array: ...
def optional(x: Array, w: Array | None, n: int = 1) -> tuple[Array, Array]: ...
def listed(xs: list[Array]) -> list[Array]: ...
def writing(x: Array, new: Array) -> None: ...


def spec_of(fn: Any, **options: Any) -> KernelSpec:
    return from_function(fn, "rules::k", Options(**options))


def rule_of(text: str, fn: Any, **options: Any) -> EinsumRule:
    rule = read_rule(text, spec_of(fn, **options))
    assert isinstance(rule, EinsumRule)
    return rule


def choices(
    text: str,
    fn: Any,
    slots: tuple[Any, ...],
    inputs: Any,
    outputs: Any,
    out_slots: Any = (0,),
    **options: Any,
) -> list[Choice]:
    """The choices of a call with tensors of these shapes, but for the last: to split nothing."""
    values = (1,) if fn is optional else ()
    found = rule_of(text, fn, **options).choices(
        spec_of(fn, **options), Layout(slots, values), inputs, outputs, out_slots
    )
    last = found.pop()
    assert not last.splits_work
    assert len(last.inputs) == len(inputs)
    assert len(last.outputs) == len(outputs)
    return found


def test_every_axis_of_all_results_can_be_split() -> None:
    assert choices("m k, k n -> m n", two, (1, 1), [(2, 3), (3, 4)], [(2, 4)]) == [
        Choice((0, None), (0,)),
        Choice((None, 1), (1,)),
    ]


def test_a_reduced_axis_is_split_only_if_declared() -> None:
    found = choices("m k, k n -> m n; sum k", two, (1, 1), [(2, 3), (3, 4)], [(2, 4)])
    assert Choice((1, 0), ("sum",)) in found
    assert len(found) == 3


def test_an_axis_marked_anywhere_is_whole_everywhere() -> None:
    assert choices("b h!, h -> b h", two, (1, 1), [(2, 3), (3,)], [(2, 3)]) == [
        Choice((0, None), (0,))
    ]


def test_whole_and_unnamed_axes_may_differ_in_size() -> None:
    assert choices("b h! -> b h", one, (1,), [(2, 3)], [(2, 5)]) == [Choice((0,), (0,))]
    assert choices("b _ -> b _", one, (1,), [(2, 3)], [(2, 5)]) == [Choice((0,), (0,))]


def test_a_diagonal_is_not_split() -> None:
    assert choices("n n -> n", one, (1,), [(3, 3)], [(3,)]) == []


def test_batch_axes_line_up_at_the_right_and_size_one_is_shared() -> None:
    found = choices("... k, ... k -> ... k", two, (1, 1), [(5, 2, 3), (1, 3)], [(5, 2, 3)])
    assert found == [Choice((0, None), (0,)), Choice((1, None), (1,)), Choice((2, 1), (2,))]
    assert choices("... -> ...", one, (1,), [()], [()]) == []


def test_absent_arguments_and_axes_of_some_results() -> None:
    text = "b h, h -> b h, b; max h"
    present = choices(text, optional, (1, 1), [(2, 3), (3,)], [(2, 3), (2,)], (0, 1))
    assert present == [Choice((0, None), (0, 0)), Choice((1, 0), (1, "max"))]
    assert choices(text, optional, (1, None), [(2, 3)], [(2, 3), (2,)], (0, 1)) == [
        Choice((0,), (0, 0)),
        Choice((1,), (1, "max")),
    ]


def test_each_tensor_of_a_list_follows_the_rule_of_the_list() -> None:
    found = choices("b h! -> b h!", listed, ((1, 1),), [(4, 2), (4, 2)], [(4, 2)] * 3, (0, 0, 0))
    assert found == [Choice((0, 0), (0, 0, 0))]


def test_linear_arguments_may_be_partial_sums() -> None:
    found = choices("b! , b -> b; linear x", two, (1, 1), [(2,), (2,)], [(2,)])
    assert found == [Choice(("sum", None), ("sum",))]


def test_written_arguments_must_have_the_axis() -> None:
    options = {"mutates_args": ("x",)}
    found = choices("b s!, b h -> ", writing, (1, 1), [(4, 2), (4, 3)], [], (), **options)
    assert found == [Choice((0, 0), ())]


def test_a_result_without_dimensions() -> None:
    assert choices("b h ->; sum b h", one, (1,), [(2, 3)], [()]) == [
        Choice((0,), ("sum",)),
        Choice((1,), ("sum",)),
    ]


@pytest.mark.parametrize(
    ("rule", "fragment"),
    [
        ("m k, k n", "needs one"),
        ("m k -> m", "describes 1 tensors, the kernel has 2 tensor parameters (x, w)"),
        ("m k, k n -> m, n", "describes 2 tensors, the kernel has 1 results"),
        ("m 3k, k n -> m n", "'3k' is not an axis"),
        ("... m ..., k -> m", "more than one '...'"),
        ("m k, k n -> m n; sum z", "'sum z' names no axis"),
        ("m k, k n -> m n; sum m", "every result has that axis"),
        ("m k!, k n -> m n; sum k", "marked whole (!) and reduced"),
        ("m k, k n -> m n; mean k", "clause 'mean k' is not understood"),
        ("m k, k n -> m n; linear y", "names no tensor parameter"),
    ],
)
def test_a_wrong_rule_is_refused_at_decoration(rule: str, fragment: str) -> None:
    with pytest.raises(SignatureError) as caught:
        read_rule(rule, spec_of(two))
    assert fragment in str(caught.value)
    assert "rules::k" in str(caught.value)
    assert repr(rule) in str(caught.value)


def test_something_else_than_a_rule_is_refused() -> None:
    with pytest.raises(SignatureError, match="sharding is a int"):
        read_rule(3, spec_of(two))


def test_a_broken_rule_leaves_the_old_kernel_in_place() -> None:
    import torch

    import tpu_kernels as tk

    def define(rule: str) -> Any:
        @tk.tpu_kernel("rules::kept", sharding=rule)
        def kept(x: Array) -> Array:
            return x + 1

        return kept

    kernel = define("n -> n")
    with pytest.raises(SignatureError):
        define("n -> n, n")
    assert kernel(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize(
    ("inputs", "output", "fragment"),
    [
        ([(2, 3, 4), (3, 4)], (2, 4), "argument 'x' has 3 dimensions"),
        ([(2, 3), (3, 4)], (2, 4, 1), "result 0 has 3 dimensions"),
        ([(2, 3), (5, 4)], (2, 4), "axis 'k' has size 3 in argument 'x' and 5 in argument 'w'"),
        ([(2, 3), (3, 4)], (2, 8), "axis 'n' has size 4 in argument 'w' and 8 in result 0"),
    ],
)
def test_a_rule_that_does_not_fit_a_call_is_refused(
    inputs: Any, output: Any, fragment: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        choices("m k, k n -> m n", two, (1, 1), inputs, [output])
    assert fragment in str(caught.value)
