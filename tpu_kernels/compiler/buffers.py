"""The largest values that a compiled program keeps in HBM, and the operations that make them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

# %name = f32[512,2048]{1,0:T(8,128)} opcode(...), metadata={op_name="..."}
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<types>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_TYPE = re.compile(r"\b(?P<dtype>[a-z]+[0-9a-z]*)\[(?P<sizes>[\d,]*)\](?P<layout>\{[^}]*\})?")
_OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
_BITS = re.compile(r"\d+")
# What makes no value of its own: it names, passes on or takes apart what others made.
_NO_VALUE = frozenset(
    {
        *("parameter", "bitcast", "tuple", "get-tuple-element", "constant", "while"),
        *("copy-start", "copy-done", "async-start", "async-update", "async-done"),
    }
)
_WRAPPER = re.compile(r"^(?:jit\([^)]*\)|pjit|jvp\([^)]*\)|transpose\([^)]*\))/")


def largest(text: str, count: int = 12) -> list[dict[str, Any]]:
    """Find the largest values of a program's entry computation.

    Args:
        text: Optimised HLO.
        count: How many to return.

    Returns:
        For each its ``bytes``, its type (``what``), the path of the operation in the model
        (``where``) and the opcode. Values that live in VMEM only are left out.
    """
    found = []
    for line in _entry(text):
        match = _INSTRUCTION.match(line)
        if match is None or match["opcode"] in _NO_VALUE:
            continue
        name = _OP_NAME.search(line)
        for each in _TYPE.finditer(match["types"]):
            if "S(" in (each["layout"] or ""):
                continue
            where = path_of(name["name"]) if name else ""
            found.append(
                {
                    "bytes": _bytes(each["dtype"], each["sizes"]),
                    "what": f"{each['dtype']}[{each['sizes']}]",
                    "where": where,
                    "opcode": match["opcode"],
                }
            )
    return sorted(found, key=lambda buffer: -int(buffer["bytes"]))[:count]


def path_of(op_name: str) -> str:
    """Take JAX's own wrappers off an operation's name.

    Example:
        >>> path_of("jit(Net)/layers.0.mlp:mm/dot_general")
        'layers.0.mlp:mm/dot_general'
    """
    while (shorter := _WRAPPER.sub("", op_name)) != op_name:
        op_name = shorter
    return op_name


def _entry(text: str) -> Iterator[str]:
    """The lines of the entry computation."""
    inside = False
    for line in text.splitlines():
        if line.startswith("ENTRY "):
            inside = True
        elif inside and line.startswith("}"):
            return
        elif inside:
            yield line


def _bytes(dtype: str, sizes: str) -> int:
    elements = math.prod(int(size) for size in sizes.split(",") if size)
    bits = 8 if dtype == "pred" else int(match[0]) if (match := _BITS.search(dtype)) else 32
    return elements * bits // 8
