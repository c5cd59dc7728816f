"""The content hash: what changes a kernel changes it, what does not, does not."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpu_kernels.dsl.source import digest, locate

PREAMBLE = "FACTOR = {factor}\ndef helper(v):\n    {comment}\n    return v * FACTOR\n"


def module_of(text: str) -> ModuleType:
    module = ModuleType("author")
    exec(compile(text, "author.py", "exec"), module.__dict__)
    return module


def kernel_with(helper: Any) -> Any:
    def kernel(x: Any) -> Any:
        return helper(x) + 1

    return kernel


def test_helpers_and_their_globals_count_and_comments_do_not() -> None:
    two, five, two_again = (
        digest(kernel_with(module_of(PREAMBLE.format(factor=f, comment=c)).helper))
        for f, c in ((2.0, "pass"), (5.0, "pass"), (2.0, "# a comment\n    pass"))
    )
    assert two != five
    assert two == two_again


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", b"a"),
        ((1, 2), [1, 2]),
        (np.zeros(2), np.zeros(3)),
    ],
)
def test_closure_values_of_different_meaning_differ(a: Any, b: Any) -> None:
    assert digest(kernel_with(a)) != digest(kernel_with(b))


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: np.arange(4.0),
        lambda: jnp.arange(4.0),
        lambda: torch.arange(4.0),
        lambda: {"b": 1, "a": 2},
        lambda: functools.partial(max, 1),
        lambda: jax.nn.relu,
    ],
)
def test_equal_closure_values_agree(make: Any) -> None:
    assert digest(kernel_with(make())) == digest(kernel_with(make()))


def test_defaults_and_derivative_rules_count() -> None:
    def with_default(c: float) -> Any:
        def f(x: Any, alpha: float = c) -> Any:
            return x * alpha

        return f

    assert digest(with_default(1.0)) != digest(with_default(2.0))

    def with_rule(c: float) -> Any:
        @jax.custom_vjp
        def f(x: Any) -> Any:
            return x

        f.defvjp(lambda x: (x, None), lambda residual, g: (g * c,))
        return f

    assert digest(with_rule(1.0)) != digest(with_rule(2.0))


def test_recursive_helpers_terminate() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert digest(even) != digest(odd)


def test_location_is_the_authors() -> None:
    source = locate(jax.jit(kernel_with(1)))
    assert (source.file, source.qualname) == (__file__, "kernel_with.<locals>.kernel")
    assert str(source) == f"{__file__}:{source.line}"
