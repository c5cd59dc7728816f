"""``tpu-kernels env``: versions, devices, what works on this machine and how to add the rest.

Everything is read from package metadata, the file system and the environment: no framework is
imported and no accelerator is initialised, so the command is quick and safe beside a running job.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tpu_kernels.backends.torch_tpu import cpu_plugin, detection
from tpu_kernels.cli.output import Output
from tpu_kernels.config import settings
from tpu_kernels.versions import Problem, in_range, problems

DESCRIPTION = """\
Print versions and devices, what works on this machine, and the command that adds what is missing.
Nothing is initialised. Exit code 1 if a required package is missing or outside the tested range, or
if two packages are of versions that do not work together.
"""

REQUIRED = ("torch", "jax", "jaxlib", "numpy", "helion")
OPTIONAL = {"libtpu": "aot", "torch_tpu": "tpu", "triton": "gpu"}  # package -> extra

# Device files that the TPU and GPU drivers create; other devices use VFIO too, under numbers.
_TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
_GPU_FILES = ("nvidia[0-9]*",)


@dataclass(frozen=True)
class Package:
    """A package that `tpu_kernels` uses.

    Attributes:
        name: Its name on the package index.
        version: Installed version, or None.
        wanted: Range that `tpu_kernels` declares, such as ``">=2.13,<2.14"``.
        ok: Whether it is installed in that range.
    """

    name: str
    version: str | None
    wanted: str
    ok: bool


@dataclass(frozen=True)
class Ability:
    """Something that a user may want to do here.

    Attributes:
        what: The task.
        works: Whether this machine can do it now.
        reason: Why, or what is missing.
        add: The command that adds it, if there is one.
    """

    what: str
    works: bool
    reason: str
    add: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand: none of its own."""


def run(options: argparse.Namespace, output: Output) -> bool:
    """Print the report; False if a required package is missing or outside its range."""
    packages = {name: inspect_package(name) for name in (*REQUIRED, *OPTIONAL)}
    devices = {"tpu": device_files(_TPU_FILES), "gpu": device_files(_GPU_FILES)}
    abilities = inspect_abilities(packages, devices)
    together = problems()
    output.document(
        {
            "tpu_kernels": _version("tpu_kernels"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": [asdict(package) for package in packages.values()],
            "versions": [{"text": p.text, "breaks": p.rule.breaks, "fix": p.fix} for p in together],
            "devices": devices,
            "settings": asdict(settings()),
            "abilities": [asdict(ability) for ability in abilities],
        }
    )
    _print(packages, together, devices, abilities, output)
    broken = any(problem.rule.breaks for problem in together)
    return all(packages[name].ok for name in REQUIRED) and not broken


def inspect_package(name: str) -> Package:
    """Look a package up without importing it.

    Args:
        name: Name on the package index.

    Returns:
        Its installed version and whether that is in the range `tpu_kernels` declares.

    Example:
        >>> inspect_package("torch").ok
        True
    """
    version, wanted = _version(name), _wanted_range(name)
    return Package(name, version, wanted, ok=version is not None and in_range(version, wanted))


def inspect_abilities(packages: dict[str, Package], devices: dict[str, list[str]]) -> list[Ability]:
    """Conclude what works here.

    Args:
        packages: By name.
        devices: Device files by kind (``"tpu"``, ``"gpu"``).

    Returns:
        One entry per thing a user may want to do.
    """
    return [
        _kernels_ability(packages),
        _simulated_device_ability(packages),
        _compiler_ability(packages),
        _real_device_ability(packages, devices),
        _torch_tpu_on_cpu_ability(),
    ]


def device_files(patterns: tuple[str, ...]) -> list[str]:
    """Return the device files of a driver, sorted, found without opening any."""
    return sorted(str(path) for pattern in patterns for path in Path("/dev").glob(pattern))


def _kernels_ability(packages: dict[str, Package]) -> Ability:
    what = "define kernels, run and differentiate them on CPU tensors"
    bad = [name for name in REQUIRED if not packages[name].ok]
    if bad:
        wanted = " ".join(f"'{name}{packages[name].wanted}'" for name in bad)
        return Ability(what, False, f"needs {', '.join(bad)}", f"pip install {wanted}")
    return Ability(what, True, "in Pallas' interpreter")


def _simulated_device_ability(packages: dict[str, Package]) -> Ability:
    what = 'train on the simulated device "tpu"'
    if not settings().sim_device:
        return Ability(what, False, "switched off", "unset TPU_KERNELS_SIM_DEVICE")
    if packages["torch_tpu"].version is not None:
        if detection.machine_has_tpu():
            return Ability(what, False, "this machine has a TPU, and torch_tpu takes the device")
        if os.environ.get(detection.AUTOLOAD) != "0":
            reason = "torch loads torch_tpu, which is installed"
            return Ability(what, False, reason, f"export {detection.AUTOLOAD}=0")
    return Ability(what, True, f"on host memory, as a {settings().sim_chip}")


def _compiler_ability(packages: dict[str, Package]) -> Ability:
    what = "compile and tune for TPUs without a TPU"
    if packages["libtpu"].ok:
        return Ability(what, True, f"libtpu {packages['libtpu'].version}")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return Ability(what, False, "libtpu exists for Linux on x86-64 only")
    return Ability(what, False, "needs libtpu", "pip install 'tpu_kernels[aot]'")


def _real_device_ability(packages: dict[str, Package], devices: dict[str, list[str]]) -> Ability:
    what = "run on a real TPU"
    if not devices["tpu"]:
        return Ability(what, False, "no TPU device file on this machine")
    if not packages["torch_tpu"].ok:
        return Ability(what, False, "needs torch_tpu", "pip install 'tpu_kernels[tpu]'")
    return Ability(what, True, f"torch_tpu {packages['torch_tpu'].version}")


def _torch_tpu_on_cpu_ability() -> Ability:
    what = "run TorchTPU itself without a TPU (experimental)"
    reason = cpu_plugin.why_not()
    if reason is None:
        return Ability(what, True, f"tpu-kernels run --torch-tpu, by {cpu_plugin.find_plugin()}")
    add = f"pip install 'tpu_kernels[{cpu_plugin.EXTRA}]'" if "installed" in reason else None
    return Ability(what, False, reason, add)


def _print(
    packages: dict[str, Package],
    together: list[Problem],
    devices: dict[str, list[str]],
    abilities: list[Ability],
    output: Output,
) -> None:
    output.line(
        f"tpu_kernels {_version('tpu_kernels')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    )
    rows = []
    for package in packages.values():
        rows.append((package.name, package.version, package.wanted, _state(package)))
    output.table("Packages", ("package", "installed", "wanted", ""), rows)
    if together:
        problem_rows = [
            ("does not work" if p.rule.breaks else "untested", p.pair, p.rule.why, p.fix)
            for p in together
        ]
        output.table("Versions together", ("", "what", "why", "to fix it"), problem_rows)
    files = [(kind, ", ".join(found) or "none") for kind, found in devices.items()]
    output.table("Devices", ("kind", "device files"), files)
    in_force = [(f"TPU_KERNELS_{k.upper()}", v) for k, v in asdict(settings()).items()]
    output.table("Settings", ("variable", "in force"), in_force)
    output.table(
        "What works here",
        ("", "what", "why", "to add it"),
        [("yes" if a.works else "no", a.what, a.reason, a.add) for a in abilities],
    )


def _state(package: Package) -> str:
    if package.ok:
        return "ok"
    if package.version is not None:
        return "untested version"
    return f"optional, extra '{OPTIONAL[package.name]}'" if package.name in OPTIONAL else "missing"


def _version(name: str) -> str | None:
    from importlib import metadata  # slow to import; `--help` of every command imports this module

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wanted_range(name: str) -> str:
    """The range that our own metadata declares for a package, such as ``>=2.13,<2.14``."""
    from importlib import metadata

    for requirement in metadata.requires("tpu_kernels") or ():
        match = re.match(r"(?P<name>[A-Za-z0-9_.-]+)(?P<range>[^;]*)", requirement)
        if match and match["name"].lower().replace("-", "_") == name:
            return ",".join(sorted(match["range"].strip().split(","), reverse=True))
    return ""
