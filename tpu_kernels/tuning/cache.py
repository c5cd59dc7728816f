"""The tuning cache: one small file per record, found by the digest of its key.

One file per record is what makes the cache safe: a write is a new file moved into place, so writers
never read what they write, cannot lose each other's records, and a reader sees the old record or
the new one. A file that does not check out (format, checksum, key) is a miss with one warning, and
the next `put` of its key replaces it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError, CacheCorruption, CacheUnwritable
from tpu_kernels.tuning.explain import Explanation, explain
from tpu_kernels.tuning.records import (
    Record,
    RecordError,
    decode,
    digest,
    encode,
    encode_config,
    group_of,
)

_SUFFIX = ".json"
_TEMPORARY = ".tmp"
_STALE_AFTER_S = 3600.0  # a temporary file this old belongs to a writer that was killed


class TuningCache:
    """Tuning records in a folder, shared by any number of processes.

    Args:
        path: The folder, created at the first write; by default ``tuning`` in the cache folder of
            the settings.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> cache = TuningCache(folder.name)
        >>> key = {"kernel": "tpu::mm", "target": "v6e"}
        >>> _ = cache.put(key, {"block": (256, 128)}, time_us=81.5)
        >>> cache.get({"target": "v6e", "kernel": "tpu::mm"}).config
        {'block': [256, 128]}
        >>> print(cache.explain({"kernel": "tpu::mm", "target": "v5e"}))
        no record for tpu::mm; the nearest of 1 differs in 1 field:
          target: asked 'v5e', stored 'v6e'
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else settings().cache_dir / "tuning"
        self._lock = threading.Lock()
        self._memory: dict[str, Record] = {}  # records that could not be written
        self._warned: set[Path] = set()

    def __repr__(self) -> str:
        return f"TuningCache({str(self.path)!r})"

    def get(self, key: Any) -> Record | None:
        """Return the record of a key.

        Args:
            key: Any nesting of dicts, sequences, numbers, strings, dtypes (see `records.encode`).

        Returns:
            The record, its config with lists where tuples were put; None if there is none, or it
            is damaged.

        Warns:
            CacheCorruption: The file of this key is damaged or unreadable; once per file.
        """
        encoded = encode(key)
        identity = digest(encoded)
        with self._lock:
            if identity in self._memory:
                return self._memory[identity]
        record = self._read(self._file(encoded, identity))
        return record if record is not None and record.digest == identity else None

    def put(
        self, key: Any, config: Mapping[str, Any], time_us: float | None = None, **provenance: Any
    ) -> Record:
        """Store a result; an earlier record of the same key is replaced.

        Args:
            key: See `get`.
            config: The chosen values by parameter name; numbers, strings, lists, tuples, dicts.
            time_us: Measured or estimated time in µs.
            **provenance: What else to keep: objective, target, versions, figures.

        Returns:
            The record as a reader will see it. When this returns, the record is on disk (synced),
            or a `CacheUnwritable` warning has said that it is only in memory.

        Raises:
            ArgumentError: The key, config or time cannot be stored.
        """
        if time_us is not None and not (math.isfinite(time_us) and time_us >= 0):
            raise ArgumentError(f"time_us={time_us!r} is not a time", hint="pass None if unknown")
        record = Record(
            key=encode(key),
            config=decode(encode_config(config)),
            time_us=None if time_us is None else float(time_us),
            provenance=encode(provenance, where="provenance"),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        self._write(record)
        return record

    def discard(self, key: Any) -> bool:
        """Remove the record of a key; return whether there was one."""
        encoded = encode(key)
        identity = digest(encoded)
        with self._lock:
            found = self._memory.pop(identity, None) is not None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._file(encoded, identity).unlink()
            found = True
        return found

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def __len__(self) -> int:
        return sum(1 for _ in self.records())

    def __contains__(self, key: Any) -> bool:
        return self.get(key) is not None

    def records(self, kernel: str | None = None) -> Iterator[Record]:
        """Iterate over all sound records, or those of one kernel, in the order of their files.

        Args:
            kernel: Only records whose key names this kernel.
        """
        with self._lock:
            memory = dict(self._memory)
        group = None if kernel is None else group_of({"kernel": kernel})
        for file in self._files(group):
            record = self._read(file)
            # A file that was copied or renamed by hand is not the record of its name.
            if record is None or record.digest != file.stem or record.digest in memory:
                continue
            if kernel is None or _kernel_of(record.key) == kernel:
                yield record
        for record in memory.values():
            if kernel is None or _kernel_of(record.key) == kernel:
                yield record

    def explain(self, key: Any) -> Explanation:
        """Compare a key field by field with the nearest record.

        Args:
            key: See `get`.

        Returns:
            An explanation; its text is ``str(explanation)``, its differences are in `.differences`.
        """
        encoded = encode(key)
        hit = self.get(key)
        return explain(encoded, [hit] if hit is not None else list(self.records()))

    def verify(self) -> dict[Path, str]:
        """Check every file; return the bad ones with the reason, without warnings.

        Example:
            >>> TuningCache("no/such/folder").verify()
            {}
        """
        problems = {}
        for file in self._files():
            try:
                record = Record.loads(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, RecordError) as error:
                problems[file] = str(error)
                continue
            if record.digest != file.stem:
                problems[file] = "the file holds the record of another key"
        return problems

    def prune(
        self,
        *,
        older_than_days: float | None = None,
        keep: Callable[[Record], bool] | None = None,
    ) -> int:
        """Delete damaged records, leftovers of killed writers, and what the arguments say.

        Args:
            older_than_days: Delete records that were written longer ago than this.
            keep: Called with each sound record; False deletes it.

        Returns:
            The number of files deleted.
        """
        doomed = list(self.verify())
        now = time.time()
        for file in self.path.glob(f"*/*{_TEMPORARY}"):
            with contextlib.suppress(FileNotFoundError):
                if now - file.stat().st_mtime > _STALE_AFTER_S:
                    doomed.append(file)
        for file in self._files():
            if file in doomed or (record := self._read(file)) is None:
                continue
            age_days = (now - file.stat().st_mtime) / 86400
            if (older_than_days is not None and age_days > older_than_days) or (
                keep is not None and not keep(record)
            ):
                doomed.append(file)
        for file in doomed:
            file.unlink(missing_ok=True)
        return len(doomed)

    def restore(self, record: Record, *, overwrite: bool = True) -> bool:
        """Store a record as it is, with its own time and provenance (used by import).

        Returns:
            Whether it was written: False if the key has a record already and `overwrite` is False.
        """
        if not overwrite and self.get(record.key) is not None:
            return False
        self._write(record)
        return True

    def file_of(self, record: Record) -> Path:
        """The file that holds a record, or would."""
        return self._file(record.key, record.digest)

    # Files

    def _file(self, encoded: Any, identity: str) -> Path:
        return self.path / group_of(encoded) / (identity + _SUFFIX)

    def _files(self, group: str | None = None) -> list[Path]:
        return sorted(self.path.glob(f"{group or '*'}/*{_SUFFIX}"))

    def _read(self, file: Path) -> Record | None:
        try:
            return Record.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError, RecordError) as error:
            text = f"ignored the damaged tuning record {file}: {error}"
            self._warn_once(file, text, CacheCorruption)
            return None

    def _write(self, record: Record) -> None:
        file = self._file(record.key, record.digest)
        try:
            write_atomically(file, record.dumps())
        except OSError as error:
            with self._lock:
                self._memory[record.digest] = record
            self._warn_once(
                self.path,
                f"tuning records are kept in memory only: {self.path} cannot be written ({error})",
                CacheUnwritable,
            )
            return
        with self._lock:
            self._memory.pop(record.digest, None)
            self._warned.discard(file)  # a file that is damaged again is news

    def _warn_once(self, path: Path, text: str, category: type[Warning]) -> None:
        with self._lock:
            if path in self._warned:
                return
            self._warned.add(path)
        warnings.warn(text, category, stacklevel=4)


def _kernel_of(encoded: Any) -> str | None:
    return encoded.get("kernel") if isinstance(encoded, dict) else None


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that a crash at any moment leaves the old content or the new, no mixture."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{file.stem[:16]}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = file.with_name(f".{unique}{_TEMPORARY}")
    try:
        with open(temporary, "x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The new name itself has to survive a power failure; some file systems cannot sync a folder.
    with contextlib.suppress(OSError):
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
