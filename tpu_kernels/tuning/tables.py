"""Tuned configs that ship with the package: one JSON file for each chip and kernel.

A file holds ``{"format", "kernel", "chip", "entries": [...]}``; an entry holds ``arrays`` (shape
and dtype name of each tensor), ``static``, ``config`` and ``provenance``. Unlike records of the
cache, entries are not bound to a source hash: they are for the kernel of that name in this release.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from tpu_kernels.errors import CacheCorruption
from tpu_kernels.tuning.nearest import Neighbour
from tpu_kernels.tuning.records import decode, encode, encode_config, group_of

FORMAT = "tpu_kernels.table/1"


@functools.cache
def table(chip: str, kernel: str) -> tuple[Neighbour, ...]:
    """Return the shipped entries for a kernel on a chip, none if there is no table.

    Args:
        chip: Name such as ``"v6e"``.
        kernel: Qualified kernel name.

    Example:
        >>> table("v6e", "nobody::has_this")
        ()
    """
    file = resources.files(__package__).joinpath("tables", chip, table_name(kernel))
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    try:
        return parse(text)
    except (ValueError, KeyError, TypeError) as error:
        text = f"ignored the damaged table {chip}/{table_name(kernel)}: {error}"
        warnings.warn(text, CacheCorruption, stacklevel=2)
        return ()


def table_name(kernel: str) -> str:
    """Return the file name of a kernel's tables.

    Example:
        >>> table_name("tpu::matmul")
        'tpu.matmul.json'
    """
    return group_of({"kernel": kernel}) + ".json"


def parse(text: str) -> tuple[Neighbour, ...]:
    """Read the text of a table.

    Raises:
        ValueError: It is not JSON, or of another format.
        KeyError: An entry lacks a field.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("not a table")
    if document.get("format") != FORMAT:
        raise ValueError(f"format {document.get('format')!r} instead of {FORMAT!r}")
    return tuple(
        Neighbour(
            arrays=tuple((tuple(shape), str(dtype)) for shape, dtype in entry["arrays"]),
            config=decode(entry["config"]),
            static=decode(entry["static"]),
        )
        for entry in document["entries"]
    )


def write_table(
    folder: str | os.PathLike[str],
    chip: str,
    kernel: str,
    entries: Iterable[tuple[Neighbour, Mapping[str, Any]]],
) -> Path:
    """Write a table.

    Args:
        folder: The folder of all tables.
        chip: Name of the chip.
        kernel: Qualified kernel name.
        entries: Tuned calls, each with its provenance.

    Returns:
        The file.
    """
    rows = [
        {
            "arrays": encode(n.arrays),
            "static": encode(n.static),
            "config": encode_config(n.config),
            "provenance": encode(provenance),
        }
        for n, provenance in entries
    ]
    document = {"format": FORMAT, "kernel": kernel, "chip": chip, "entries": rows}
    file = Path(folder) / chip / table_name(kernel)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file
