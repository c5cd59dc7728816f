"""Front ends: from a kernel in some language to a `KernelSpec`."""

from tpu_kernels.dsl.spec import KernelSpec, Kind, Parameter, ReturnKind, Returns, Source

__all__ = ["KernelSpec", "Kind", "Parameter", "ReturnKind", "Returns", "Source"]
