"""Which unit an instruction occupies, and how a matrix instruction keeps an MXU busy."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

UNITS = (
    "mxu",  # matrix multiplications issued
    "mxu_push",  # weights pushed into an MXU
    "mxu_pop",  # results taken out of an MXU
    "xlu",  # cross-lane moves, rotations, transposes, cross-lane reductions
    "eup",  # transcendental functions
    "valu",  # other vector arithmetic
    "vld",  # vector loads
    "vst",  # vector stores
    "salu",  # scalar arithmetic
    "dma",  # copies started
    "spill",  # vector stores that spill a register
    "fill",  # vector loads that bring one back
)
"""Names under which instructions are counted; a spill counts as a store too."""

_MXU_NUMBER = re.compile(r"mxu(\d)")
_EIGHT_BITS = re.compile(r"\.[suf]8|\.[su]4|\.f4|\.f8")
_XLU = (
    "vxpose",
    "vrot",
    "vperm",
    "vxlane",
    "vbcast",
    "vlane",
    "vsetperm",
    "vset.pattern",
    "vbroadcast",
)
_EUP = (
    "vexp",
    "vrcp",
    "vrsqrt",
    "vlog",
    "vtanh",
    "vpow",
    "vsigm",
    "verf",
    "vsin",
    "vcos",
    "vpush.erf",
)
_PUSH = ("vmatpush", "vmatprep", "vdwg")
_NO_VECTOR_UNIT = ("vsync", "vpop", "vpush", "vdelay", "vnop", "vwait", "vtrace")
_NO_SCALAR_UNIT = ("sphi", "sbr", "shalt", "snop", "sdelay", "spop", "sfence")


@dataclass(frozen=True)
class MatrixUse:
    """Occupation of a matrix unit by one instruction.

    Attributes:
        mxu: Number of the unit.
        operands: Class of the operands: ``"bf16"``, ``"f32"`` or ``"8bit"``.
    """

    mxu: str
    operands: str


@functools.cache
def unit_of(opcode: str) -> str | None:
    """Return the unit that an opcode is counted under.

    Args:
        opcode: Such as ``"vadd.f32"``.

    Returns:
        One of `UNITS`, or None for what occupies none of them.

    Example:
        >>> unit_of("vmatmul.bf16.gmra.mxu0"), unit_of("vrot.lane.b32"), unit_of("sphi")
        ('mxu', 'xlu', None)
    """
    if opcode.startswith("vmatmul"):
        return "mxu"
    if opcode.startswith(_PUSH):
        return None if opcode.startswith("vmatprep.mubr") else "mxu_push"
    if opcode.startswith(("vpop.f32.mr", "vpop.s32.mr")) or ".mrf" in opcode or ".mrb" in opcode:
        return "mxu_pop"
    if opcode.startswith("vlaneseq"):
        return "valu"
    if (".xlane." in opcode and not opcode.startswith("vpop")) or opcode.startswith(_XLU):
        return "xlu"
    if opcode.startswith(_EUP):
        return "eup"
    if opcode.startswith("vld"):
        return "vld"
    if opcode.startswith("vst"):
        return "vst"
    if opcode.startswith("dma") and not opcode.startswith("dma.done"):
        return "dma"
    if opcode.startswith("v"):
        return None if opcode.startswith(_NO_VECTOR_UNIT) else "valu"
    if opcode.startswith(("s", "p")):
        return None if opcode.startswith(_NO_SCALAR_UNIT) else "salu"
    return None


@functools.cache
def matrix_use(opcode: str) -> MatrixUse:
    """Return which MXU a ``vmatmul`` occupies and with what class of operands.

    Args:
        opcode: A ``vmatmul`` opcode.

    Returns:
        The unit and the class.

    Example:
        >>> matrix_use("vmatmul.bf16.gmra.mxu3")
        MatrixUse(mxu='3', operands='bf16')
        >>> matrix_use("vmatmul.mubr.f32.gmra.mxu0").operands
        'f32'
    """
    number = _MXU_NUMBER.search(opcode)
    if _EIGHT_BITS.search(opcode):
        operands = "8bit"
    elif "bf16" in opcode:
        operands = "bf16"
    else:
        operands = "f32"
    return MatrixUse(number[1] if number else "0", operands)
