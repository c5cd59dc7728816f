"""Pictures of a kernel on the TPUs that it is compiled for: one HTML page, PNG files."""

from tpu_kernels.verify.pictures.build import Page, report

__all__ = ["Page", "report"]
