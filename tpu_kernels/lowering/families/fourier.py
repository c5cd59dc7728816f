"""Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from tpu_kernels.lowering.rules import lowers
from tpu_kernels.lowering.values import Array, axis_of

_BY_ROOT, _BY_SIZE = 1, 2  # torch's codes for the normalisation; 0 is none


def _scaled(x: Array, sizes: Sequence[int], normalization: int) -> Array:
    count = math.prod(sizes)
    if normalization == _BY_ROOT:
        return x / math.sqrt(count)
    return x / count if normalization == _BY_SIZE else x


@lowers("_fft_c2c")
def c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    axes = [axis_of(d, x.ndim) for d in dim]
    sizes = [x.shape[a] for a in axes]
    found = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes, norm="forward")
    return _scaled(found, sizes, normalization)


@lowers("_fft_r2c")
def r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    axes = [axis_of(d, x.ndim) for d in dim]
    sizes = [x.shape[a] for a in axes]
    found = jnp.fft.rfftn(x, axes=axes) if onesided else jnp.fft.fftn(x, axes=axes)
    return _scaled(found, sizes, normalization)


@lowers("_fft_c2r")
def c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    axes = [axis_of(d, x.ndim) for d in dim]
    last = axes[-1]
    for axis in axes[:-1]:
        x = jnp.fft.ifft(x, axis=axis, norm="forward")
    sizes = [x.shape[a] for a in axes[:-1]] + [last_dim_size]
    # A real signal's first and middle coefficients are real: what else they hold does not count.
    real = lax.complex(lax.real(x), lax.imag(x))
    found = jnp.fft.irfft(real, last_dim_size, axis=last, norm="forward")
    return _scaled(found, sizes, normalization)
