"""Results of compilations on disk, found again by content.

One file for each result, named by a hash of everything that decides it: the program without its
source locations, target, compiler version, compiler options and the format of the report. Files are
written atomically, so any number of processes may share the folder; a damaged file is reported once
and written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
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
FORMAT = 5
# A time limit or a crash says something about this run, not about the program.
_KEPT = frozenset({"ok", "error", "vmem", "unsupported", "invalid"})


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
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.replace(temporary, path)
        except OSError as error:
            # A full or read-only disk must not cost the result that was just computed.
            warnings.warn(CacheCorruption(f"cannot store {path}: {error}"), stacklevel=2)

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
