"""Whether TorchTPU is installed, loaded, or owner of the device; asked without loading it.

Exactly one backend can own torch's PrivateUse1 device in a process. The rules:

1. TorchTPU has claimed it (on a TPU machine it does so when torch is imported): it is the real
   device, and kernels register with it.
2. TorchTPU is loaded but has claimed nothing (installed on a machine without a TPU, where torch
   loads it all the same): its operators are in the dispatcher, so the simulated device is not
   installed.
3. TorchTPU is installed and not loaded (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``): on a machine with a
   TPU the device is left to it; elsewhere the simulated device is installed, and importing
   torch_tpu afterwards raises.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = "torch_tpu"
DEVICE = "tpu"
UNCLAIMED = "privateuseone"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_GOOGLE = "0x1ae0"  # PCI vendor
_TPU_DEVICES = ("0x005e", "0x0062", "0x0063", "0x006f", "0x0076")  # v4, v5p, v5e, v6e, tpu7x


def is_installed() -> bool:
    """Whether the package torch_tpu can be imported."""
    return PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None


def is_loaded() -> bool:
    """Whether torch_tpu has been imported in this process."""
    return PACKAGE in sys.modules


def owns_device() -> bool:
    """Whether TorchTPU has claimed torch's PrivateUse1 device in this process.

    Example:
        >>> owns_device()
        False
    """
    if not is_loaded():
        return False
    from tpu_kernels import _compat_torch, _compat_torch_tpu

    claimed = _compat_torch.privateuse1_name() == DEVICE
    return claimed and _compat_torch_tpu.device_claimed()


def machine_has_tpu(pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a TPU is on this machine's PCI bus; nothing is opened or initialised.

    Args:
        pci: Folder of the bus.
    """
    for vendor in pci.glob("*/vendor"):
        try:
            if vendor.read_text().strip() != _GOOGLE:
                continue
            if (vendor.parent / "device").read_text().strip() in _TPU_DEVICES:
                return True
        except OSError:  # a device may vanish while it is looked at
            continue
    return False


def keeps_simulation_out() -> str | None:
    """Return why TorchTPU leaves no room for the simulated device in this process, or None."""
    if owns_device():
        return "the real TorchTPU (package torch_tpu) owns the device 'tpu' in this process"
    if is_loaded():
        return (
            "the real TorchTPU (package torch_tpu) was loaded together with torch, and has no TPU "
            f"here; set {AUTOLOAD}=0 for the simulated device, or start with "
            "`tpu-kernels run --torch-tpu` to run TorchTPU itself on the CPU"
        )
    if is_installed() and machine_has_tpu():
        return (
            "this machine has a TPU, and the real TorchTPU (package torch_tpu) is installed and "
            f"not loaded; unset {AUTOLOAD} or import torch_tpu"
        )
    return None


def obstacle() -> str | None:
    """Return who else has claimed torch's PrivateUse1 device in this process, or None."""
    if "torch" not in sys.modules:
        return None
    from tpu_kernels import _compat_torch

    name = _compat_torch.privateuse1_name()
    if name == UNCLAIMED:
        return None
    owner = "the simulated device" if name == DEVICE else f"another backend, {name!r},"
    return f"{owner} has torch's PrivateUse1 device in this process"


class _Refusing(Loader):
    """Loads nothing: torch_tpu beside the simulated device would mix two sets of kernels."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise ImportError(
            "torch_tpu cannot be imported here: the simulated device of tpu_kernels has torch's "
            "PrivateUse1 device in this process. Set TPU_KERNELS_SIM_DEVICE=0 to leave it out, or "
            "start with `tpu-kernels run --torch-tpu`"
        )

    def exec_module(self, module: ModuleType) -> None:
        """Never reached."""


class _Finder(MetaPathFinder):
    """Finds torch_tpu where it is, and hands it to the loader that refuses."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path) if name == PACKAGE else None
        if found is not None:
            found.loader = _Refusing()
        return found


def refuse_later_import() -> None:
    """Make ``import torch_tpu`` raise from now on, with the reason."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
