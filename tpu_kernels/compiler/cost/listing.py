"""Parser of libtpu's ``final_bundles`` text: the generated code, one VLIW bundle after the other.

A bundle is a line such as::

    0x2c   : > { %1355 = dma.hbm_to_vmem [thread:$0]  (!%p1970_p9), /*hbm=*/%s153_s6, ... ;; %s1 =
    ... }

with instructions separated by ``;;``, each with a destination, an opcode, an optional predicate in
parentheses and operands; comments mark where a control-flow region starts and ends. Vector
instructions are kept as opcodes only: their values never decide how long a kernel takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_BUNDLE = re.compile(
    r"^[ \t]*(?:0x[0-9a-f]+|0)[ \t]+(?:[A-Z]{2}(?:[ \t]+[A-Z]{2})*)?[ \t]*:[ \t]*[> ]*\{",
    re.MULTILINE,
)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_INSTRUCTION = re.compile(r"%(\S+) = (\S+)\s*(.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((!?)%([^,\s)]+)(?:,\s*([^)\s]+))?\)\s*,?\s*")
_THREAD = re.compile(r"\[thread:[^\]]*\]\s*")
_CALLED = re.compile(r"%(\S+) = inlined_call [^{}]*?/\* %(\S+) = ")
_MEMORIES = re.compile(r"/\* (hbm|vmem|smem)-to-(hbm|vmem|smem)")
# Opcodes outside the vector units whose effect on control flow, memory or time is simulated.
_SCALAR = re.compile(r"[spd]|vsync|vdelay|inlined|int_to_ptr|compiler|reloc")


class FormatError(Exception):
    """The text is not a listing of bundles, or not of a form known."""


@dataclass(frozen=True)
class Predicate:
    """Condition under which an instruction takes effect.

    Attributes:
        name: Register that holds it.
        negated: Whether it must be false.
        otherwise: Operand that the destination takes where it fails, if the instruction names one.
    """

    name: str
    negated: bool
    otherwise: str | None = None


@dataclass(frozen=True)
class Instruction:
    """A scalar, memory or control instruction.

    Attributes:
        destination: SSA name without the percent sign, such as ``"s153_s6"``.
        opcode: Such as ``"dma.hbm_to_vmem"``.
        predicate: Its predicate, if any.
        operands: The rest, split at commas outside brackets.
        text: The rest as it stands, without comments and predicate; of a call the HLO's name.
        memories: Source and destination memory of a general DMA, known from its comment.
    """

    destination: str
    opcode: str
    predicate: Predicate | None
    operands: tuple[str, ...]
    text: str
    memories: tuple[str, str] | None = None


@dataclass(frozen=True)
class Bundle:
    """What the core issues in one cycle.

    Attributes:
        scalar: Instructions that are simulated.
        vector: Opcodes of all others; a register spill or fill ends in ``"#spill"``.
    """

    scalar: tuple[Instruction, ...]
    vector: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """The generated code of one HLO.

    Attributes:
        bundles: All bundles in order.
        regions: Index of the bundle at which each region starts.
        ends: Indices of the bundles with which a region ends.
    """

    bundles: tuple[Bundle, ...]
    regions: Mapping[int, int]
    ends: frozenset[int] = frozenset()


def parse(text: str) -> Listing:
    """Parse a ``final_bundles`` text.

    Args:
        text: The file's contents.

    Returns:
        The listing.

    Raises:
        FormatError: If it holds no bundle.

    Example:
        >>> text = "  0  :  { %s1_s0 = smov.u32 4 ;; %v2 = vadd.f32 %v0, %v1 } /* Start region 7 */"
        >>> listing = parse(text)
        >>> listing.bundles[0].scalar[0].operands, listing.bundles[0].vector, listing.regions
        (('4',), ('vadd.f32',), {7: 0})
    """
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise FormatError("no bundles found: not a final_bundles text of a known form")
    bundles: list[Bundle] = []
    regions: dict[int, int] = {}
    ends: set[int] = set()
    for position, match in enumerate(starts):
        end = starts[position + 1].start() if position + 1 < len(starts) else len(text)
        chunk = text[match.end() : end]
        for kind, number in _REGION.findall(chunk):
            if kind == "End":
                ends.add(position)
            else:
                regions.setdefault(int(number), position)
        bundles.append(_bundle(chunk))
    return Listing(tuple(bundles), regions, frozenset(ends))


def _bundle(chunk: str) -> Bundle:
    memories = _MEMORIES.search(chunk) if "dma.general" in chunk else None
    called = dict(_CALLED.findall(chunk)) if "inlined_call " in chunk else {}
    body = _COMMENT.sub("", chunk) if "/*" in chunk else chunk
    body = body[: body.rfind("}")]
    scalar: list[Instruction] = []
    vector: list[str] = []
    for part in body.split(" ;; "):
        found = _INSTRUCTION.match(part.strip())
        if found is None:
            continue
        destination, opcode, rest = found.groups()
        if opcode == "inlined_call":
            name = called.get(destination, "")
            scalar.append(Instruction(destination, opcode, None, (), name))
        elif _SCALAR.match(opcode):
            general = memories if opcode.startswith("dma.general") else None
            scalar.append(_instruction(destination, opcode, rest, general))
        else:
            spilled = opcode.startswith(("vst", "vld")) and "_spill" in rest
            vector.append(f"{opcode}#spill" if spilled else opcode)
    return Bundle(tuple(scalar), tuple(vector))


def _instruction(
    destination: str, opcode: str, rest: str, memories: re.Match[str] | None
) -> Instruction:
    rest = _THREAD.sub("", rest.strip(), count=1)
    predicate = None
    found = _PREDICATE.search(rest)
    # The predicate of a load or store follows its address; everywhere else it stands first.
    if found is not None and (found.start() == 0 or opcode.startswith(("sst", "sld"))):
        predicate = Predicate(found[2], bool(found[1]), found[3])
        rest = (rest[: found.start()] + ", " + rest[found.end() :]).lstrip(", ")
    return Instruction(
        destination,
        opcode,
        predicate,
        tuple(split_operands(rest)),
        rest,
        (memories[1], memories[2]) if memories else None,
    )


def split_operands(text: str) -> list[str]:
    """Split at commas that stand outside brackets, dropping empty parts.

    Args:
        text: Operands as written.

    Returns:
        The operands.

    Example:
        >>> split_operands("[smem:[#a + $0x1]], %s1, , 4")
        ['[smem:[#a + $0x1]]', '%s1', '4']
    """
    if "(" not in text and "[" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]
