"""Results of other tuners: reading and writing the files of tokamax and Helion.

tokamax keeps one JSON file for each device and op (``data/autotuning/<device>/<op>.json``): an
object from the arguments of a call, as JSON text, to an object from configs, as JSON text, to their
times in ms. Helion keeps one ``<digest>.best_config`` for each call: a JSON object with the config
as JSON text and the fields of its key as texts; and saves single configs as plain JSON
(``helion.Config.save``). Neither knows our source hashes: what is imported is bound to the kernel
as it is now.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning.records import Record

_ARRAY = re.compile(r"([a-z][a-z0-9_]*)\[([0-9,]*)\]")
# Short names of both tuners and of XLA; what is missing here is spelled out in the files.
_SHORT: Final = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i4": "int4",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u32": "uint32",
    "bool": "bool",
}
_LONG: Final = {long: short for short, long in _SHORT.items()}


@dataclass(frozen=True)
class ForeignResult:
    """What another tuner found for one call.

    Attributes:
        arrays: ``(shape, dtype name)`` by the other tuner's name of the argument.
        values: Its other arguments by name.
        config: Its best config.
        time_us: The median time in µs, None where the file has none.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], str]]
    values: Mapping[str, Any]
    config: Mapping[str, Any]
    time_us: float | None


def read_tokamax(path: str | Path) -> list[ForeignResult]:
    """Read a file of tokamax.

    Args:
        path: The file.

    Returns:
        One result for each call that has a measured config.

    Raises:
        ArgumentError: The file is not of that form.
    """
    document = _load(path)
    results = []
    try:
        for arguments, configs in document.items():
            if not configs:
                continue  # nothing worked for this call
            timed = {text: _time_us(data) for text, data in configs.items()}
            best = min(timed, key=lambda text: (timed[text] is None, timed[text] or 0.0))
            given = json.loads(arguments)
            arrays = {name: found for name, v in given.items() if (found := array(v)) is not None}
            values = {name: v for name, v in given.items() if name not in arrays}
            results.append(ForeignResult(arrays, values, json.loads(best), timed[best]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{path} is not a tuning file of tokamax: {type(error).__name__}: {error}"
        ) from error
    return results


def read_helion(path: str | Path) -> dict[str, Any]:
    """Read one config of Helion: a ``.best_config`` of its cache, or a saved `helion.Config`.

    Args:
        path: The file.

    Returns:
        The config.

    Raises:
        ArgumentError: The file is not of that form.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w+", suffix=".best_config") as file:
        ...     _ = file.write('{"config": "{\\\\"block_sizes\\\\": [32]}", "key": {"fields": {}}}')
        ...     file.flush()
        ...     read_helion(file.name)
        {'block_sizes': [32]}
    """
    document = _load(path)
    try:
        config = json.loads(document["config"]) if "key" in document else document
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{path} is not a config of Helion: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{path} is not a config of Helion: no JSON object")
    return config


def write_tokamax(path: str | Path, records: Iterable[Record], names: Mapping[str, Any]) -> int:
    """Write records in the form of tokamax's files.

    Args:
        path: The file.
        records: Records of one kernel and target.
        names: Names of the tensor arguments by kernel; unknown kernels get ``arg0``, ``arg1``, ...

    Returns:
        The number of records written; bucket records and others without shapes are left out.
    """
    document: dict[str, Any] = {}
    for record in records:
        if not isinstance(record.key, Mapping) or "arrays" not in record.key:
            continue
        arrays = record.key["arrays"]
        known = names.get(str(record.key.get("kernel")), ())
        labels = [known[i] if i < len(known) else f"arg{i}" for i in range(len(arrays))]
        call = {
            label: f"{_LONG.get(dtype, dtype)}[{','.join(map(str, shape))}]"
            for label, (shape, dtype) in zip(labels, arrays, strict=True)
        }
        time_us = record.time_us if record.time_us is not None else record.provenance.get("cost")
        times = [time_us / 1e3] if isinstance(time_us, int | float) else []
        figures = {"evaluation_times_ms": times, "metadata": dict(record.provenance)}
        key = json.dumps({**call, **record.key.get("static", {})}, separators=(",", ":"))
        document[key] = {json.dumps(record.config, separators=(",", ":")): figures}
    Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return len(document)


def array(value: Any) -> tuple[tuple[int, ...], str] | None:
    """Read the text of an array type, None for any other value.

    Example:
        >>> array("bf16[131072,7168]"), array("f32[]"), array("silu"), array(3)
        (((131072, 7168), 'bfloat16'), ((), 'float32'), None, None)
    """
    found = _ARRAY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    sizes = tuple(int(size) for size in found[2].split(",") if size)
    return sizes, _SHORT.get(found[1], found[1])


def _time_us(data: Mapping[str, Any]) -> float | None:
    times = data.get("evaluation_times_ms") or ()
    return 1e3 * statistics.median(times) if times else None


def _load(path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise ArgumentError(f"{path} holds no JSON object")
    return document
