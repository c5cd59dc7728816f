"""Compiled CPU programs on disk, so that another process need not compile them again.

A program is found by what is compiled: its lowered module without source locations, the compiler's
options and versions, and the features of this CPU, since the files hold machine code. The kernel is
traced in every process. That costs a fraction of the compilation, and no key made of source text
could say as much: a helper that is found at run time, a value read from the environment or an
object that was changed after the definition all end up in the module.

One file for each program: a line that names the format, a line of JSON that describes the program,
and the compiler's bytes, whose checksum the description holds. Nothing is unpickled. Machine code
is only loaded from files that nobody but their owner, who is this user or root, can have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_kernels.config import settings
from tpu_kernels.errors import CacheCorruption

logger = logging.getLogger(__name__)

FORMAT = 1  # raised when the files or what their names stand for change
_FIRST_LINE = b"tpu_kernels program\n"
_SUFFIX, _NEW = ".program", ".new-"
_MARK = ".pruned"
_STALE_AFTER_S = 3600.0  # what a writer that was killed left behind
_PRUNE_EVERY_S = 86400.0
_PRUNE_AFTER_STORES = 64
_KEEP_SHARE = 0.8  # pruning leaves room, so that it is rare


@dataclasses.dataclass(frozen=True)
class ProgramEntry:
    """One stored program.

    Attributes:
        path: Its file.
        key: What it is found by, hexadecimal.
        name: Operator that it belongs to, such as ``"tpu::matmul"``.
        bytes: Size of the file.
        used: When it was last loaded or stored, in seconds since the epoch.
        versions: Releases of the packages that made it, by name.
    """

    path: Path
    key: str
    name: str
    bytes: int
    used: float
    versions: dict[str, str]


class DamagedProgram(Exception):
    """A file that is no program of this format, with the reason."""


class ProgramCache:
    """Compiled programs by key, kept in a folder.

    Any number of processes and threads may share the folder: files are written under another name
    and moved into place. What is damaged is removed with a warning, and compiled again.

    Args:
        folder: Made when the first program is stored, for this user only. The folder of the
            settings by default.
        limit: Bytes that may lie there; the least recently used programs give way. The settings'
            by default.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = ProgramCache(folder)
        ...     cache.store("0a" * 16, b"machine code", name="doc::scale", versions={"jax": "1"})
        ...     cache.load("0a" * 16), [e.name for e in cache.entries()], cache.verify()
        True
        (b'machine code', ['doc::scale'], {})
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, limit: int | None = None
    ) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit if limit is not None else settings().program_cache_mib * 2**20
        self._stores = 0

    def __repr__(self) -> str:
        return f"ProgramCache({str(self.folder)!r})"

    # ------------------------------------------------------------------ programs
    def load(self, key: str) -> bytes | None:
        """The compiler's bytes stored under a key, or None.

        Warns:
            CacheCorruption: The entry is damaged, or others may have written it; it is removed.
        """
        path = self._path(key)
        try:
            about, payload = _read(path)
            if about["key"] != key:
                raise DamagedProgram("it holds another program")
        except FileNotFoundError:
            return None
        except OSError as error:
            _log_once(self.folder, f"cannot read {path}: {error}")
            return None
        except DamagedProgram as error:
            self.discard(key, str(error))
            return None
        with contextlib.suppress(OSError):  # a read-only folder serves as well
            os.utime(path)
        return payload

    def store(self, key: str, payload: bytes, *, name: str, versions: dict[str, str]) -> bool:
        """Keep a program.

        Args:
            key: Hexadecimal digits, at least three.
            payload: The compiler's bytes.
            name: Operator that it belongs to, for listings.
            versions: Releases of the packages that made it, for listings.

        Returns:
            Whether it was written; a folder that cannot be written costs nothing but a log line.
        """
        about = {
            "format": FORMAT,
            "key": key,
            "name": name,
            "versions": versions,
            "checksum": hashlib.blake2b(payload, digest_size=32).hexdigest(),
        }
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made for this user only (mkstemp); a crash leaves it under its temporary name.
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_NEW)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_FIRST_LINE + json.dumps(about).encode() + b"\n")
                    file.write(payload)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            _log_once(self.folder, f"programs are not kept: {self.folder} refuses ({error})")
            return False
        self._prune_at_times()
        return True

    def discard(self, key: str, reason: str) -> None:
        """Remove a program that cannot be used, with a warning."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.unlink()
        warnings.warn(
            f"removed the compiled program {path}: {reason}", CacheCorruption, stacklevel=3
        )

    # ------------------------------------------------------------------ housekeeping
    def entries(self) -> list[ProgramEntry]:
        """The programs that are stored, the most recently used first; unreadable files are left
        out."""
        found = []
        for path in self._files():
            with contextlib.suppress(OSError, DamagedProgram):
                with open(path, "rb") as file:
                    about = _description(file)
                status = path.stat()
                found.append(
                    ProgramEntry(
                        path,
                        str(about["key"]),
                        str(about["name"]),
                        status.st_size,
                        status.st_mtime,
                        {str(k): str(v) for k, v in about["versions"].items()},
                    )
                )
        return sorted(found, key=lambda entry: -entry.used)

    def verify(self) -> dict[Path, str]:
        """Check every file to the last byte; return the bad ones with the reason.

        Example:
            >>> ProgramCache("no/such/folder").verify()
            {}
        """
        problems = {}
        for path in self._files():
            try:
                about, _ = _read(path)
                if self._path(str(about["key"])) != path:
                    raise DamagedProgram("it holds another program")
            except (OSError, DamagedProgram) as error:
                problems[path] = str(error)
        return problems

    def prune(self, *, max_bytes: int | None = None, unused_days: float | None = None) -> int:
        """Delete programs, the least recently used first, and what killed writers left.

        Args:
            max_bytes: Bytes that may stay; the cache's limit by default.
            unused_days: Delete also what was not used for so long.

        Returns:
            The number of files deleted.
        """
        now, kept, deleted = time.time(), 0, 0
        budget = self.limit if max_bytes is None else max_bytes
        for path in self.folder.glob(f"??/{_NEW}*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _STALE_AFTER_S:
                    path.unlink()
                    deleted += 1
        for when, size, path in sorted(self._sizes(), reverse=True):
            kept += size
            if kept > budget or (unused_days is not None and now - when > unused_days * 86400):
                with contextlib.suppress(OSError):
                    path.unlink()
                    deleted += 1
        return deleted

    # ------------------------------------------------------------------ files
    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def _files(self) -> Iterator[Path]:
        return self.folder.glob(f"??/*{_SUFFIX}")

    def _sizes(self) -> list[tuple[float, int, Path]]:
        """Last use, bytes and path of every program; other processes may delete some meanwhile."""
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found

    def _prune_at_times(self) -> None:
        """Once a day for all processes together, and after many stores of this one."""
        self._stores += 1
        mark = self.folder / _MARK
        try:
            due = time.time() - mark.stat().st_mtime > _PRUNE_EVERY_S
        except OSError:
            due = True
        if due or self._stores % _PRUNE_AFTER_STORES == 0:
            with contextlib.suppress(OSError):
                mark.touch(mode=0o600)
            if sum(size for _, size, _ in self._sizes()) > self.limit:
                self.prune(max_bytes=int(self.limit * _KEEP_SHARE))


def default_folder() -> Path:
    """Where programs lie if a kernel does not say otherwise (``TPU_KERNELS_CACHE_DIR``)."""
    return settings().cache_dir / "programs"


def cache_for(folder: Any = None) -> ProgramCache | None:
    """The cache of a folder, None where programs are not kept (``TPU_KERNELS_PROGRAM_CACHE=0``).

    Args:
        folder: A kernel's ``cache_dir``; None for the settings' folder.
    """
    if not settings().program_cache:
        return None
    return _cache_at(Path(folder) if folder is not None else default_folder())


@functools.cache
def _cache_at(folder: Path) -> ProgramCache:
    return ProgramCache(folder)


def _check_trust(file: Any) -> None:
    """Refuse machine code that somebody else can have written."""
    status = os.fstat(file.fileno())
    if hasattr(os, "geteuid") and (
        status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022
    ):
        raise DamagedProgram("others may have written it")


def _description(file: Any) -> dict[str, Any]:
    if file.readline(len(_FIRST_LINE)) != _FIRST_LINE:
        raise DamagedProgram("it does not begin as a program")
    try:
        about = json.loads(file.readline(2**16))
        if about["format"] != FORMAT:
            raise DamagedProgram(f"it has format {about['format']}, not {FORMAT}")
        if not isinstance(about["versions"], dict):
            raise DamagedProgram("its description has no versions")
        about["key"], about["name"], about["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedProgram("its description cannot be read") from error
    return about  # type: ignore[no-any-return]


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    with open(path, "rb") as file:
        _check_trust(file)
        about = _description(file)
        payload = file.read()
    if hashlib.blake2b(payload, digest_size=32).hexdigest() != about["checksum"]:
        raise DamagedProgram("its checksum is wrong")
    return about, payload


@functools.cache
def _log_once(folder: Path, text: str) -> None:
    logger.warning("%s", text)
