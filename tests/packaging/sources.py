"""Which files of the repository make up the package, found without importing anything."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folder of the repository -> package; the mapping that pyproject.toml must agree with.
FOLDERS = {
    "tpu_kernels": "tpu_kernels",
    "dsl": "tpu_kernels.dsl",
    "registry": "tpu_kernels.registry",
}


def package_files() -> list[Path]:
    """Every file of the package except caches, relative to the repository."""
    files = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files.append(path.relative_to(ROOT))
    return files


def installed_path(path: Path) -> str:
    """Where a file of the repository lies in an installed package."""
    package = FOLDERS[path.parts[0]]
    return "/".join([*package.split("."), *path.parts[1:]])


def module_name(path: Path) -> str:
    """The dotted name under which a Python file of the repository is imported."""
    parts = installed_path(path).removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> list[str]:
    """Every module of the package, but for `__main__`, which runs the command line."""
    names = [module_name(path) for path in package_files() if path.suffix == ".py"]
    return [name for name in names if not name.endswith("__main__")]
