"""Compiled programs on disk: found by content, never stale, safe under damage and many writers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpu_kernels as tk
from tpu_kernels.backends import disk, program_cache
from tpu_kernels.backends.program_cache import ProgramCache
from tpu_kernels.config import PROGRAM_CACHE, PROGRAM_CACHE_MIB, settings
from tpu_kernels.errors import CacheCorruption

KEY, OTHER = "ab" * 20, "cd" * 20
VERSIONS = {"jax": "1"}


def put(cache: ProgramCache, key: str = KEY, payload: bytes = b"code" * 64) -> Path:
    assert cache.store(key, payload, name="test::op", versions=VERSIONS)
    return cache.folder / key[:2] / f"{key}.program"


# ------------------------------------------------------------------------------ the folder


def test_what_is_stored_is_loaded_and_listed(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "new" / "folder")
    assert cache.load(KEY) is None
    path = put(cache)
    assert cache.load(KEY) == b"code" * 64
    (entry,) = cache.entries()
    assert (entry.path, entry.key, entry.name) == (path, KEY, "test::op")
    assert (entry.bytes, entry.versions) == (path.stat().st_size, VERSIONS)
    assert cache.verify() == {}


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_only_this_user_can_read_and_write(tmp_path: Path) -> None:
    path = put(ProgramCache(tmp_path / "programs"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o022 == 0


def damage_header(data: bytes) -> bytes:
    first, about, rest = data.split(b"\n", 2)
    return b"\n".join([first, json.dumps({**json.loads(about), "format": 99}).encode(), rest])


DAMAGE = {
    "empty": lambda data: b"",
    "garbage": lambda data: os.urandom(len(data)),
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut in the description": lambda data: data[:30],
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "longer": lambda data: data + b"x",
    "another format": damage_header,
    "a list for a description": lambda data: data.split(b"\n")[0] + b"\n[1]\nrest",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_reported_removed_and_written_anew(tmp_path: Path, how: str) -> None:
    cache = ProgramCache(tmp_path)
    path = put(cache)
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    assert list(cache.verify()) == [path]
    cache.entries()  # a listing shows what it can
    with pytest.warns(CacheCorruption, match="removed the compiled program"):
        assert cache.load(KEY) is None
    assert not path.exists()
    put(cache)
    assert cache.load(KEY) == b"code" * 64


def test_a_program_under_another_name_is_refused(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path)
    put(cache, OTHER).rename(put(cache, KEY))
    assert list(cache.verify().values()) == ["it holds another program"]
    with pytest.warns(CacheCorruption, match="holds another program"):
        assert cache.load(KEY) is None


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_machine_code_that_others_can_have_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProgramCache(tmp_path)
    put(cache).chmod(0o666)
    with pytest.warns(CacheCorruption, match="others may have written it"):
        assert cache.load(KEY) is None
    owner = put(cache).stat().st_uid
    if owner != 0:  # root's files are trusted
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.warns(CacheCorruption, match="others may have written it"):
            assert cache.load(KEY) is None


def test_a_folder_that_refuses_costs_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = ProgramCache(tmp_path / "file")
    for key in (KEY, OTHER):
        assert not cache.store(key, b"code", name="test::op", versions=VERSIONS)
        assert cache.load(key) is None
    assert "programs are not kept" in caplog.text
    assert cache.entries() == []
    assert cache.verify() == {}
    assert cache.prune() == 0


def test_the_least_recently_used_programs_give_way(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path, limit=2**20)
    paths = [put(cache, f"{i:02x}" * 20, bytes(1000)) for i in range(10)]
    for age, path in enumerate(paths):
        os.utime(path, (time.time() - 100 * (10 - age),) * 2)
    assert cache.load("00" * 20) is not None  # the oldest, used again
    size = paths[0].stat().st_size
    assert cache.prune(max_bytes=3 * size) == 7
    assert {e.key[:2] for e in cache.entries()} == {"00", "08", "09"}
    os.utime(paths[8], (time.time() - 3 * 86400,) * 2)
    assert cache.prune(unused_days=2) == 1
    leftover = paths[0].parent / ".new-killed"
    leftover.write_bytes(b"half")
    assert cache.prune() == 0  # its writer may be alive
    os.utime(leftover, (time.time() - 2 * 3600,) * 2)
    assert cache.prune() == 1
    assert {e.key[:2] for e in cache.entries()} == {"00", "09"}


def test_a_full_folder_makes_room_by_itself(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path, limit=20_000)
    for i in range(program_cache._PRUNE_AFTER_STORES):
        put(cache, hashlib.sha1(bytes([i])).hexdigest(), bytes(1000))
    assert 0 < sum(e.bytes for e in cache.entries()) <= 20_000


WRITER = """
import hashlib, sys, time, warnings
warnings.simplefilter("error")
from tpu_kernels.backends.program_cache import ProgramCache
cache = ProgramCache(sys.argv[1], limit=60_000)
end, rounds = time.time() + 1.5, 0
while time.time() < end or rounds == 0:
    for i in range(30):
        key = hashlib.sha1(bytes([i])).hexdigest()
        data = cache.load(key)
        assert data is None or data == bytes([i]) * 4000, (i, len(data))
        cache.store(key, bytes([i]) * 4000, name="test::op", versions={})
    rounds += 1
    cache.prune()
print(rounds)
"""


def test_eight_processes_write_load_and_prune_at_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    outcomes = [p.communicate(timeout=200) for p in processes]
    assert [p.returncode for p in processes] == [0] * 8, outcomes
    cache = ProgramCache(tmp_path)
    assert cache.verify() == {}
    assert cache.entries()


# ------------------------------------------------------------------------------ kernels


@pytest.fixture(autouse=True)
def _forget_caches() -> Iterator[None]:
    yield
    program_cache._cache_at.cache_clear()


def define(name: str, folder: Path | None, factor: float = 2.0) -> Any:
    """A kernel; defining it again stands for another process, since programs go by content."""

    @tk.tpu_kernel(f"programs::{name}", cache_dir=folder, replace=True)
    def kernel(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * factor

    return kernel


def counts(kernel: Any) -> tuple[int, int]:
    return kernel.stats().kernel_compilations, kernel.stats().disk_cache_hits


def test_forward_and_backward_are_loaded_the_second_time(tmp_path: Path) -> None:
    found = []
    for expected in ((2, 0), (0, 2)):
        kernel = define("twice", tmp_path)
        x = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
        y = kernel(x)
        y.sum().backward()
        assert counts(kernel) == expected
        found.append((y.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(ProgramCache(tmp_path).entries()) == 2


def test_what_is_closed_over_or_read_while_tracing_is_never_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3)
    assert counts(define("stale", tmp_path, 2.0)) == (0, 0)
    for factor, hits in ((2.0, 0), (3.0, 0), (2.0, 1), (3.0, 1)):
        kernel = define("stale", tmp_path, factor)
        assert torch.allclose(kernel(x), torch.tanh(x) * factor)
        assert kernel.stats().disk_cache_hits == hits

    def hidden(x: jax.Array) -> jax.Array:  # no look at the source would see this
        return x * float(os.environ["TEST_PROGRAMS_FACTOR"]) + getattr(holder, "off" + "set")

    class holder:
        offset = 0.0

    for factor, offset in ((2.0, 0.0), (5.0, 0.0), (5.0, 1.0)):
        monkeypatch.setenv("TEST_PROGRAMS_FACTOR", str(factor))
        holder.offset = offset
        kernel = tk.tpu_kernel("programs::hidden", cache_dir=tmp_path, replace=True)(hidden)
        assert kernel(x).tolist() == [factor + offset] * 3
        assert counts(kernel) == (1, 0)


def test_shapes_dtypes_and_static_values_have_programs_of_their_own(tmp_path: Path) -> None:
    calls = [(torch.ones(3), 1.0), (torch.ones(4), 1.0), (torch.ones(3, dtype=torch.bfloat16), 1.0)]
    calls += [(torch.ones(3), 2.0), (torch.ones(3, dtype=torch.float64), 1.0)]
    for expected in ((5, 0), (0, 5)):

        @tk.tpu_kernel("programs::apart", cache_dir=tmp_path, int64="exact", replace=True)
        def apart(x: jax.Array, scale: float = 1.0) -> jax.Array:
            return jnp.sin(x) * scale

        for x, scale in calls:
            got = apart(x, scale)
            assert got.dtype is x.dtype
            assert torch.allclose(got, torch.sin(x) * scale)
        assert counts(apart) == expected


@pytest.mark.parametrize("what", ["_versions", "_cpu"])
def test_another_release_or_processor_compiles_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    define("moved", tmp_path)(torch.ones(2))
    other = {"jax": "0", "jaxlib": "0", "tpu_kernels": "0"} if what == "_versions" else "z80"
    monkeypatch.setattr(disk, what, lambda: other)
    kernel = define("moved", tmp_path)
    kernel(torch.ones(2))
    assert counts(kernel) == (1, 0)


@pytest.mark.parametrize("sound", [True, False])
def test_a_damaged_program_is_compiled_again(tmp_path: Path, sound: bool) -> None:
    define("damaged", tmp_path)(torch.ones(2))
    (entry,) = ProgramCache(tmp_path).entries()
    if sound:  # a file in order, whose content the compiler does not know
        put(ProgramCache(tmp_path), entry.key, b"no machine code")
    else:
        entry.path.write_bytes(entry.path.read_bytes()[:-100])
    kernel = define("damaged", tmp_path)
    with pytest.warns(CacheCorruption):
        assert torch.allclose(kernel(torch.ones(2)), torch.tanh(torch.ones(2)) * 2)
    assert counts(kernel) == (1, 0)
    again = define("damaged", tmp_path)
    again(torch.ones(2))
    assert counts(again) == (0, 1)


def test_programs_that_call_python_are_not_kept(tmp_path: Path) -> None:
    seen: list[float] = []

    @tk.tpu_kernel("programs::calls_back", cache_dir=tmp_path)
    def calls_back(x: jax.Array) -> jax.Array:
        return jax.pure_callback(
            lambda v: seen.append(float(v.sum())) or v, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    assert calls_back(torch.ones(3)).tolist() == [1.0] * 3
    assert seen == [3.0]
    assert counts(calls_back) == (1, 0)
    assert ProgramCache(tmp_path).entries() == []


def test_the_switch_and_disable_jit_leave_the_disk_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jax.disable_jit():
        assert define("plain", tmp_path)(torch.zeros(2)).tolist() == [0.0, 0.0]
    monkeypatch.setenv(PROGRAM_CACHE, "0")
    monkeypatch.setenv(PROGRAM_CACHE_MIB, "7")
    settings.cache_clear()
    try:
        kernel = define("plain", tmp_path)
        kernel(torch.zeros(2))
        assert counts(kernel) == (1, 0)
        assert ProgramCache(tmp_path).limit == 7 * 2**20
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_leaves_the_kernel_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kernel = define("homeless", tmp_path / "file")
    assert kernel(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert counts(kernel) == (1, 0)


MAIN = """
import sys, jax, torch
import tpu_kernels as tk
from program_helper import helper
@tk.tpu_kernel("programs::process", cache_dir=sys.argv[1])
def k(x: jax.Array) -> jax.Array:
    return helper(x)
x = torch.ones(8, 128, requires_grad=True)
k(x).sum().backward()
counts = k.stats().kernel_compilations, k.stats().disk_cache_hits
print(float(k(x)[0, 0]), float(x.grad[0, 0]), *counts)
"""


def test_other_processes_find_programs_until_a_helper_is_edited(tmp_path: Path) -> None:
    def run(helper: str) -> list[float]:
        (tmp_path / "program_helper.py").write_text(helper)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", MAIN, str(tmp_path / "cache")]
        found = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=240, check=False
        )
        assert found.returncode == 0, found.stderr
        return [float(word) for word in found.stdout.split()]

    body = "FACTOR = {}\ndef helper(v):\n    return v * FACTOR  {}\n"
    assert run(body.format(2.0, "")) == [2.0, 2.0, 2, 0]
    assert run(body.format(2.0, "# a comment")) == [2.0, 2.0, 0, 2]
    # The factor is a residual that the forward hands over, so the backward is the same program.
    assert run(body.format(5.0, "")) == [5.0, 5.0, 1, 1]
