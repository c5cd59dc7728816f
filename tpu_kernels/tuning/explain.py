"""Why a key was not found: a comparison with the nearest record, field by field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tpu_kernels.tuning.records import Record

ABSENT: Final = "(absent)"
# Another size is nearer than another source, and that nearer than another chip.
_WEIGHTS = {"kernel": 1000.0, "target": 20.0, "source_hash": 10.0}


@dataclass(frozen=True)
class Difference:
    """One field in which a key and a record differ.

    Attributes:
        field: Path of the field, such as ``tensors[0].shape[1]``.
        asked: The value in the key.
        stored: The value in the record.
    """

    field: str
    asked: Any
    stored: Any

    def __str__(self) -> str:
        return f"{self.field}: asked {_show(self.asked)}, stored {_show(self.stored)}"


@dataclass(frozen=True)
class Explanation:
    """Whether a key has a record and, if not, how far the nearest one is.

    Attributes:
        hit: Whether there is a record of exactly this key.
        nearest: That record, or the nearest of the same kernel, None if there is none.
        differences: The fields in which the nearest record differs.
        searched: How many records of this kernel were compared.
        kernel: What the key is about.
    """

    hit: bool
    nearest: Record | None
    differences: tuple[Difference, ...]
    searched: int
    kernel: str

    def __bool__(self) -> bool:
        return self.hit

    def __str__(self) -> str:
        if self.hit:
            return f"there is a record for {self.kernel}"
        if self.nearest is None:
            return f"no record for {self.kernel}: it was never tuned"
        fields = "1 field" if len(self.differences) == 1 else f"{len(self.differences)} fields"
        head = f"no record for {self.kernel}; the nearest of {self.searched} differs in {fields}:"
        return "\n  ".join([head, *map(str, self.differences)])


def explain(key: Any, records: Iterable[Record]) -> Explanation:
    """Compare an encoded key with records.

    Args:
        key: A key as plain JSON values.
        records: The candidates; those of other kernels are left out.

    Returns:
        The nearest record and how it differs.
    """
    asked = flatten(key)
    name = asked.get("kernel", asked.get("[0]", asked.get("", "this key")))
    best: tuple[float, Record, tuple[Difference, ...]] | None = None
    searched = 0
    for record in records:
        stored = flatten(record.key)
        if any(asked.get(field) != stored.get(field) for field in ("kernel", "[0]", "")):
            continue
        searched += 1
        found = differences(asked, stored)
        cost = sum(_WEIGHTS.get(d.field.partition(".")[0].partition("[")[0], 1.0) for d in found)
        if best is None or cost < best[0]:
            best = (cost, record, found)
    if best is None:
        return Explanation(False, None, (), 0, str(name))
    return Explanation(not best[2], best[1], best[2], searched, str(name))


def differences(asked: dict[str, Any], stored: dict[str, Any]) -> tuple[Difference, ...]:
    """List the fields in which two flattened keys differ, in the order of the asked key.

    Example:
        >>> asked, stored = flatten({"shape": [8, 128]}), flatten({"shape": [8, 256]})
        >>> [str(d) for d in differences(asked, stored)]
        ['shape[1]: asked 128, stored 256']
    """
    fields = [*asked, *(field for field in stored if field not in asked)]
    pairs = ((f, asked.get(f, ABSENT), stored.get(f, ABSENT)) for f in fields)
    return tuple(Difference(f, a, s) for f, a, s in pairs if not _same(a, s))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Spread nested dicts and lists into one dict by path.

    Example:
        >>> flatten({"a": [1, {"b": 2}], "c": []})
        {'a[0]': 1, 'a[1].b': 2, 'c': '[]'}
    """
    if isinstance(value, dict) and value:
        parts = ((f"{prefix}.{k}" if prefix else str(k), v) for k, v in value.items())
    elif isinstance(value, list) and value:
        parts = ((f"{prefix}[{i}]", v) for i, v in enumerate(value))
    else:
        return {prefix: str(value) if isinstance(value, dict | list) else value}
    flat: dict[str, Any] = {}
    for path, item in parts:
        flat.update(flatten(item, path))
    return flat


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b and str(a) == str(b)  # str: 0.0 is not -0.0


def _show(value: Any) -> str:
    text = ABSENT if value is ABSENT else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
