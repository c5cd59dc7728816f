"""Which TPU compiler and which JAX are installed, without importing either."""

from __future__ import annotations

import functools
import platform
import sys
from importlib import metadata

INSTALL_COMMAND = 'pip install "tpu_kernels[aot]"'


@functools.cache
def libtpu_version() -> str | None:
    """Return the version of the installed TPU compiler, None if there is none."""
    return _version("libtpu")


@functools.cache
def jax_version() -> str | None:
    """Return the version of the installed JAX, None if there is none."""
    return _version("jax")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def why_unavailable() -> tuple[str, str] | None:
    """Tell why nothing can be compiled for a TPU here.

    Returns:
        One sentence and what to do about it, or None if the compiler is there.
    """
    if libtpu_version() is not None:
        return None
    machine = f"{platform.system()} {platform.machine()}"
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return (
            f"the TPU compiler exists for Linux x86-64 only, and this machine is {machine}",
            "run the check on a Linux x86-64 machine, such as a CI runner; all else works here",
        )
    return ("the TPU compiler (libtpu) is not installed", INSTALL_COMMAND)
