"""Kernels as torch operators, and overrides of ATen operators by them."""

from tpu_kernels.registry.decorator import tpu_kernel
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.naming import kernels, lookup

__all__ = ["Kernel", "kernels", "lookup", "tpu_kernel"]
