"""Moving tuning records between caches and machines: one JSON file that holds many records."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpu_kernels.errors import ArgumentError, CacheCorruption
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.records import FORMAT, Record, RecordError

BUNDLE = FORMAT + "+bundle"


@dataclass(frozen=True)
class ImportResult:
    """How many records an import wrote, left alone, and found damaged."""

    written: int
    kept: int
    damaged: int


def export_records(
    cache: TuningCache,
    path: str | os.PathLike[str],
    *,
    select: Callable[[Record], bool] | None = None,
) -> int:
    """Write the records of a cache into one file.

    Args:
        cache: Where to read.
        path: The JSON file to write.
        select: Only records for which this is true.

    Returns:
        The number of records written.
    """
    chosen = [record.to_json() for record in cache if select is None or select(record)]
    document = {"format": BUNDLE, "records": chosen}
    Path(path).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return len(chosen)


def import_records(
    cache: TuningCache, path: str | os.PathLike[str], *, overwrite: bool = False
) -> ImportResult:
    """Add the records of an exported file to a cache.

    Args:
        cache: Where to write.
        path: A file of `export_records`.
        overwrite: Replace records that the cache has already.

    Returns:
        What happened to the records; damaged ones are left out with a warning.

    Raises:
        ArgumentError: The file is not an export of this format.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArgumentError(f"cannot read tuning records from {path}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != BUNDLE:
        raise ArgumentError(
            f"{path} is not an export of tuning records ({BUNDLE})",
            hint="write one with export_records or `tpu-kernels cache export`",
        )
    written = kept = damaged = 0
    for item in document.get("records", []):
        try:
            record = Record.from_json(item)
        except RecordError as error:
            damaged += 1
            warnings.warn(f"{path}: left out a record: {error}", CacheCorruption, stacklevel=2)
            continue
        if cache.restore(record, overwrite=overwrite):
            written += 1
        else:
            kept += 1
    return ImportResult(written, kept, damaged)
