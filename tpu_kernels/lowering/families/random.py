"""Random numbers.

A program that runs here takes its random numbers from torch (`HOST` names the operators): they are
those of eager, and ``torch.manual_seed`` governs them. A program for a TPU draws them itself, from
a key that is one more argument: the rules below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_kernels.lowering.context import random_key
from tpu_kernels.lowering.rules import lowers
from tpu_kernels.lowering.values import Array, cast, jax_dtype, torch_dtype


def _drawn_in(dtype: torch.dtype) -> Any:
    return jax_dtype(torch.float32 if dtype.itemsize < 4 else dtype)


def _default(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


@lowers("rand")
def rand(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    dtype = _default(dtype)
    return cast(jax.random.uniform(random_key(), tuple(size), _drawn_in(dtype)), dtype)


@lowers("randn")
def randn(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    dtype = _default(dtype)
    return cast(jax.random.normal(random_key(), tuple(size), _drawn_in(dtype)), dtype)


@lowers("rand_like")
def rand_like(x: Array, *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return rand(x.shape, dtype=dtype or torch_dtype(x))


@lowers("randn_like")
def randn_like(x: Array, *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return randn(x.shape, dtype=dtype or torch_dtype(x))


@lowers("randint.low")
def randint_low(
    low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Array:
    drawn = jax.random.randint(random_key(), tuple(size), low, high, jax_dtype(torch.int64))
    return cast(drawn, torch.int64 if dtype is None else dtype)


@lowers("randint")
def randint(high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return randint_low(0, high, size, dtype=dtype)


@lowers("randint_like")
def randint_like(x: Array, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return randint_low(0, high, x.shape, dtype=dtype or torch_dtype(x))


@lowers("randint_like.low_dtype")
def randint_like_low(
    x: Array, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Array:
    return randint_low(low, high, x.shape, dtype=dtype or torch_dtype(x))


@lowers("randperm")
def randperm(n: int, *, dtype: torch.dtype | None = None, **_: Any) -> Array:
    return cast(jax.random.permutation(random_key(), n), dtype or torch.int64)


@lowers("bernoulli.p")
def bernoulli_p(x: Array, p: float = 0.5, **_: Any) -> Array:
    return cast(jax.random.bernoulli(random_key(), p, x.shape), torch_dtype(x))


@lowers("bernoulli")
def bernoulli(x: Array, **_: Any) -> Array:
    return cast(jax.random.bernoulli(random_key(), x.astype(jnp.float32), x.shape), torch_dtype(x))


@lowers("native_dropout")
def native_dropout(x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    mask = jax.random.bernoulli(random_key(), 1 - p, x.shape)
    scale = 0.0 if p == 1 else 1.0 / (1 - p)
    return jnp.where(mask, x * jnp.asarray(scale, x.dtype), jnp.zeros_like(x)), mask


@lowers("uniform")
def uniform(x: Array, start: float = 0.0, end: float = 1.0, **_: Any) -> Array:
    dtype = torch_dtype(x)
    return cast(jax.random.uniform(random_key(), x.shape, _drawn_in(dtype), start, end), dtype)


@lowers("normal_functional")
def normal(x: Array, mean: float = 0.0, std: float = 1.0, **_: Any) -> Array:
    drawn = jax.random.normal(random_key(), x.shape, _drawn_in(torch_dtype(x)))
    return cast(drawn * std + mean, torch_dtype(x))


@lowers("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor")
def normal_of(mean: Any, std: Any = 1.0, **_: Any) -> Array:
    like = mean + std
    drawn = jax.random.normal(random_key(), like.shape, _drawn_in(torch_dtype(like)))
    return cast(drawn * std + mean, torch_dtype(like))


@lowers("exponential")
def exponential(x: Array, lambd: float = 1.0, **_: Any) -> Array:
    drawn = jax.random.exponential(random_key(), x.shape, _drawn_in(torch_dtype(x)))
    return cast(drawn / lambd, torch_dtype(x))


@lowers("multinomial")
def multinomial(x: Array, count: int, replacement: bool = False, **_: Any) -> Array:
    logits = lax.log(x.astype(jnp.float32))
    key = random_key()
    if replacement:
        shape = (*x.shape[:-1], count)
        drawn = jax.random.categorical(key, logits[..., None, :], axis=-1, shape=shape)
        return cast(drawn, torch.int64)
    # The largest of independently perturbed logits are a sample without replacement.
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    return cast(lax.top_k(noisy, count)[1], torch.int64)


HOST = frozenset(
    {
        "aten::bernoulli.p", "aten::cauchy", "aten::exponential", "aten::geometric",
        "aten::log_normal", "aten::normal.float_float",
        "aten::normal_functional", "aten::rand", "aten::rand.generator", "aten::rand_like",
        "aten::randint", "aten::randint.generator", "aten::randint.low",
        "aten::randint.low_generator", "aten::randint_like", "aten::randint_like.low_dtype",
        "aten::randn", "aten::randn.generator", "aten::randn_like", "aten::random",
        "aten::random.from", "aten::random.to", "aten::randperm", "aten::randperm.generator",
        "aten::uniform",
    }
)  # fmt: skip
"""Random operators whose results depend on nothing but shapes and dtypes."""


def is_random(op: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
