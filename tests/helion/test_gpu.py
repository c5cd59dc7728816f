"""Helion kernels through Triton: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import tpu_kernels as tk
from tests.helion import kernels

# Triton decides at its import whether it interprets; hence a process of its own.
IN_INTERPRETER = """
import json
import torch
import tpu_kernels as tk
from tests.helion import kernels
from tpu_kernels.backends.helion_gpu import HelionGpu

def through_triton(kernel, *args):
    return HelionGpu(kernel).implement(kernel.operator)(*args)

x, y = torch.randn(70, 130), torch.randn(130, 40)
add = tk.tpu_kernel("helion_gpu::add")(kernels.add)
product = tk.tpu_kernel("helion_gpu::matmul")(kernels.matmul)
leaky = tk.tpu_kernel("helion_gpu::leaky")(kernels.leaky)
scale = tk.tpu_kernel("helion_gpu::scale", mutates_args=("x",))(kernels.scale_in_place)
for kernel, args in ((add, (x, x)), (product, (x, y)), (leaky, (x, 0.25))):
    torch.testing.assert_close(through_triton(kernel, *args), kernel(*args), atol=1e-4, rtol=0)
config = json.dumps({"block_sizes": [16, 64], "pallas_loop_type": "fori_loop"})
torch.testing.assert_close(through_triton(add, x, x, config), 2 * x)
written = x.clone()
assert through_triton(scale, written, 3.0) is None
torch.testing.assert_close(written, 3 * x)
print("agree")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_triton_and_pallas_agree_in_their_interpreters() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_INTERPRETER],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("agree")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_what_the_cpu_does() -> None:
    add = tk.tpu_kernel("helion_gpu_tests::add")(kernels.add)
    x = torch.randn(70, 130)
    torch.testing.assert_close(add(x.cuda(), x.cuda()).cpu(), add(x, x))


def test_every_helion_kernel_has_a_cuda_implementation_and_no_other_has() -> None:
    add = tk.tpu_kernel("helion_gpu_tests::registered")(kernels.add)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(add.name, "CUDA")
    from tpu_kernels.ops import matmul

    assert not has(matmul.name, "CUDA")
