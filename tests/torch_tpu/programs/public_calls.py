"""Kernels on TorchTPU through its public ``torch.tpu.pallas.jax_op`` alone."""

from __future__ import annotations

import jax
import torch

import tpu_kernels as tk
from tests.torch_tpu.programs.kernels import MODES, X, Y, close, compiled, device_module, x, y
from tpu_kernels.backends.torch_tpu import backend


@tk.tpu_kernel("pub::wave")
def wave(a: jax.Array, b: jax.Array, n: int = 1) -> tuple[jax.Array, jax.Array]:
    return jax.numpy.sin(a) * n, a + b


def check_it_is_the_public_way() -> None:
    assert backend.call_path() == "public"
    before = len(dir(torch.ops.tpu_kernels_jax_op))
    wave(x, y, n=7)
    assert len(dir(torch.ops.tpu_kernels_jax_op)) == before + 1


def check_eager_modes() -> None:
    for mode in MODES:
        with device_module.set_eager_mode(mode):
            first, second = wave(x, y, n=2)
            close(first, X.sin() * 2)
            close(second, X + Y)


def check_gradients_and_one_module() -> None:
    a = x.clone().requires_grad_()
    out, told = compiled(lambda a, b: wave(a, b)[0].exp().sum(), a, y)
    out.backward()
    assert a.grad is not None
    close(a.grad, X.cos() * X.sin().exp())
    (text,) = told[0].stablehlo_forward_text
    assert "stablehlo.sine" in text
    assert "stablehlo.exponential" in text
