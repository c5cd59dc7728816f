"""The list of packages, computed; everything else about the build is in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

PACKAGE = "tpu_kernels"
# Folders at the top of the repository that are subpackages; `package-dir` in pyproject.toml says
# the same.
MAPPED = ("dsl", "registry")


def packages() -> list[str]:
    """Return the dotted name of every package in the repository, mapped folders included."""
    found = [PACKAGE, *(f"{PACKAGE}.{name}" for name in MAPPED)]
    found += [name for name in find_packages() if name.startswith(f"{PACKAGE}.")]
    for name in MAPPED:
        found += [f"{PACKAGE}.{name}.{inner}" for inner in find_packages(name)]
    return found


setup(packages=packages())
