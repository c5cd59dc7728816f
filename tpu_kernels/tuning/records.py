"""What one tuning result is on disk: canonical keys, their digest, the record with its checksum.

A key is any nesting of dicts, lists, tuples, numbers, strings, None and dtypes. Two keys are the
same entry when their canonical JSON is the same text: dict order does not matter, a tuple equals a
list (a record has to find itself again after JSON), but 1, 1.0 and True differ, 0.0 differs from
-0.0, and NaN equals itself.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_kernels.errors import ArgumentError

FORMAT = "tpu_kernels.tuning/1"
_TAG = "$"  # a JSON object whose only key starts with this holds a value that JSON has no word for


class RecordError(ValueError):
    """The text of a record is damaged, of another format, or belongs to another key."""


def encode(value: Any, *, where: str = "key") -> Any:
    """Turn a key or config into plain JSON values, without losing a distinction that matters.

    Args:
        value: A nesting of dicts, sequences, numbers, strings, None, bytes, enums and dtypes.
        where: The name of the place, for the error message.

    Returns:
        The same value made of dict, list, str, int, float, bool and None only.

    Raises:
        ArgumentError: A value has no stable spelling (an arbitrary object, a tensor).

    Example:
        >>> encode(("tpu::mm", float("nan"), {"block": (8, 128)}))
        ['tpu::mm', {'$float': 'nan'}, {'block': [8, 128]}]
    """
    if isinstance(value, enum.Enum):
        return {"$enum": f"{type(value).__qualname__}.{value.name}"}
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, list | tuple):
        return [encode(item, where=f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return {"$set": sorted((encode(item, where=where) for item in value), key=canonical)}
    if (name := _dtype_name(value)) is not None:
        return {"$dtype": name}
    if getattr(value, "shape", None) == () and hasattr(value, "dtype") and hasattr(value, "item"):
        return encode(value.item(), where=where)  # NumPy scalars
    raise ArgumentError(
        f"{where}: a {type(value).__name__} cannot be part of a tuning key or config",
        hint="use numbers, strings, tuples, dicts and dtypes",
    )


def decode(value: Any) -> Any:
    """Turn JSON values back into Python values: `encode` reversed, bar tuples, enums and dtypes.

    Example:
        >>> decode(encode({"scale": float("-inf"), 3: b"x"})["$dict"][0])
        ['scale', -inf]
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag in _DECODERS:
            return _DECODERS[tag](content)
    return {key: decode(item) for key, item in value.items()}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$complex": lambda parts: complex(decode(parts[0]), decode(parts[1])),
    "$bytes": bytes.fromhex,
    "$dict": lambda pairs: {frozen(decode(k)): decode(v) for k, v in pairs},
    "$set": lambda items: {frozen(decode(item)) for item in items},
}


def encode_config(config: Any) -> Any:
    """Turn a config into JSON values that `decode` can give back to a kernel.

    Raises:
        ArgumentError: The config holds an enum or a dtype, which would come back as something else.
    """
    encoded = encode(config, where="config")
    if _has_tag(encoded, ("$enum", "$dtype")):
        raise ArgumentError(
            "config: an enum or dtype cannot be stored in a tuning record",
            hint='give the kernel a string ("float32") and convert it there',
        )
    return encoded


def _has_tag(value: Any, tags: tuple[str, ...]) -> bool:
    if isinstance(value, dict):
        return any(k in tags or _has_tag(v, tags) for k, v in value.items())
    return isinstance(value, list) and any(_has_tag(item, tags) for item in value)


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    plain = all(isinstance(key, str) for key in value) and not (
        len(value) == 1 and next(iter(value)).startswith(_TAG)
    )
    if plain:
        return {key: encode(value[key], where=f"{where}.{key}") for key in sorted(value)}
    pairs = [[encode(k, where=where), encode(v, where=f"{where}[{k!r}]")] for k, v in value.items()]
    return {"$dict": sorted(pairs, key=canonical)}


def _dtype_name(value: Any) -> str | None:
    """Name torch, JAX and NumPy dtypes alike, without importing any of them."""
    module = type(value).__module__.partition(".")[0]
    if type(value).__name__ == "dtype" and module == "torch":
        return str(value).removeprefix("torch.")
    if module == "numpy" and hasattr(value, "itemsize") and hasattr(value, "kind"):
        return str(value.name)
    if isinstance(value, type) and value.__module__.partition(".")[0] in ("numpy", "ml_dtypes"):
        return value.__name__
    return None


def canonical(encoded: Any) -> str:
    """Spell an encoded value as the one text that its digest is taken of.

    Example:
        >>> canonical({"b": 1, "a": [1.0, True]})
        '{"a":[1.0,true],"b":1}'
    """
    return json.dumps(encoded, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(encoded: Any) -> str:
    """Return the 64 hexadecimal digits that identify an encoded key.

    Example:
        >>> digest(encode((1, 2))) == digest(encode([1, 2])) != digest(encode([1, 2.0]))
        True
    """
    return hashlib.sha256(canonical(encoded).encode()).hexdigest()


def group_of(encoded: Any) -> str:
    """Return the folder name of a key: its kernel, so that one kernel's records lie together.

    Example:
        >>> group_of({"kernel": "tpu::matmul", "target": "v6e"}), group_of(["k", "x", 1])
        ('tpu.matmul', 'k')
    """
    name: Any = None
    if isinstance(encoded, dict):
        name = encoded.get("kernel")
    elif isinstance(encoded, list) and encoded:
        name = encoded[0]
    elif isinstance(encoded, str):
        name = encoded
    if not isinstance(name, str):
        return "other"
    return re.sub(r"[^A-Za-z0-9_-]+", ".", name).strip(".")[:80] or "other"


@dataclass(frozen=True)
class Record:
    """One tuning result.

    Attributes:
        key: The key as plain JSON values (see `encode`).
        config: The chosen configuration; tuples have become lists.
        time_us: Measured or estimated time in µs, None where only an order is known.
        provenance: How it was found: objective, versions, figures, who wrote it.
        created: UTC time of writing, ISO 8601.
    """

    key: Any
    config: Any
    time_us: float | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""

    @property
    def digest(self) -> str:
        """The identity of the key, 64 hexadecimal digits."""
        return digest(self.key)

    def to_json(self) -> dict[str, Any]:
        """Return the document that is stored, with the checksum over the record in it."""
        body = {
            "key": self.key,
            "config": encode_config(self.config),
            "time_us": self.time_us,
            "provenance": dict(self.provenance),
            "created": self.created,
        }
        return {"format": FORMAT, "checksum": digest(body), "record": body}

    def dumps(self) -> str:
        """Return the text of the record's file."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, document: Any) -> Record:
        """Read a stored document.

        Raises:
            RecordError: It is not a record, of another format, or its checksum does not match.
        """
        if not isinstance(document, dict) or "format" not in document:
            raise RecordError("not a tuning record")
        if document["format"] != FORMAT:
            raise RecordError(f"format {document['format']!r} instead of {FORMAT!r}")
        body = document.get("record")
        if not isinstance(body, dict) or set(body) != _BODY_FIELDS:
            raise RecordError("fields are missing")
        if digest(body) != document.get("checksum"):
            raise RecordError("the checksum does not match")
        if not isinstance(body["provenance"], dict):
            raise RecordError("provenance is not an object")
        return cls(**{**body, "config": decode(body["config"])})

    @classmethod
    def loads(cls, text: str) -> Record:
        """Read the text of a record's file.

        Raises:
            RecordError: The text is damaged or of another format.
        """
        try:
            document = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"not JSON: {error}") from error
        return cls.from_json(document)


_BODY_FIELDS = {"key", "config", "time_us", "provenance", "created"}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def frozen(value: Any) -> Any:
    """Turn lists into tuples all the way down: a config from the cache becomes static arguments.

    Example:
        >>> frozen({"block": [8, [128]]})
        {'block': (8, (128,))}
    """
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(frozen(item) for item in value)
    return value
