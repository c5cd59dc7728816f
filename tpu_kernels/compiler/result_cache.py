"""Results of compilations on disk, found again by content.

One file for each result, named by a hash of everything that decides it: the program without its
source locations, target, compiler version, compiler options and the format of the report. Files are
written atomically, so any number of processes may share the folder; a damaged file is reported once
and written anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kernels.compiler.cost.calibration import calibration_digest
from tpu_kernels.compiler.diagnose import catalogue_digest
from tpu_kernels.compiler.report import CompileReport
from tpu_kernels.compiler.versions import jax_version, libtpu_version
from tpu_kernels.errors import CacheCorruption

if TYPE_CHECKING:
    from tpu_kernels.compiler.lowering import Program

# Raise this when the meaning of a stored report changes.
FORMAT = 7
# A time limit or a crash says something about this run, not about the program.
_KEPT = frozenset({"ok", "error", "vmem", "unsupported", "invalid"})


_NEW = ".new-"
_STALE_AFTER_S = 3600.0  # what a writer that was killed left behind


@dataclasses.dataclass(frozen=True)
class ResultEntry:
    """One stored report.

    Attributes:
        path: Its file.
        key: What it is found by, hexadecimal.
        kernel: Name of the kernel or function.
        target: Chip it was compiled for.
        status: The compiler's verdict.
        bytes: Size of the file.
        written: When it was stored, in seconds since the epoch.
    """

    path: Path
    key: str
    kernel: str
    target: str
    status: str
    bytes: int
    written: float


class ResultCache:
    """Reports by program, kept in a folder.

    Args:
        folder: Made when the first result is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, program: Program, options: Mapping[str, str]) -> CompileReport | None:
        """Look a program up.

        Args:
            program: The lowered program.
            options: Compiler options in force.

        Returns:
            The stored report, marked as cached, or None. A stored failure counts only while the
            source locations are the same, since it names a line.
        """
        path = self._path(program.digest, program.target.topology_name, options)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(path, error)
            return None
        try:
            entry = json.loads(text)
            report = CompileReport.from_dict({**entry["report"], "cached": True})
            place = entry["place_digest"]
        except (ValueError, KeyError, TypeError) as error:
            self._warn(path, error)
            return None
        return report if report.ok or place == program.place_digest else None

    def store(
        self,
        report: CompileReport,
        digest: str,
        place_digest: str,
        topology: str,
        options: Mapping[str, str],
    ) -> None:
        """Keep a report, if it says something about the program and not about this run.

        Args:
            report: The report.
            digest: The program's digest.
            place_digest: The program's digest with source locations.
            topology: Name of the target's topology.
            options: Compiler options in force.
        """
        if report.status not in _KEPT:
            return
        path = self._path(digest, topology, options)
        entry = {"place_digest": place_digest, "report": report.to_dict()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_NEW)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.replace(temporary, path)
        except OSError as error:
            # A full or read-only disk must not cost the result that was just computed.
            warnings.warn(CacheCorruption(f"cannot store {path}: {error}"), stacklevel=2)

    def entries(self) -> list[ResultEntry]:
        """The stored reports, the latest first; unreadable files are left out."""
        found = []
        for path in self._files():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                report, status = _report_of(path), path.stat()
                found.append(
                    ResultEntry(
                        path,
                        path.stem,
                        report.kernel,
                        report.target,
                        report.status,
                        status.st_size,
                        status.st_mtime,
                    )
                )
        return sorted(found, key=lambda entry: -entry.written)

    def verify(self) -> dict[Path, str]:
        """Read every file; return the bad ones with the reason.

        Example:
            >>> ResultCache(Path("no/such/folder")).verify()
            {}
        """
        problems = {}
        for path in self._files():
            try:
                _report_of(path)
            except OSError as error:
                problems[path] = str(error)
            except (ValueError, KeyError, TypeError) as error:
                problems[path] = f"no report: {type(error).__name__}: {error}"
        return problems

    def prune(self, *, max_bytes: int | None = None, unused_days: float | None = None) -> int:
        """Delete reports, the oldest first, and what killed writers left.

        Args:
            max_bytes: Bytes that may stay; None for any number.
            unused_days: Delete also what was written longer ago than this.

        Returns:
            The number of files deleted.
        """
        now, kept, deleted = time.time(), 0, 0
        doomed, written = [], []
        for path in self.folder.glob(f"??/{_NEW}*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _STALE_AFTER_S:
                    doomed.append(path)
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.stat()
                written.append((status.st_mtime, status.st_size, path))
        for when, size, path in sorted(written, reverse=True):
            kept += size
            too_many = max_bytes is not None and kept > max_bytes
            if too_many or (unused_days is not None and now - when > unused_days * 86400):
                doomed.append(path)
        for path in doomed:
            with contextlib.suppress(OSError):
                path.unlink()
                deleted += 1
        return deleted

    def _files(self) -> Iterator[Path]:
        return self.folder.glob("??/*.json")

    def _path(self, digest: str, topology: str, options: Mapping[str, str]) -> Path:
        tables = (catalogue_digest(), calibration_digest())
        parts = (
            FORMAT,
            *tables,
            libtpu_version(),
            jax_version(),
            digest,
            topology,
            sorted(options.items()),
        )
        name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        return self.folder / name[:2] / f"{name}.json"

    @staticmethod
    def _warn(path: Path, error: Exception) -> None:
        warnings.warn(
            CacheCorruption(f"ignoring the damaged compile result {path}: {error}"), stacklevel=4
        )


def _report_of(path: Path) -> CompileReport:
    entry = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entry["place_digest"], str):
        raise ValueError("place_digest is not a text")
    return CompileReport.from_dict(entry["report"])
