"""From Python signatures to operator schemas, and the messages for what cannot become one."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, Literal, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpu_kernels.dsl.jax_frontend import Options, from_function
from tpu_kernels.errors import SignatureError


def schema(fn: Any, **options: Any) -> str:
    return from_function(fn, "t::f", Options(**options)).schema


class Activation(enum.Enum):
    RELU = 1
    GELU = 2


def test_tensors_optionals_and_lists() -> None:
    def f(
        x: jax.Array,
        w: torch.Tensor,
        b: jax.Array | None,
        xs: list[jax.Array],
        pair: tuple[jax.Array, jax.Array],
        holes: Sequence[Optional[jax.Array]],  # noqa: UP045 (users write both)
        more: list[jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]: ...

    assert schema(f) == (
        "f(Tensor x, Tensor w, Tensor? b, Tensor[] xs, Tensor[] pair, Tensor?[] holes, Tensor[]? "
        "more=None)"
        " -> (Tensor, Tensor?, Tensor[])"
    )


def test_static_values_of_every_kind() -> None:
    def f(
        x: jax.Array,
        n: int,
        block: tuple[int, int] = (8, 128),
        pads: tuple[int, ...] = (),
        act: Activation = Activation.RELU,
        mode: Literal["a", "b"] = "a",
        dtype: jnp.dtype = jnp.float32,
        torch_dtype: torch.dtype = torch.bfloat16,
        limit: float = float("inf"),
        names: tuple[str, ...] = ("q",),
        maybe: int | None = None,
        *,
        flag: bool = False,
    ) -> jax.Array: ...

    assert schema(f) == (
        'f(Tensor x, int n, int[2] block=[8, 128], int[] pads=[], str act="RELU", str mode="a", '
        "ScalarType dtype=float32, ScalarType torch_dtype=bfloat16, float? limit=None, str[]? "
        "names=None, "
        "int? maybe=None, *, bool flag=False) -> Tensor"
    )


def test_values_cross_the_schema_and_come_back_as_annotated() -> None:
    def f(
        x: jax.Array,
        act: Activation,
        block: tuple[int, int],
        dtype: jnp.dtype,
        s: float = float("nan"),
    ) -> jax.Array: ...

    spec = from_function(f, "t::f", Options())
    act, block, dtype, s = (spec.parameter(n) for n in ("act", "block", "dtype", "s"))
    assert act.for_kernel(act.to_schema(Activation.GELU)) is Activation.GELU
    assert block.for_kernel([1, 2]) == (1, 2)
    assert dtype.for_kernel(dtype.to_schema(jnp.bfloat16)) == np.dtype(jnp.bfloat16)
    assert np.isnan(s.for_kernel(None))


def test_tunables_are_optional_in_the_schema() -> None:
    def f(x: jax.Array, *, block_m: int = 128, block_n: int) -> jax.Array: ...

    assert schema(f, configs={"block_m": [1], "block_n": [2]}) == (
        "f(Tensor x, *, int? block_m=None, int? block_n=None) -> Tensor"
    )


def test_dynamic_scalars_are_symbolic_in_the_schema() -> None:
    def f(x: jax.Array, n: int, s: float, flag: bool) -> jax.Array: ...

    assert (
        schema(f, dynamic_args=("n", "s")) == "f(Tensor x, SymInt n, float s, bool flag) -> Tensor"
    )


def test_mutated_arguments_are_annotated() -> None:
    def f(cache: jax.Array, new: jax.Array): ...

    assert schema(f, mutates_args=("cache",)) == "f(Tensor(a!) cache, Tensor new) -> ()"


def test_nested_results_are_flat_in_the_schema_and_nest_again() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, list[jax.Array]]]: ...

    spec = from_function(f, "t::f", Options())
    assert spec.schema.endswith("-> (Tensor, Tensor, Tensor[])")
    assert spec.returns.flatten((1, (2, [3]))) == [1, 2, [3]]
    assert spec.returns.unflatten([1, 2, [3]]) == (1, (2, [3]))
    with pytest.raises(ValueError, match=r"result\[1\] should be a tuple of 2 values"):
        spec.returns.flatten((1, 2))


def test_partial_and_jit_wrapped_functions() -> None:
    def f(x: jax.Array, y: jax.Array, alpha: float) -> jax.Array: ...

    assert (
        schema(functools.partial(f, alpha=2.0))
        == "f(Tensor x, Tensor y, *, float alpha=2.0) -> Tensor"
    )
    assert schema(jax.jit(f, static_argnums=2)) == "f(Tensor x, Tensor y, float alpha) -> Tensor"


def test_interpret_is_not_part_of_the_operator() -> None:
    def f(x: jax.Array, interpret: object = True) -> jax.Array: ...

    assert schema(f) == "f(Tensor x) -> Tensor"


def no_annotation(x) -> jax.Array: ...  # type: ignore[no-untyped-def]


def dict_annotation(x: dict[str, jax.Array]) -> jax.Array: ...


def no_result(x: jax.Array): ...  # type: ignore[no-untyped-def]


def number_result(x: jax.Array) -> int: ...


def returns_none(x: jax.Array, out: jax.Array) -> None: ...


def variadic(*xs: jax.Array) -> jax.Array: ...


def mixed_default(x: jax.Array, mode: Literal["a", "b"] = "c") -> jax.Array: ...  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (no_annotation, ["'x' has no type annotation", "x: jax.Array"]),
        (dict_annotation, ["'x' is annotated dict[str, jax.Array]", "supported:"]),
        (no_result, ["the result has no type annotation", "-> jax.Array"]),
        (number_result, ["return annotation int is not made of tensors"]),
        (returns_none, ["returns nothing and mutates nothing", "mutates_args"]),
        (variadic, ["'*xs", "variadic", "list[jax.Array]"]),
        (mixed_default, ["default of 'mode'", "'a', 'b'"]),
    ],
)
def test_messages_name_kernel_parameter_place_and_remedy(fn: Any, words: list[str]) -> None:
    with pytest.raises(SignatureError) as error:
        schema(fn)
    text = str(error.value)
    for word in ["t::f", f"{__file__}:{fn.__code__.co_firstlineno}", *words]:
        assert word in text
    assert len(text.splitlines()[0]) <= 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mutates_args": ("z",)}, ["mutates_args", "'z'", "tensor parameters: x"]),
        ({"dynamic_args": ("q",)}, ["dynamic_args", "'q'", "x, n"]),
        ({"dynamic_args": ("x",), "configs": {"q": [1]}}, ["configs", "'q'"]),
        ({"int64": "wide"}, ["int64='wide'", "'narrow_checked'"]),
        ({"backward": "magic"}, ["backward='magic'"]),
        ({"backward": "reference"}, ["needs reference="]),
    ],
)
def test_options_that_contradict_the_signature(options: dict[str, Any], words: list[str]) -> None:
    def f(x: jax.Array, n: int = 1) -> jax.Array: ...

    with pytest.raises(SignatureError) as error:
        schema(f, **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["_private::f", "a::_f", "a::b::c", "a b::c", "1::x"])
def test_names_that_torch_would_refuse_or_reserve(name: str) -> None:
    def f(x: jax.Array) -> jax.Array: ...

    with pytest.raises(SignatureError, match="not a valid operator name"):
        from_function(f, name, Options())


def test_defaults_that_no_schema_can_write_survive() -> None:
    def f(
        x: jax.Array, name: str = "a \"b\" 'c' \\ \n", limits: tuple[float, ...] = (float("inf"),)
    ) -> jax.Array: ...

    spec = from_function(f, "t::f", Options())
    assert spec.schema == "f(Tensor x, str? name=None, float[]? limits=None) -> Tensor"
    assert spec.parameter("name").for_kernel(None) == "a \"b\" 'c' \\ \n"
    assert spec.parameter("limits").for_kernel(None) == (float("inf"),)


@pytest.mark.parametrize(
    ("annotation", "default", "words"),
    [
        (jax.Array, 3, "a tensor cannot have the default 3"),
        (int, 2.5, "2.5 is no int"),
        (int, None, "None is no value of it"),
        (bool, 2, "2 is no bool"),
        (str, 1, "1 is no str"),
        (tuple[int, int], (1, 2, 3), "expected 2 values, got 3"),
        (Literal[1, 2], True, "expected one of 1, 2, got True"),
    ],
)
def test_defaults_that_do_not_fit_are_refused_by_name(
    annotation: Any, default: Any, words: str
) -> None:
    def f(x: jax.Array, n=default) -> jax.Array: ...  # type: ignore[no-untyped-def]

    f.__annotations__["n"] = annotation
    with pytest.raises(SignatureError, match="default of 'n' does not fit") as caught:
        schema(f)
    assert words in str(caught.value)


def test_defaults_reach_the_kernel_with_the_type_of_their_annotation() -> None:
    def f(
        x: jax.Array,
        s: float = 1,
        pads: tuple[float, ...] = (1, 2),
        n: int = np.int64(3),  # type: ignore[assignment]
    ) -> jax.Array: ...

    spec = from_function(f, "t::f", Options())
    assert schema(f) == "f(Tensor x, float s=1.0, float[] pads=[1.0, 2.0], int n=3) -> Tensor"
    defaults = [spec.parameter(name).default for name in ("s", "pads", "n")]
    assert [type(defaults[0]), type(defaults[2])] == [float, int]
    assert [type(value) for value in defaults[1]] == [float, float]


def test_literals_are_strict_about_types_and_may_be_none() -> None:
    def f(x: jax.Array, n: Literal[1, 2] = 2, side: Literal["l", None] = None) -> jax.Array: ...

    spec = from_function(f, "t::f", Options())
    assert schema(f) == "f(Tensor x, int n=2, str? side=None) -> Tensor"
    to_schema = spec.parameter("n").to_schema
    assert to_schema is not None
    for wrong in (3, True, 1.0):
        with pytest.raises(ValueError, match="expected one of 1, 2"):
            to_schema(wrong)


def test_numbers_of_several_types_are_scalars_that_keep_theirs() -> None:
    def f(x: jax.Array, v: int | float = 1, w: int | float | bool | None = None) -> jax.Array: ...

    spec = from_function(f, "t::f", Options())
    assert schema(f) == "f(Tensor x, Scalar v=1, Scalar? w=None) -> Tensor"
    to_schema = spec.parameter("v").to_schema
    assert to_schema is not None
    assert [type(to_schema(v)) for v in (1, 1.0, np.float32(2))] == [int, float, float]
    with pytest.raises(TypeError, match="True is none of int, float"):
        to_schema(True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flops": 3}, "flops=3 is not a function"),
        ({"constraints": 3}, "constraints=3 is not a function"),
        ({"configs": 3}, "configs=3 is not a dict of lists, a list of dicts, or a function"),
        ({"configs": {"n": 3}}, "is not a dict of lists of candidates"),
        ({"cache_dir": 3}, "cache_dir=3 is not a path"),
        ({"precision": "bogus"}, "precision='bogus' is not one that jax"),
        ({"mutates_args": ("x",), "donate_args": ("x",)}, "in mutates_args and in donate_args"),
    ],
)
def test_options_of_a_wrong_kind_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    def f(x: jax.Array, n: int = 1) -> jax.Array: ...

    with pytest.raises(SignatureError) as caught:
        schema(f, **options)
    assert words in str(caught.value)


def test_a_function_of_configs_tunes_no_tensors() -> None:
    def f(x: jax.Array, *, w: jax.Array, block: int = 8, s: float = 1.0) -> jax.Array: ...

    assert schema(f, configs=lambda **_: [], dynamic_args=("s",)) == (
        "f(Tensor x, *, Tensor w, int? block=None, float s=1.0) -> Tensor"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aten::mine", "namespace 'aten' is torch's own"),
        ("a::class", "not a valid operator name"),
        ("a::b-c", "not a valid operator name"),
        ("a::b::c", "not a valid operator name"),
    ],
)
def test_names_that_torch_cannot_take_are_refused(name: str, words: str) -> None:
    def f(x: jax.Array) -> jax.Array: ...

    with pytest.raises(SignatureError) as caught:
        from_function(f, name, Options())
    assert words in str(caught.value)


def test_parameters_beginning_with_an_underscore_are_refused() -> None:
    def f(x: jax.Array, _op: int = 1) -> jax.Array: ...

    with pytest.raises(SignatureError, match="parameter '_op' begins with an underscore"):
        schema(f)
