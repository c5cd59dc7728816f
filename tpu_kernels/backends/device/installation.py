"""Installing the simulated device into torch: once per process, or not at all."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable

from tpu_kernels._compat_torch import claim_privateuse1, dlpack_by_name, privateuse1_name
from tpu_kernels.backends.device import modes, selftest
from tpu_kernels.backends.torch_tpu import detection
from tpu_kernels.config import SIM_DEVICE, settings
from tpu_kernels.errors import DeviceError, KernelError

NAME = "tpu"
UNCLAIMED = "privateuseone"

# Called with no arguments at the end of a successful installation, in order. `when_installed` adds
# a hook wherever it may come after that.
on_install: list[Callable[[], None]] = []

_lock = threading.RLock()
_installed = False
_complete = False  # the hooks have run as well; until then other threads wait for the lock
_failure: str | None = None
_limits: dict[str, str] = {}
_keep_alive: list[object] = []  # registrations and callbacks that must live as long as the process


def is_installed() -> bool:
    """Return whether this process has the simulated device.

    Example:
        >>> import tpu_kernels.device
        >>> is_installed()
        True
    """
    return _installed


def why_not() -> str | None:
    """Return why the simulated device is not installed and cannot be, or None.

    Returns:
        None if the device is installed or `install` can be tried; else the reason.
    """
    if _installed:
        return None
    return _failure or _obstacle()


def limits() -> dict[str, str]:
    """Return the optional features that failed their self-test at install, with the reasons.

    Returns:
        Reason by feature; empty where everything works.
    """
    return dict(_limits)


def install() -> None:
    """Install the simulated ``"tpu"`` device into torch; later calls do nothing.

    Raises:
        DeviceError: If the real TorchTPU or another backend owns torch's PrivateUse1 device, or if
            this platform or this torch is laid out in a way that the simulation does not know.

    Example:
        >>> import torch
        >>> install()
        >>> torch.ones(2, device="tpu").sum().item()
        2.0
    """
    global _installed, _complete, _failure
    with _lock:
        if _installed:
            return
        obstacle = _failure or _obstacle()
        if obstacle:
            raise DeviceError(f"the simulated tpu device cannot be installed: {obstacle}")
        try:
            selftest.check_platform()
            selftest.check_capsule()
        except DeviceError as error:
            _failure = error.problem
            raise
        try:
            with warnings.catch_warnings():
                _ignore_known_warnings()
                _set_up()
        except BaseException as error:  # a Ctrl-C, too, leaves torch half told
            # torch can be told of a device only once, so a second attempt could not do better.
            _failure = f"an earlier attempt failed: {str(error) or type(error).__name__}"
            raise
        _installed = True
        detection.refuse_later_import()
        # Loaded by name: it lies above this module, and only its registration is wanted.
        importlib.import_module("tpu_kernels.backends.compile_backend")
        for hook in list(on_install):
            hook()
        modes.from_environment()
        _complete = True


def when_installed(hook: Callable[[], None]) -> None:
    """Call a function once the device is installed: now, if it already is.

    Args:
        hook: Called without arguments, in the thread that installs.
    """
    with _lock:
        if not _installed:
            on_install.append(hook)
            return
    hook()


def auto_install() -> bool:
    """Install the device if that is allowed and possible; never raise.

    Returns:
        Whether the device is installed. If not, `why_not` has the reason.
    """
    global _failure
    if _complete:
        return True
    try:
        if not settings().sim_device:
            return False
        install()
    except KernelError as error:
        _failure = _failure or error.problem  # for `why_not`
        return False
    return True


def _obstacle() -> str | None:
    if (reason := detection.keeps_simulation_out()) is not None:
        return reason
    owner = privateuse1_name()
    if owner != UNCLAIMED:
        return f"another backend owns torch's PrivateUse1 device, under the name {owner!r}"
    if not settings().sim_device:
        return f"it is switched off by {SIM_DEVICE}"
    return None


def _ignore_known_warnings() -> None:
    # Replacing one of torch's own kernels is intended; everything else is news and stays.
    warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")


def _set_up() -> None:
    from tpu_kernels.backends.device import (
        accelerator,
        allocator,
        autocast,
        guard,
        hooks,
        kernels,
        layouts,
        module,
        processes,
        surface,
    )

    claim_privateuse1(NAME, module)
    surface.register(module)
    selftest.check_round_trip()
    _keep_alive.extend(kernels.register_kernels())
    _keep_alive.extend(autocast.register())
    _keep_alive.append(layouts.register())
    processes.register()
    dlpack_by_name(NAME)
    accelerator.register()
    for feature, register in (
        ("Ctrl-C under autograd, and torch.Event", guard.register),
        ("storages made on the device (deepcopy, torch.load, pickle)", allocator.register),
        ("torch.Generator(device='tpu') and pinned memory", hooks.register),
    ):
        try:
            register()
        except DeviceError as error:  # optional: the feature is off, and using it says why
            _limits[feature] = error.problem
