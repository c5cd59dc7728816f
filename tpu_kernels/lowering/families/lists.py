"""Operators on lists of tensors (``_foreach_*``): the plain operator on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax import lax

from tpu_kernels.lowering.rules import Unlowered, find, lowers, overload
from tpu_kernels.lowering.values import Array, expand

_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor",
    "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt",
    "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "zero",
)  # fmt: skip
# For each operator: the overload that takes a tensor, and the one that takes a number.
_BINARY = {
    "add": ("add.Tensor", "add.Scalar"),
    "sub": ("sub.Tensor", "sub.Scalar"),
    "mul": ("mul.Tensor", "mul.Scalar"),
    "div": ("div.Tensor", "div.Scalar"),
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "clamp_max": ("clamp_max.Tensor", "clamp_max"),
    "clamp_min": ("clamp_min.Tensor", "clamp_min"),
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Scalar"),
}


def _rule(name: str) -> Callable[..., Any]:
    """The rule of a plain operator, looked up when a graph asks for it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        rule = find(overload(name))
        if rule is None:
            raise Unlowered(f"no rule for {name}")
        return rule(*args, **kwargs)

    return call


def _enter_unary(name: str) -> None:
    one = _rule(name)

    @lowers(f"_foreach_{name}")
    def each(tensors: Sequence[Array]) -> list[Array]:
        return [one(x) for x in tensors]


def _enter_binary(name: str, with_tensor: str, with_number: str) -> None:
    tensor, number = _rule(with_tensor), _rule(with_number)

    @lowers(f"_foreach_{name}.List")
    def lists(a: Sequence[Array], b: Sequence[Array], **options: Any) -> list[Array]:
        return [tensor(x, y, **options) for x, y in zip(a, b, strict=True)]

    @lowers(f"_foreach_{name}.Scalar")
    def scalar(a: Sequence[Array], value: Any) -> list[Array]:
        return [number(x, value) for x in a]

    @lowers(f"_foreach_{name}.ScalarList")
    def scalars(a: Sequence[Array], values: Sequence[Any]) -> list[Array]:
        return [number(x, value) for x, value in zip(a, values, strict=True)]


for _name in _UNARY:
    _enter_unary(_name)
for _name, _overloads in _BINARY.items():
    _enter_binary(_name, *_overloads)


@lowers("_foreach_add.Tensor")
def add_tensor(a: Sequence[Array], value: Array, *, alpha: Any = 1) -> list[Array]:
    return [_rule("add.Tensor")(x, value, alpha=alpha) for x in a]


@lowers("_foreach_mul.Tensor")
def mul_tensor(a: Sequence[Array], value: Array) -> list[Array]:
    return [_rule("mul.Tensor")(x, value) for x in a]


@lowers("_foreach_div.Tensor")
def div_tensor(a: Sequence[Array], value: Array) -> list[Array]:
    return [_rule("div.Tensor")(x, value) for x in a]


@lowers("_foreach_pow.ScalarAndTensor")
def pow_scalar(base: Any, exponents: Sequence[Array]) -> list[Array]:
    return [_rule("pow.Scalar")(base, y) for y in exponents]


def _enter_fused(name: str) -> None:
    one = _rule(name)

    @lowers(f"_foreach_{name}.Scalar")
    def scalar(
        x: Sequence[Array], a: Sequence[Array], b: Sequence[Array], value: Any = 1
    ) -> list[Array]:
        return [one(u, v, w, value=value) for u, v, w in zip(x, a, b, strict=True)]

    @lowers(f"_foreach_{name}.ScalarList")
    def scalars(
        x: Sequence[Array], a: Sequence[Array], b: Sequence[Array], values: Sequence[Any]
    ) -> list[Array]:
        return [one(u, v, w, value=n) for u, v, w, n in zip(x, a, b, values, strict=True)]


_enter_fused("addcmul")
_enter_fused("addcdiv")


@lowers("_foreach_lerp.List")
def lerp_list(a: Sequence[Array], b: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    return [_rule("lerp.Tensor")(x, y, w) for x, y, w in zip(a, b, weights, strict=True)]


@lowers("_foreach_lerp.Scalar")
def lerp_scalar(a: Sequence[Array], b: Sequence[Array], weight: Any) -> list[Array]:
    return [_rule("lerp.Scalar")(x, y, weight) for x, y in zip(a, b, strict=True)]


@lowers("_foreach_norm.Scalar")
def norm(a: Sequence[Array], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Array]:
    return [_rule("linalg_vector_norm")(x, ord, dtype=dtype) for x in a]


@lowers("_foreach_copy")
def copy(a: Sequence[Array], b: Sequence[Array], non_blocking: bool = False) -> list[Array]:
    return [
        expand(lax.convert_element_type(y, x.dtype), x.shape) for x, y in zip(a, b, strict=True)
    ]


@lowers("_foreach_max")
def largest(a: Sequence[Array], dtype: torch.dtype | None = None) -> list[Array]:
    if dtype is not None:
        raise Unlowered("_foreach_max with a dtype")
    return [_rule("max")(x) for x in a]
