"""The rules of CONTRIBUTING.md that a program can check: layers, private functions, module size."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.packaging.sources import ROOT, module_name, package_files

# From the bottom to the top; a module may import its own layer and those before it.
LAYERS = (
    ("tpu_kernels.errors", "tpu_kernels.config", "tpu_kernels.testing", "tpu_kernels.versions"),
    (
        "tpu_kernels._compat_torch",
        "tpu_kernels._compat_jax",
        "tpu_kernels._compat_torch_tpu",
        "tpu_kernels._compat_helion",
    ),
    ("tpu_kernels.dsl",),
    ("tpu_kernels.compiler",),
    ("tpu_kernels.registry",),
    ("tpu_kernels.lowering",),
    ("tpu_kernels.backends",),
    ("tpu_kernels.verify",),
    ("tpu_kernels.tuning",),
    ("tpu_kernels.ops",),
    ("tpu_kernels.integrations",),
    ("tpu_kernels.cli",),
)  # fmt: skip
# The public face stands outside the layers: it names things of all of them.
FACE = ("tpu_kernels", "tpu_kernels.device", "tpu_kernels.__main__")
LINES = 450  # "about 400"
# Catalogues of small independent functions; splitting one would only scatter the private uses.
CATALOGUES = ("_compat_torch.py", "_compat_jax.py", "_compat_torch_tpu.py", "_compat_helion.py")
FILES = [path for path in package_files() if path.suffix == ".py"]


def layer_of(module: str) -> int | None:
    """The number of a module's layer, None for the public face and for other packages."""
    for number, prefixes in enumerate(LAYERS):
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return number
    return None


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, at any depth."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` and `from module import name` look alike.
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_downward(path: Path) -> None:
    module = module_name(path)
    own = layer_of(module)
    if own is None:
        assert module in FACE, f"{module} belongs to no layer: add it to LAYERS"
        return
    upward = [
        f"{path}:{line} imports {name}"
        for line, name in imported_modules(path)
        if (layer_of(name) or 0) > own
    ]
    assert upward == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_private_modules_of_jax_are_imported_in_one_place(path: Path) -> None:
    private = [
        name for _, name in imported_modules(path) if name.startswith(("jax._src", "jaxlib."))
    ]
    assert private == [] or path.name == "_compat_jax.py"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_private_modules_of_torch_tpu_are_named_in_one_place(path: Path) -> None:
    text = (ROOT / path).read_text()
    assert "torch_tpu._" not in text or path.name == "_compat_torch_tpu.py"


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name not in CATALOGUES], ids=module_name
)
def test_modules_stay_small(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= LINES
