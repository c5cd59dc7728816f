"""The rules, one module per family of operators; `tpu_kernels.lowering.rules` loads them."""
