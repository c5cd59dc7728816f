"""A built wheel holds the whole package, and works in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.packaging.sources import FOLDERS, ROOT, installed_path, modules, package_files

# Imports every module named in argv and reports those that fail, one per line. An optional package
# that is absent is no failure of ours: the module says so with an ImportError that names it.
IMPORT_ALL = """
import importlib, sys, traceback
OPTIONAL = {"libtpu", "torch_tpu", "triton"}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        if not (isinstance(error, ImportError) and error.name in OPTIONAL):
            traceback.print_exc()
            print(name, repr(error))
import tpu_kernels
print("imported from", tpu_kernels.__file__, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the repository gets no build folder."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base)]
    run([*build, str(source)], cwd=base)
    (built,) = base.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment with the wheel and, by a link, this one's packages."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    binaries = home / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "-q"]
    run([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)], cwd=home)
    (site_packages,) = home.glob("lib/python*/site-packages")
    # Folders named in a .pth file come last and their own .pth files are not read: this
    # environment's editable install of the package stays invisible.
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return binaries


def run(command: list[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the repository, without this process's Python path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in package_files() if path.suffix == ".py"}
    missing = [str(f) for f in folders if not (ROOT / f / "__init__.py").exists()]
    assert missing == []


def test_the_mapped_folders_are_those_of_pyproject() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping = configuration["tool"]["setuptools"]["package-dir"]
    assert {folder: package for package, folder in mapping.items()} == FOLDERS


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {installed_path(path) for path in package_files()}


def test_the_wheel_carries_licence_readme_and_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    by_name = {Path(n).name: n for n in archive.namelist() if ".dist-info/" in n}
    text = archive.read(by_name["METADATA"]).decode()
    assert "License-Expression: Apache-2.0" in text
    assert (ROOT / "README.md").read_text().splitlines()[0] in text
    assert "Apache License" in archive.read(by_name["LICENSE"]).decode()
    entry_points = archive.read(by_name["entry_points.txt"]).decode()
    assert "tpu-kernels = tpu_kernels.cli.main:main" in entry_points
    assert "tpu = tpu_kernels.backends.compile_backend:tpu" in entry_points


def test_every_module_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "python"), "-c", IMPORT_ALL, *modules()]
    done = run(command, cwd=tmp_path)
    assert done.stdout == "", done.stderr
    assert str(installed.parent) in done.stderr.splitlines()[-1]


def test_the_console_script_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run([str(installed / "tpu-kernels"), "--version"], cwd=tmp_path)
    assert done.stdout == f"tpu-kernels {metadata.version('tpu_kernels')}\n"


@pytest.mark.parametrize("inside_repository", [True, False])
def test_this_installation_imports_mapped_packages_from_anywhere(
    inside_repository: bool, tmp_path: Path
) -> None:
    """In the repository's root, the folder `tpu_kernels/` shadows what is installed."""
    code = "import tpu_kernels.dsl, tpu_kernels.registry"
    run([sys.executable, "-c", code], cwd=ROOT if inside_repository else tmp_path)
