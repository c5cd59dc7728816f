"""Keys of tuning records: what is the same entry, what is not, and what survives on disk."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning.records import (
    Record,
    RecordError,
    canonical,
    decode,
    digest,
    encode,
    encode_config,
    frozen,
    group_of,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.complex_numbers(allow_nan=False)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(max_size=4) | st.just("$float") | st.integers(), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    """Equality with the distinctions that keys make, written down independently of the encoding."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        if len(a) != len(b):
            return False
        return all(any(same(k, j) and same(v, w) for j, w in b.items()) for k, v in a.items())
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


@given(values, values)
def test_two_keys_are_one_entry_exactly_when_they_are_the_same_values(a: object, b: object) -> None:
    assert (digest(encode(a)) == digest(encode(b))) == same(a, b)


@given(values)
def test_a_decoded_value_is_the_value_with_lists_for_tuples(value: object) -> None:
    assert same(frozen(decode(encode(value))), frozen(value))


@given(values)
def test_encoding_an_encoded_record_text_changes_nothing(value: object) -> None:
    record = Record(encode(value), {"a": decode(encode(value))}, 1.5, {"b": 1}, "now")
    again = Record.loads(record.dumps())
    assert again.digest == record.digest
    assert again.dumps() == record.dumps()


@pytest.mark.parametrize(
    "pair",
    [(1, 1.0), (1, True), (0, False), (0.0, -0.0), ("1", 1), (None, "None"), ([], {}), ((), None)],
)
def test_values_that_python_or_a_reader_may_confuse_are_different_keys(pair: tuple) -> None:
    assert digest(encode(pair[0])) != digest(encode(pair[1]))


def test_nan_equals_itself_and_dict_order_does_not_matter() -> None:
    assert digest(encode({"a": float("nan"), "b": 1})) == digest(encode({"b": 1, "a": math.nan}))


def test_dtypes_of_torch_numpy_and_jax_have_one_spelling() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    spellings = [torch.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16]
    assert {canonical(encode(s)) for s in spellings} == {'{"$dtype":"bfloat16"}'}
    assert encode(np.float32) == encode(torch.float32) == {"$dtype": "float32"}


def test_numpy_scalars_are_the_numbers_they_hold() -> None:
    assert encode([np.int64(3), np.float32(0.5), np.bool_(True)]) == [3, 0.5, True]


@pytest.mark.parametrize("value", [object(), torch.ones(2), np.ones(2), lambda: 0])
def test_values_without_a_stable_spelling_are_refused_with_their_place(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"key\.a\[0\]"):
        encode({"a": [value]})


class Mode(enum.Enum):
    FAST = 1


def test_configs_refuse_what_would_come_back_as_something_else() -> None:
    for value in (Mode.FAST, torch.float32):
        encode({"key": value})
        with pytest.raises(ArgumentError, match="enum or dtype"):
            encode_config({"acc": [value]})


def test_groups_are_safe_folder_names() -> None:
    assert group_of({"kernel": "../../etc/passwd"}) == "etc.passwd"
    assert group_of({"kernel": "..."}) == "other"
    assert group_of(["x" * 500]) == "x" * 80
    assert group_of([1]) == group_of(None) == "other"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "NaN",
        '{"format": "tpu_kernels.tuning/0"}',
        '{"format": "tpu_kernels.tuning/1", "record": {}}',
        "[" * 100_000,
    ],
)
def test_texts_that_are_not_records_say_so(text: str) -> None:
    with pytest.raises(RecordError):
        Record.loads(text)


def test_a_changed_value_is_found_by_the_checksum() -> None:
    text = Record(encode("k"), {"block": [128]}, 1.0).dumps()
    with pytest.raises(RecordError, match="checksum"):
        Record.loads(text.replace("128", "256"))
