"""From graphs of torch operators to JAX programs.

`tpu_kernels.lowering.rules` is the table: a JAX function for each ATen operator, in small modules
by family. An operator without one is expressed in others by torch's own decompositions; one that
`tpu_kernel` made is inlined, Pallas calls and all; what is left is named, and runs outside of the
program.
"""
