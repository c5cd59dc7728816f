"""Tests of Helion kernels as operators."""
