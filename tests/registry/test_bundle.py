"""Bundles: kernels saved here work in a process that has only the package."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import tpu_kernels as tk
from tests.registry import bundle_kernels
from tpu_kernels.errors import ArgumentError, BundleError, NameClashError
from tpu_kernels.registry import bundle

# A process without this repository on its path: only the installed package.
LOADED = """
import sys, torch, tpu_kernels as tk
assert not any(name.startswith("tests") for name in sys.modules)
kernels = tk.load(sys.argv[1], digest=sys.argv[2])
assert not any(name.startswith("tests") for name in sys.modules)
x = torch.ones(2, 3, requires_grad=True)
names = ("pallas", "caller", "by_hand", "writes")
pallas, caller, by_hand, writes = (kernels["bundled::" + name] for name in names)
for rows in (2, 5):
    assert torch.equal(pallas(torch.ones(rows, 3)), torch.full((rows, 3), 3.0))
mode = type(caller.spec.parameter("mode").default)
assert torch.equal(caller(x, x.detach() * 2, mode.MULTIPLY), torch.full((2, 3), 6.0))
caller(x, x).sum().backward()
assert torch.equal(x.grad, torch.full((2, 3), 4.0))
assert caller.sharding is None and pallas.sharding.text == "b h -> b h"
assert torch.equal(torch.vmap(caller)(torch.ones(4, 2, 3)), torch.full((4, 2, 3), 3.0))
x.grad = None
by_hand(x).sum().backward()
assert torch.equal(x.grad, torch.full((2, 3), 100.0)) and by_hand.spec.backward is None
out = torch.zeros(2)
writes(out, torch.ones(2))
assert out.tolist() == [1.0, 1.0]
assert torch.equal(pallas.spec.reference(torch.ones(1)), torch.tensor([3.0]))
program = torch.export.load(sys.argv[3]).module()
print(program(torch.ones(4, 3)).sum().item(), program(torch.ones(7, 3)).sum().item())
for name, kernel in kernels.items():
    print(name, kernel.spec.source.digest, torch.ops.bundled.__getattr__(name[9:]).default._schema)
"""


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bundle_kernels.caller(x) + 1


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, str]:
    """A bundle of three kernels and what they call, and its digest."""
    path = tmp_path / "kernels.bundle"
    kernels = [bundle_kernels.caller, bundle_kernels.by_hand, bundle_kernels.writes]
    return path, tk.save_bundle(path, kernels)


def test_another_process_has_the_same_operators(saved: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = saved
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Model(), (torch.ones(2, 3),), dynamic_shapes=({0: rows},))
    program = tmp_path / "program.pt2"
    torch.export.save(exported, program)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED, str(path), digest, str(program)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sums, *operators = done.stdout.splitlines()
    assert sums == "48.0 84.0"
    names = ["pallas", "caller", "by_hand", "writes"]  # what is called comes before its caller
    expected = [getattr(bundle_kernels, name) for name in names]
    assert operators == [f"{k.name} {k.spec.source.digest} {k.op._schema}" for k in expected]


def test_a_kernel_that_exists_is_kept(saved: tuple[Path, str]) -> None:
    assert tk.load(saved[0])["bundled::caller"] is bundle_kernels.caller


def test_the_manifest_is_read_without_running_anything(saved: tuple[Path, str]) -> None:
    manifest = bundle.read_manifest(saved[0])
    assert manifest.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert manifest.jax == jax.__version__
    assert manifest.torch == torch.__version__
    first = manifest.kernels[0]
    assert (first.name, first.schema) == ("bundled::pallas", "pallas(Tensor x) -> Tensor")
    assert first.digest == bundle_kernels.pallas.spec.source.digest
    assert str(Path.cwd()) not in json.dumps([k.source for k in manifest.kernels])


def test_equal_kernels_make_equal_files(saved: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = saved
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    kernels = [bundle_kernels.caller, bundle_kernels.by_hand, bundle_kernels.writes]
    assert tk.save_bundle(tmp_path / "again.bundle", kernels) == digest


# ---------------------------------------------------------------------------- bad files
def test_every_truncation_is_refused(saved: tuple[Path, str], tmp_path: Path) -> None:
    content = saved[0].read_bytes()
    file = tmp_path / "short.bundle"
    for length in (0, 1, 4, 30, len(content) // 2, len(content) - 30, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(BundleError, match="is not a bundle, or is damaged"):
            tk.load(file)


def test_a_changed_byte_anywhere_is_noticed(saved: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = saved
    content = path.read_bytes()
    file = tmp_path / "changed.bundle"
    for position in range(0, len(content), max(1, len(content) // 97)):
        changed = bytearray(content)
        changed[position] ^= 0x55
        file.write_bytes(changed)
        with pytest.raises(BundleError, match="is not the one with digest"):
            tk.load(file, digest=digest)
        try:  # without a digest: refused, or the byte was one that means nothing
            loaded = tk.load(file)
        except (BundleError, NameClashError):
            continue
        assert loaded["bundled::caller"] is bundle_kernels.caller


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda m: m.update(kind="other"), "no bundle of tpu_kernels"),
        (lambda m: m.update(format=99), "has format 99, this version reads format 1"),
        (lambda m: m.update(python="3.2"), "was written by Python 3.2, and this is Python"),
        (lambda m: m.update(tpu_kernels="9.9.0"), "was written by tpu_kernels 9.9.0"),
        (lambda m: m.pop("jax"), "its manifest: KeyError"),
        (lambda m: m["kernels"][0].update(sha256="0" * 64), "does not fit its hash"),
        (lambda m: m["kernels"][0].update(payload="none"), "its manifest: KeyError"),
        (lambda m: m["kernels"][0].update(more=1), "its manifest: TypeError"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    saved: tuple[Path, str], tmp_path: Path, change: Callable[[Any], Any], fragment: str
) -> None:
    with zipfile.ZipFile(saved[0]) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    change(manifest)
    members["manifest.json"] = json.dumps(manifest).encode()
    file = tmp_path / "edited.bundle"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(BundleError) as caught:
        tk.load(file)
    assert fragment in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other"
    torch.save({"a": torch.ones(1)}, file)
    with pytest.raises(BundleError, match="no bundle"):
        tk.load(file)
    file.write_bytes(b"\x80\x04." + b"x" * 100)
    with pytest.raises(BundleError, match="is not a bundle"):
        tk.load(file)
    with pytest.raises(FileNotFoundError):
        tk.load(tmp_path / "absent")


# ---------------------------------------------------------------------------- clashes and refusals
def define(constant: float) -> Any:
    @tk.tpu_kernel("bundled::varies")
    def varies(x: jax.Array) -> jax.Array:
        return x * constant

    return varies


def test_a_different_kernel_of_the_name_is_replaced_on_request_only(tmp_path: Path) -> None:
    file = tmp_path / "kernels.bundle"
    tk.save_bundle(file, define(2.0))
    define(5.0)
    with pytest.raises(NameClashError, match="differs from the one of this process"):
        tk.load(file)
    assert torch.ops.bundled.varies(torch.ones(1)).item() == 5.0
    loaded = tk.load(file, replace=True)["bundled::varies"]
    assert loaded(torch.ones(1)).item() == torch.ops.bundled.varies(torch.ones(1)).item() == 2.0


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    @tk.tpu_kernel("bundled::locks")
    def locks(x: jax.Array) -> jax.Array:
        with lock:
            return x

    file = tmp_path / "kernels.bundle"
    file.write_bytes(b"old")
    with pytest.raises(BundleError, match=r"'bundled::locks' cannot be bundled: TypeError.*lock"):
        tk.save_bundle(file, locks)
    with pytest.raises(ArgumentError, match="expected kernels, got type"):
        tk.save_bundle(file, [functools.partial])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="no kernels"):
        tk.save_bundle(file, [])
    old = define(7.0)
    define(8.0)
    with pytest.raises(ArgumentError, match="was replaced by a later definition"):
        tk.save_bundle(file, old)
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kernels.bundle"]
