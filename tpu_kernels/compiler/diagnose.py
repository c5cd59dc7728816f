"""Plain words for what the compiler says.

The catalogue ``diagnoses.json`` lists the well-known messages of Pallas, Mosaic and XLA:TPU: a
regular expression, the status, an explanation and a hint. Words in braces are filled from the
expression's groups and the target; the first entry that matches counts, so special entries stand
before general ones.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.report import mib

_SUBLANES, _LANES = 8, 128
_MIB = 1 << 20
_RESERVED = 64 << 10  # the compiler never gives away the last of VMEM ("of 127.94M" on a v6e)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ERROR_LINE_LIMIT = 300
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f4E2M1FN": "float4_e2m1fn",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E4M3B11FNUZ": "float8_e4m3b11fnuz",
    "f8E5M2": "float8_e5m2",
    "f8E8M0FNU": "float8_e8m0fnu",
}
_WINDOW = re.compile(
    r"Size: (?P<size>[\d.]+[KMG]?)\n(?:(?!Size:)[\s\S])*?"
    r"Tag: (?P<role>input|output) window allocation for operator (?:input|output) (?P<index>\d+)\. "
    r"The window shape is (?P<window>\S+), while[^\n]*?"
    r"(?P<buffers>\d+ buffering levels|single buffered)"
)


@dataclass(frozen=True)
class Entry:
    """One entry of the catalogue."""

    name: str
    pattern: re.Pattern[str]
    status: str
    message: str
    hint: str | None


@dataclass(frozen=True)
class Diagnosis:
    """What a message of the compiler means.

    Attributes:
        name: Name of the catalogue's entry, ``"unknown"`` where none matches.
        status: Status for the report.
        error: Plain words.
        hint: What to do, if the catalogue knows.
        used_bytes: Memory needed, where the message is about memory.
        limit_bytes: Memory allowed, where the message is about memory.
    """

    name: str
    status: str
    error: str
    hint: str | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None


def _text() -> str:
    return resources.files(__package__).joinpath("diagnoses.json").read_text(encoding="utf-8")


@functools.cache
def catalogue_digest() -> str:
    """Return a hash of the catalogue: stored diagnoses are out of date when it changes."""
    return hashlib.blake2b(_text().encode(), digest_size=8).hexdigest()


@functools.cache
def catalogue() -> tuple[Entry, ...]:
    """Return the catalogue, in the order in which its entries are tried."""
    text = _text()
    return tuple(
        Entry(row["name"], re.compile(row["pattern"]), row["status"], row["message"], row["hint"])
        for row in json.loads(text)
    )


def diagnose(message: str, target: Target, *, error_type: str = "") -> Diagnosis:
    """Explain a message.

    Args:
        message: Text of the exception.
        target: What was compiled for.
        error_type: Name of the exception's class.

    Returns:
        The diagnosis. A message that no entry matches is an ``"error"`` in its own first line's
        words.

    Example:
        >>> from tpu_kernels.compiler.chips import resolve
        >>> diagnose("Cannot store scalars to VMEM", resolve("v6e")).status
        'invalid'
    """
    for entry in catalogue():
        match = entry.pattern.search(message)
        if match is None:
            continue
        words = _words(match, target)
        error = entry.message.format_map(words)
        memory = entry.status == "vmem" or entry.name in ("smem-allocation", "hbm")
        if entry.status == "vmem":
            error = "\n  ".join([error, *_windows(message)])
        return Diagnosis(
            entry.name,
            entry.status,
            error,
            entry.hint.format_map(words) if entry.hint else None,
            used_bytes=_bytes(match["used"]) if memory else None,
            limit_bytes=_bytes(match["limit"]) if memory else None,
        )
    first = message.strip().partition("\n")[0][:_ERROR_LINE_LIMIT]
    return Diagnosis("unknown", "error", f"{error_type}: {first}" if error_type else first)


def _words(match: re.Match[str], target: Target) -> Mapping[str, str]:
    words = {name: value or "" for name, value in match.groupdict().items()}
    for name in ("dtype", "other"):
        if name in words:
            words[name] = dtype_name(words[name])
    for name in ("used", "limit"):
        if words.get(name, "").isdigit():
            words[name] = mib(int(words[name]))
    if "block" in words:
        words["block"] = re.sub(r"Blocked\(block_size=(\d+)\)", r"\1", words["block"])
    if "operand" in words:
        words["operand"] = operand_name(words["operand"])
    if "block" in words and "array" in words:
        words["legal"] = str(legal_block(_shape(words["block"]), _shape(words["array"])))
    words["raise"] = _raised(match, target) if "used" in words else ""
    return {**words, "target": target.name, "vmem": mib(target.chip.vmem_bytes)}


def _raised(match: re.Match[str], target: Target) -> str:
    """Whether a higher limit helps, and which."""
    used, chip = _bytes(match["used"]), target.chip
    if used > chip.vmem_bytes - _RESERVED:
        return f"no limit setting can help, {target.name} has {mib(chip.vmem_bytes)} in all"
    if "Scoped" not in match[0]:  # one allocation of several: the sum is not known
        return f"or raise vmem_limit_bytes, {target.name} has {mib(chip.vmem_bytes)} in all"
    limit = min(chip.vmem_bytes - _RESERVED, (used * 5 // 4 + _MIB) // _MIB * _MIB)
    return (
        "or raise the limit in the kernel: "
        f"compiler_params=pltpu.CompilerParams(vmem_limit_bytes={limit}); "
        f"{target.name} has {mib(chip.vmem_bytes)} in all"
    )


def operand_name(name: str) -> str:
    """Write Pallas's own terms for a kernel's inputs and outputs in words.

    Args:
        name: Such as ``"args[0]"``.

    Returns:
        The words; the name itself where it is none of those terms.

    Example:
        >>> operand_name("args[0]"), operand_name("outputs")
        ('input 0 of pallas_call', 'the output of pallas_call')
    """
    match = re.fullmatch(r"(args|outputs|out)(?:\[(\d+)\])?", name)
    if match is None:
        return name
    role = "input" if match[1] == "args" else "output"
    return f"{role} {match[2]} of pallas_call" if match[2] else f"the {role} of pallas_call"


def dtype_name(mlir: str) -> str:
    """Turn an MLIR element type into the dtype's usual name.

    Args:
        mlir: Such as ``"i8"``.

    Returns:
        Such as ``"int8"``; the argument itself where it is no known type.

    Example:
        >>> dtype_name("i8"), dtype_name("f8E4M3FN")
        ('int8', 'float8_e4m3fn')
    """
    match = re.fullmatch(r"(u?)i(\d+)", mlir)
    if match:
        return f"{match[1]}int{match[2]}"
    return _DTYPES.get(mlir, mlir)


def _shape(text: str) -> tuple[int, ...] | None:
    try:
        shape = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
        return shape
    return None


def legal_block(
    block: tuple[int, ...] | None, array: tuple[int, ...] | None
) -> tuple[int, ...] | str:
    """Round a block up to the nearest one that a TPU can tile.

    Args:
        block: Block shape, None where it is not known.
        array: Shape of the whole array.

    Returns:
        The legal block shape: the last two dimensions are multiples of (8, 128) or the array's own.

    Example:
        >>> legal_block((4, 64), (64, 256))
        (8, 128)
        >>> legal_block((1, 100), (13, 100))
        (8, 100)
    """
    if block is None or array is None or len(block) != len(array) or len(block) < 2:
        return "one whose last two dimensions are multiples of 8 and 128, or the array's own"
    legal = list(block)
    for axis, unit in ((-2, _SUBLANES), (-1, _LANES)):
        if block[axis] != array[axis]:
            legal[axis] = min(-(-block[axis] // unit) * unit, max(array[axis], 1))
    return tuple(legal)


def _windows(message: str) -> list[str]:
    """The compiler's list of what fills VMEM, one line for each operand."""
    return [
        f"{found['role']} {found['index']}: block {found['window']}, "
        f"{found['buffers'].replace('buffering levels', 'buffers')}, {found['size']}iB"
        for found in _WINDOW.finditer(message)
    ]


def _bytes(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return round(float(text.removesuffix(unit)) * _UNITS[unit])
