"""Settings of the package, read from the environment once and kept.

Every setting has one environment variable with the prefix ``TPU_KERNELS_`` (two have TorchTPU's
names), one field of `Settings` and one default; a value that cannot be read raises at once instead
of being ignored.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from tpu_kernels.errors import ConfigError

CACHE_DIR = "TPU_KERNELS_CACHE_DIR"
SIM_CHIP = "TPU_KERNELS_SIM_CHIP"
SIM_DEVICE = "TPU_KERNELS_SIM_DEVICE"
TORCH_TPU_CALLS = "TPU_KERNELS_TORCH_TPU_CALLS"
PROGRAM_CACHE = "TPU_KERNELS_PROGRAM_CACHE"
PROGRAM_CACHE_MIB = "TPU_KERNELS_PROGRAM_CACHE_MIB"
RECORD = "TPU_KERNELS_RECORD"
# TorchTPU's own names: a program that sets them starts in the same mode on the simulated device.
DEFER_AND_FUSE = "TORCH_TPU_DEFER_AND_FUSE"
LAUNCH_BLOCKING = "TORCH_TPU_LAUNCH_BLOCKING"

# The generations that the TPU compiler can target; `tpu_kernels.compiler.chips` has their details.
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Settings:
    """What a user can set from outside the program.

    Attributes:
        cache_dir: Folder of compiled programs and tuning results (``TPU_KERNELS_CACHE_DIR``).
        sim_chip: TPU generation that the simulated device stands for (``TPU_KERNELS_SIM_CHIP``).
        sim_device: Whether the simulated ``"tpu"`` device may be installed
            (``TPU_KERNELS_SIM_DEVICE``).
        program_cache: Whether compiled CPU programs are kept in ``cache_dir``
            (``TPU_KERNELS_PROGRAM_CACHE``).
        program_cache_mib: MiB that they may take there (``TPU_KERNELS_PROGRAM_CACHE_MIB``).
        torch_tpu_calls: How kernels call the real TorchTPU: ``"fast"``, ``"public"``, or ``"auto"``
            for fast where the installed release is one that this was tested with
            (``TPU_KERNELS_TORCH_TPU_CALLS``).
        record: Folder where every process writes which kernels it ran, None to record nothing
            (``TPU_KERNELS_RECORD``; ``tpu-kernels record`` sets it).
        defer_and_fuse: Whether the simulated device starts in deferred mode
            (``TORCH_TPU_DEFER_AND_FUSE``).
        launch_blocking: Whether it starts in debug mode (``TORCH_TPU_LAUNCH_BLOCKING``).
    """

    cache_dir: Path
    sim_chip: str = "v6e"
    sim_device: bool = True
    program_cache: bool = True
    program_cache_mib: int = 1024
    torch_tpu_calls: str = "auto"
    record: Path | None = None
    defer_and_fuse: bool = False
    launch_blocking: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the settings from a mapping of environment variables.

        Args:
            environment: Variables by name, such as ``os.environ``. An empty value counts as unset.

        Returns:
            The settings, with defaults where a variable is unset.

        Raises:
            ConfigError: If a variable holds a value that the setting does not take.

        Example:
            >>> Settings.from_environment({"TPU_KERNELS_SIM_CHIP": "v5e"}).sim_chip
            'v5e'
        """
        cache_dir = environment.get(CACHE_DIR) or platformdirs.user_cache_dir("tpu_kernels")
        return cls(
            cache_dir=_folder(CACHE_DIR, cache_dir),
            sim_chip=_choice(SIM_CHIP, environment.get(SIM_CHIP) or "v6e", CHIPS),
            sim_device=_boolean(SIM_DEVICE, environment.get(SIM_DEVICE) or "1"),
            torch_tpu_calls=_choice(
                TORCH_TPU_CALLS,
                environment.get(TORCH_TPU_CALLS) or "auto",
                ("auto", "fast", "public"),
                "way to call TorchTPU",
            ),
            program_cache=_boolean(PROGRAM_CACHE, environment.get(PROGRAM_CACHE) or "1"),
            program_cache_mib=_size(
                PROGRAM_CACHE_MIB, environment.get(PROGRAM_CACHE_MIB) or "1024"
            ),
            record=_folder(RECORD, record) if (record := environment.get(RECORD)) else None,
            defer_and_fuse=_boolean(DEFER_AND_FUSE, environment.get(DEFER_AND_FUSE) or "0"),
            launch_blocking=_boolean(LAUNCH_BLOCKING, environment.get(LAUNCH_BLOCKING) or "0"),
        )


@functools.cache
def settings() -> Settings:
    """Return the settings of this process, read from the environment at the first call.

    After changing a variable inside a running process, call ``settings.cache_clear()``.

    Returns:
        The settings in force.

    Raises:
        ConfigError: If a ``TPU_KERNELS_*`` variable holds a value that the setting does not take.

    Example:
        >>> settings().sim_chip in CHIPS
        True
    """
    return Settings.from_environment(os.environ)


def _folder(variable: str, value: str) -> Path:
    path = Path(value).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{variable}={value!r} is not a folder",
            hint=f"set {variable} to a folder, which is created when needed, or unset it",
        )
    return path


def _choice(
    variable: str, value: str, choices: tuple[str, ...], what: str = "TPU generation"
) -> str:
    lowered = value.strip().lower()
    if lowered not in choices:
        raise ConfigError(
            f"{variable}={value!r} is not a known {what}",
            hint=f"set {variable} to one of {', '.join(choices)}, or unset it",
        )
    return lowered


def _boolean(variable: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ConfigError(
        f"{variable}={value!r} is neither true nor false",
        hint=f"set {variable} to 1 or 0 (also true/false, yes/no, on/off), or unset it",
    )


def _size(variable: str, value: str) -> int:
    try:
        size = int(value)
    except ValueError:
        size = 0
    if size <= 0:
        raise ConfigError(
            f"{variable}={value!r} is not a positive whole number",
            hint=f"set {variable} to a number of MiB, or unset it",
        )
    return size
