"""The stores in the cache folder as one: tuned records, compiled CPU programs, compile results.

Each has files, identities and rules of its own; what they share is here: listing, finding by the
first digits of an identity, checking and pruning.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpu_kernels.backends.program_cache import ProgramCache
from tpu_kernels.compiler.result_cache import ResultCache
from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.records import Record
from tpu_kernels.tuning.report import config_text

STORES: Final = ("tuned", "programs", "compiled")
"""Tuned records, compiled CPU programs, results of the TPU compiler."""


@dataclass(frozen=True)
class Entry:
    """One file of a store.

    Attributes:
        store: One of `STORES`.
        identity: Hexadecimal digits that it is found by.
        kernel: Kernel or function that it belongs to.
        what: What it holds, in a few words.
        bytes: Size of the file.
        used: When it was last used (programs) or written, in seconds since the epoch.
        path: The file.
    """

    store: str
    identity: str
    kernel: str
    what: str
    bytes: int
    used: float
    path: Path


class Stores:
    """All stores of a cache folder.

    Args:
        folder: The cache folder; that of the settings by default.

    Example:
        >>> stores = Stores("no/such/folder")
        >>> stores.entries(), stores.verify(), stores.prune(unused_days=30)
        ([], {}, {'tuned': 0, 'programs': 0, 'compiled': 0})
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else settings().cache_dir
        self.tuned = TuningCache(self.folder / "tuning")
        self.programs = ProgramCache(self.folder / "programs")
        self.compiled = ResultCache(self.folder / "compile")

    def entries(self, stores: Sequence[str] = STORES, kernel: str | None = None) -> list[Entry]:
        """List what is stored.

        Args:
            stores: Which stores.
            kernel: Only what belongs to this kernel.

        Returns:
            The entries by store, then by kernel, the latest first.
        """
        found = [
            *(self._tuned() if "tuned" in stores else ()),
            *(self._programs() if "programs" in stores else ()),
            *(self._compiled() if "compiled" in stores else ()),
        ]
        if kernel is not None:
            found = [entry for entry in found if entry.kernel == kernel]
        return sorted(found, key=lambda e: (STORES.index(e.store), e.kernel, -e.used))

    def find(self, prefix: str) -> Entry:
        """Return the entry whose identity begins with some digits.

        Raises:
            ArgumentError: There is none, or more than one.
        """
        found = [entry for entry in self.entries() if entry.identity.startswith(prefix.lower())]
        if len(found) == 1:
            return found[0]
        if not found:
            raise ArgumentError(
                f"no entry of {self.folder} begins with {prefix!r}",
                hint="`tpu-kernels cache list` shows their first digits",
            )
        several = ", ".join(f"{e.identity[:16]} ({e.store})" for e in found[:4])
        raise ArgumentError(
            f"{len(found)} entries begin with {prefix!r}: {several}", hint="give more digits"
        )

    def detail(self, entry: Entry) -> dict[str, Any]:
        """Everything an entry says about itself, ready for JSON.

        Raises:
            ArgumentError: The file cannot be read any more.
        """
        try:
            if entry.store == "programs":
                about = next(p for p in self.programs.entries() if p.path == entry.path)
                return {"key": about.key, "name": about.name, "versions": about.versions}
            document = json.loads(entry.path.read_text(encoding="utf-8"))
            return dict(document["record" if entry.store == "tuned" else "report"])
        except (OSError, ValueError, KeyError, StopIteration) as error:
            raise ArgumentError(f"{entry.path} cannot be read: {error}") from error

    def verify(self, stores: Sequence[str] = STORES) -> dict[Path, str]:
        """Check every file; return the bad ones with the reason."""
        problems: dict[Path, str] = {}
        for store in stores:
            problems |= getattr(self, store).verify()
        return problems

    def prune(
        self,
        stores: Sequence[str] = STORES,
        *,
        max_bytes: int | None = None,
        unused_days: float | None = None,
    ) -> dict[str, int]:
        """Delete what is damaged, left over, too much or too old.

        Args:
            stores: Which stores.
            max_bytes: Bytes that programs, and compile results, may each keep; tuned records are
                small, cannot be made again quickly, and go by age alone.
            unused_days: Delete what was not used (programs) or was written longer ago than this.

        Returns:
            The number of files deleted, by store.
        """
        deleted = dict.fromkeys(stores, 0)
        if "tuned" in stores:
            deleted["tuned"] = self.tuned.prune(older_than_days=unused_days)
        for name in ("programs", "compiled"):
            if name not in stores:
                continue
            store = getattr(self, name)
            for path in store.verify():
                with contextlib.suppress(OSError):
                    path.unlink()
                    deleted[name] += 1
            deleted[name] += store.prune(max_bytes=max_bytes, unused_days=unused_days)
        return deleted

    # ------------------------------------------------------------------ one store each
    def _tuned(self) -> list[Entry]:
        found = []
        for record in self.tuned:
            path = self.tuned.file_of(record)
            with contextlib.suppress(OSError):
                status = path.stat()
                kernel = record.key.get("kernel") if isinstance(record.key, Mapping) else None
                found.append(
                    Entry(
                        "tuned",
                        record.digest,
                        str(kernel or "(no kernel)"),
                        record_text(record),
                        status.st_size,
                        status.st_mtime,
                        path,
                    )
                )
        return found

    def _programs(self) -> list[Entry]:
        return [
            Entry("programs", p.key, p.name, _versions(p.versions), p.bytes, p.used, p.path)
            for p in self.programs.entries()
        ]

    def _compiled(self) -> list[Entry]:
        return [
            Entry(
                "compiled", r.key, r.kernel, f"{r.target}: {r.status}", r.bytes, r.written, r.path
            )
            for r in self.compiled.entries()
        ]


def record_text(record: Record) -> str:
    """Say in one line what a tuned record is for and what it chose.

    Example:
        >>> key = {"kernel": "ns::f", "target": "v6e", "arrays": [[[8, 128], "bfloat16"]]}
        >>> record_text(Record(key, {"block": 8}, 1.5))
        'v6e bfloat16[8,128]: block=8, 1.5 µs'
    """
    key = record.key if isinstance(record.key, Mapping) else {}
    config = config_text(record.config) if isinstance(record.config, Mapping) else record.config
    time_us = record.time_us if record.time_us is not None else record.provenance.get("cost")
    took = f", {time_us:.4g} µs" if isinstance(time_us, int | float) else ""
    words = [str(key.get("target", ""))]
    with contextlib.suppress(KeyError, TypeError, ValueError):  # a key of another caller's
        words += [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in key["arrays"]]
    if "bucket" in key:
        words.append(f"bucket {key['bucket']}")
    return f"{' '.join(filter(None, words))}: {config}{took}"


def _versions(versions: Mapping[str, str]) -> str:
    return "CPU program" + "".join(f", {name} {release}" for name, release in versions.items())
