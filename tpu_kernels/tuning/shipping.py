"""Writing the tables that ship with the package from tuned records.

A record becomes an entry if it is for a chip, for exact shapes, and for the kernel as it is now: an
entry is not bound to a source hash, so what was tuned for older code must not get in. What the
table has for other calls stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_kernels.config import CHIPS
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.tuning.nearest import Neighbour
from tpu_kernels.tuning.records import Record, canonical, decode, encode
from tpu_kernels.tuning.tables import parse, table_name, write_table

_KEPT = ("objective", "cost", "cost_unit", "candidates", "decision", "xla_us", "versions")


@dataclass(frozen=True)
class Shipped:
    """What became of records.

    Attributes:
        files: The tables that were written.
        written: How many records are entries now.
        left_out: Why each of the others is not.
    """

    files: tuple[Path, ...]
    written: int
    left_out: tuple[str, ...]


def write_tables(
    records: Iterable[Record], folder: str | Path, kernels: Mapping[str, Kernel]
) -> Shipped:
    """Add tuned records to the tables in a folder.

    Args:
        records: Tuned records of any kernels and targets.
        folder: The folder of all tables, one folder for each chip in it.
        kernels: The kernels by name, to tell whether a record is for their code.

    Returns:
        The files written, and why some records are not in them.
    """
    groups: dict[tuple[str, str], dict[str, tuple[Neighbour, Mapping[str, Any]]]] = {}
    left_out, written = [], 0
    for record in records:
        key = record.key if isinstance(record.key, Mapping) else {}
        name, chip = str(key.get("kernel")), str(key.get("target"))
        if reason := _unfit(record, key, kernels):
            left_out.append(f"{name} on {chip}: {reason}")
            continue
        arrays = tuple((tuple(shape), dtype) for shape, dtype in key["arrays"])
        entry = Neighbour(arrays, record.config, decode(key["static"]))
        kept = {k: record.provenance[k] for k in _KEPT if record.provenance.get(k) is not None}
        provenance = {**kept, "time_us": record.time_us, "created": record.created}
        groups.setdefault((chip, name), {})[_identity(entry)] = (entry, provenance)
        written += 1
    files = []
    for (chip, name), entries in sorted(groups.items()):
        merged = {**_existing(Path(folder) / chip / table_name(name)), **entries}
        ordered = [merged[identity] for identity in sorted(merged)]
        files.append(write_table(folder, chip, name, ordered))
    return Shipped(tuple(files), written, tuple(left_out))


def _unfit(record: Record, key: Mapping[str, Any], kernels: Mapping[str, Kernel]) -> str:
    kernel = kernels.get(str(key.get("kernel")))
    if key.get("target") not in CHIPS:
        return "not for a chip"
    if "arrays" not in key:
        return "for a bucket, not for shapes"
    if kernel is None:
        return "no such kernel"
    if key.get("source_hash") != kernel.spec.source.digest:
        return "tuned for other code of the kernel"
    if all(value is None for value in record.config.values()):
        return "the kernel's own choice was the best"
    return ""


def _identity(entry: Neighbour) -> str:
    return canonical(encode([entry.arrays, dict(entry.static)]))


def _existing(file: Path) -> dict[str, tuple[Neighbour, Mapping[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    entries = parse(text)
    provenances = [entry["provenance"] for entry in json.loads(text)["entries"]]
    return {_identity(e): (e, p) for e, p in zip(entries, provenances, strict=True)}
