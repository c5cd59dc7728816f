"""Experimental: the real TorchTPU on a machine without a TPU.

TorchTPU reaches its device through a PJRT plug-in (libtpu). Here it is given an XLA:CPU plug-in
instead, whose function table is changed in memory (`plugin_patch`). What runs is TorchTPU's own
code: its dispatcher kernels, its lowering to StableHLO, its eager modes, its compile backend. What
does not: programs with real Mosaic kernels (Pallas kernels of this package are interpreted), more
than one device, and anything about time. Linux on x86-64 only.

Nobody supports this: not TorchTPU, not the authors of the plug-ins. The programs of a TPU are
compiled by another compiler than here, so a result that is right here says that the *program* is
right; see `tpu_kernels.compile(..., via="torch_tpu")` for what the TPU compiler says of it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_kernels.backends.torch_tpu import detection
from tpu_kernels.errors import DeviceError, MissingDependency

EXTRA = "torch-tpu-cpu"
PLUGIN = "TPU_KERNELS_CPU_PLUGIN"

# Distribution, folder of its package, file of the plug-in; in order of preference.
KNOWN_PLUGINS = (
    ("lammps-jax-pjrt-cpu", "lammps_jax_pjrt_cpu", "pjrt_c_api_cpu_plugin.so"),
    ("fastatomstruct-xla-cpu", "fastatomstruct_xla_cpu", "libpjrt_cpu.so"),
)

# Set before the frameworks read them. TorchTPU parses XLA_FLAGS itself and ends the process at a
# flag that it does not know; this one it does. Without it XLA:CPU ends the process at a cumsum.
_XLA_FLAG = "--xla_disable_hlo_passes=associative-scan-rewriter"
_READ_ONCE = ("XLA_FLAGS", "TPU_LIBRARY_PATH")
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_SKIP_MDS_QUERY": "1"}

_lock = threading.Lock()
_active: Plugin | None = None


@dataclass(frozen=True)
class Plugin:
    """An XLA:CPU plug-in on this machine.

    Attributes:
        path: Its shared library.
        name: Distribution that it belongs to, or the file's name.
        version: Version of the distribution, or None.
    """

    path: Path
    name: str
    version: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else self.name


def find_plugin() -> Plugin | None:
    """Find the plug-in to use: what ``TPU_KERNELS_CPU_PLUGIN`` names, else an installed one.

    Returns:
        The plug-in, or None.

    Raises:
        DeviceError: ``TPU_KERNELS_CPU_PLUGIN`` names a file that is not there.
    """
    named = os.environ.get(PLUGIN)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise DeviceError(
                f"{PLUGIN}={named!r} is not a file",
                hint=f"name the shared library of an XLA:CPU PJRT plug-in, or unset {PLUGIN}",
            )
        return Plugin(path.absolute(), path.name)
    from importlib import metadata  # slow to import; `--help` of the command line imports this

    for distribution, package, file in KNOWN_PLUGINS:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder) / file
            if path.is_file():
                return Plugin(path, distribution, metadata.version(distribution))
    return None


def why_not() -> str | None:
    """Return why TorchTPU cannot run on a CPU in a fresh process here, or None if it can.

    Example:
        >>> reason = why_not()
        >>> reason is None or isinstance(reason, str)
        True
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"it exists for Linux on x86-64 only, this is {sys.platform} {platform.machine()}"
    if not detection.is_installed():
        return "torch_tpu is not installed"
    if find_plugin() is None:
        names = " or ".join(distribution for distribution, _, _ in KNOWN_PLUGINS)
        return f"no XLA:CPU plug-in is installed ({names})"
    return None


def active() -> Plugin | None:
    """The plug-in that TorchTPU runs on in this process, or None."""
    return _active


def activate(*, math_sdpa: bool = True) -> Plugin:
    """Make the device ``"tpu"`` of the real TorchTPU work in this process, on the CPU.

    Call it before anything imports ``torch_tpu``: TorchTPU loads itself with torch unless
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is in the environment. ``tpu-kernels run --torch-tpu
    script.py`` arranges all this.

    Args:
        math_sdpa: Switch torch's flash attention off. TorchTPU implements it by a Mosaic kernel,
            which no CPU runs; without it attention is lowered to plain StableHLO.

    Returns:
        The plug-in in use. Calling it again changes nothing.

    Raises:
        MissingDependency: torch_tpu or a plug-in is not installed.
        DeviceError: Another platform; TorchTPU was loaded already, or the simulated device is in
            its place.
    """
    global _active
    with _lock:
        if _active is not None:
            return _active
        plugin = _checked()
        from tpu_kernels.backends.torch_tpu import pjrt_api, plugin_patch

        before = {name: os.environ.get(name) for name in _READ_ONCE}
        _set_environment(plugin)
        try:
            plugin_patch.patch(pjrt_api.PjrtApi(str(plugin.path)))
            _load(plugin)
        finally:
            # They are about this process's plug-in: a child that compiles for a TPU, and JAX here,
            # must not see them.
            _restore(before)
        if math_sdpa:
            import torch

            torch.backends.cuda.enable_flash_sdp(False)
        _active = plugin
    from tpu_kernels.backends.torch_tpu import backend

    backend.register()
    return plugin


def _checked() -> Plugin:
    """The plug-in, or the error that says what is in the way."""
    reason = why_not()
    if reason is not None:
        missing = "installed" in reason
        kind = MissingDependency if missing else DeviceError
        hint = f"pip install 'tpu_kernels[{EXTRA}]'" if missing else None
        raise kind(f"TorchTPU cannot run on the CPU here: {reason}", hint=hint)
    if detection.is_loaded():
        raise DeviceError(
            "TorchTPU cannot run on the CPU here: torch_tpu is loaded already, for libtpu",
            hint="start with `tpu-kernels run --torch-tpu script.py`, or set "
            f"{detection.AUTOLOAD}=0 in the environment and call activate() first",
        )
    taken = detection.obstacle()
    if taken is not None:
        raise DeviceError(
            f"TorchTPU cannot run on the CPU here: {taken}",
            hint="start with `tpu-kernels run --torch-tpu script.py`",
        )
    plugin = find_plugin()
    if plugin is None:  # `why_not` has found one
        raise MissingDependency("no XLA:CPU plug-in", hint=f"pip install 'tpu_kernels[{EXTRA}]'")
    return plugin


def _set_environment(plugin: Plugin) -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_XLA_FLAG}".strip()
    os.environ[detection.AUTOLOAD] = "0"
    os.environ["TPU_LIBRARY_PATH"] = str(plugin.path)


def _load(plugin: Plugin) -> None:
    """Load TorchTPU and let it claim the device."""
    from tpu_kernels import _compat_torch_tpu as compat

    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        # It recommends another memory allocator, and reports each step of its start.
        warnings.filterwarnings("ignore", message="<TorchTpu/")
        with _library_path_kept():
            importlib.import_module("torch_tpu")
        os.environ["TPU_LIBRARY_PATH"] = str(plugin.path)
        compat.claim_device()
        import torch

        # The device starts with its first use, and XLA reads its flags with the first program.
        torch.ones(1, device=detection.DEVICE).cumsum(0).cpu()


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _library_path_kept() -> Iterator[None]:
    """torch_tpu asks libtpu at import to name itself as the device's library."""
    try:
        import libtpu
    except ImportError:
        yield
        return
    configure = libtpu.configure_library_path
    libtpu.configure_library_path = lambda: None
    try:
        yield
    finally:
        libtpu.configure_library_path = configure
