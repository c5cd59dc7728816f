"""Kernel arguments written as words on the command line."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.cli.argspec import (
    DTYPES,
    TensorSpec,
    empty_tensor,
    materialize,
    parse_arguments,
    parse_choices,
    parse_config,
    parse_value,
    random_tensors,
    split_commas,
)
from tpu_kernels.errors import ArgumentError

SHAPES = st.lists(st.integers(0, 4096), max_size=5).map(tuple)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)


@given(dtype=st.sampled_from(sorted(DTYPES)), shape=SHAPES)
def test_a_tensor_is_read_back_as_written(dtype: str, shape: tuple[int, ...]) -> None:
    text = f"{dtype}[{','.join(map(str, shape))}]"
    assert parse_value(text) == TensorSpec(DTYPES[dtype], shape)


@given(dtype=st.sampled_from(sorted(DTYPES.values())), shape=SHAPES)
def test_a_spec_prints_as_text_that_reads_back(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(dtype, shape)
    assert parse_value(str(spec)) == spec


@given(value=SCALARS.filter(lambda v: v not in (float("inf"), float("-inf"))))
def test_a_scalar_keeps_its_value_and_type(value: object) -> None:
    parsed = parse_value(repr(value))
    assert (parsed, type(parsed)) == (value, type(value))


@given(text=st.text(max_size=30))
def test_any_text_is_read_or_refused_with_our_error(text: str) -> None:
    with contextlib.suppress(ArgumentError):  # any other exception fails the test
        parse_arguments([text])


@given(items=st.lists(st.sampled_from(["f32[8,128]", "(1, 2)", "x", "[f32[2],i8[]]"]), min_size=1))
def test_commas_inside_brackets_do_not_split(items: list[str]) -> None:
    assert split_commas(",".join(items)) == items


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values())))
def test_every_dtype_exists_in_torch_and_makes_tensors(dtype: str) -> None:
    spec = TensorSpec(dtype, (2, 3))
    for tensor in (empty_tensor(spec), random_tensors()(spec)):
        assert tensor.shape == (2, 3)
        assert tensor.dtype == getattr(torch, dtype)


def test_lists_of_tensors_become_lists_of_tensors() -> None:
    value = parse_value("[f32[2],none,f32[3]]")
    first, hole, last = materialize(value, empty_tensor)
    assert (first.shape, hole, last.shape) == ((2,), None, (3,))


def test_named_arguments_follow_positional_ones() -> None:
    positional, named = parse_arguments(["f32[8]", "act=silu", "block=(8, 128)"])
    assert positional == [TensorSpec("float32", (8,))]
    assert named == {"act": "silu", "block": (8, 128)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x=1", "f32[8]"], "follows a named one"),
        (["x=1", "x=2"], "given twice"),
        (["q32[8]"], "no dtype is called 'q32'"),
        (["f32[8"], "is not a tensor"),
        (["f32[8,,2]"], "empty or malformed size"),
        (["[f32[8],2"], "closing bracket"),
    ],
)
def test_a_malformed_argument_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_arguments(words)


def test_a_config_needs_names() -> None:
    with pytest.raises(ArgumentError, match="NAME=VALUE"):
        parse_config(["128"])


def test_choices_of_one_parameter_are_given_at_once() -> None:
    assert parse_choices(["m=8,16", "n=1"]) == {"m": [8, 16], "n": [1]}
    with pytest.raises(ArgumentError, match="twice"):
        parse_choices(["m=8", "m=16"])
    with pytest.raises(ArgumentError, match="NAME=VALUE,VALUE"):
        parse_choices(["8,16"])
