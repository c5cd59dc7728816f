"""Compiles a jitted function through the programs on disk."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from tpu_kernels import _compat_jax
from tpu_kernels.backends.program_cache import FORMAT, ProgramCache


def compile_jitted(
    cache: ProgramCache | None, jitted: Any, args: Sequence[Any], *, name: str
) -> bool:
    """Trace and compile a function for these arguments, or load what was compiled before.

    A call with such arguments then finds its program, at the cost of any `jax.jit` function.

    Args:
        cache: Where programs are kept; None leaves the compilation to the first call.
        jitted: What `jax.jit` returned.
        args: Arguments, arrays on the device that is compiled for.
        name: Operator that the program belongs to.

    Returns:
        Whether the program was loaded.

    Raises:
        Exception: What the function raises while it is traced, or the compiler.
    """
    import jax

    if cache is None or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return False
    loaded = False

    def compile_and_load(client: Any, module: Any, **how: Any) -> Any:
        nonlocal loaded
        devices, options = how["executable_devices"], how["compile_options"]
        key = _key(_compat_jax.program_key(client, module, devices, options))
        data = cache.load(key)
        if data is not None:
            try:
                executable = _compat_jax.load_executable(client, data, devices, options)
            except Exception as error:  # whatever it is: the compiler makes a new one
                cache.discard(key, f"the compiler refuses it ({error})")
            else:
                loaded = True
                return executable
        executable = client.compile_and_load(module, **how)
        data = _compat_jax.save_executable(client, executable)
        cache.store(key, data, name=name, versions=_versions())
        return executable

    _compat_jax.compile_with(jitted, args, compile_and_load)
    return loaded


def _key(program: str) -> str:
    parts = (FORMAT, sorted(_versions().items()), _cpu(), program)
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


@functools.cache
def _versions() -> dict[str, str]:
    from tpu_kernels import __version__

    found = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return {**found, "tpu_kernels": __version__}


@functools.cache
def _cpu() -> str:
    """What decides which machine code runs here: architecture, model and features of the CPU."""
    lines = [platform.system(), platform.machine(), platform.processor()]
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "flags",
        "features",
        "cpu implementer",
        "cpu part",
    )
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if not name.strip():  # the first processor stands for all
                    break
                if name.strip().lower() in wanted:
                    lines.append(f"{name.strip()}={' '.join(sorted(value.split()))}")
    except OSError:  # no Linux: the topology that JAX puts into its key has to do
        pass
    return "\n".join(lines)
