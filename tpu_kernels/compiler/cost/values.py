"""Arithmetic of the scalar core: 32-bit integers, and one value for what is not known.

The simulation knows neither what a kernel computes nor what lies in its arrays. Whatever depends on
that is `UNKNOWN` and makes whatever is computed from it unknown too, unless the result is the same
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MASK = 0xFFFFFFFF
_SIGN = 0x80000000


class _Unknown:
    """A value that the simulation cannot know."""

    __slots__ = ()

    def _absorb(self, *_: Any) -> _Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _absorb
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _absorb

    def __bool__(self) -> bool:
        raise TypeError("an unknown value decides a branch of the simulator itself")

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
Value = Any  # int or UNKNOWN; a precise type would cost a check at each of millions of operations


def s32(x: Value) -> Value:
    """Wrap to a signed 32-bit integer."""
    return x if x is UNKNOWN else ((x + _SIGN) & _MASK) - _SIGN


def _known(operation: Callable[[int, int], int]) -> Callable[[Value, Value], Value]:
    def apply(a: Value, b: Value) -> Value:
        return UNKNOWN if a is UNKNOWN or b is UNKNOWN else operation(a, b)

    return apply


def _and(a: Value, b: Value) -> Value:
    if a is UNKNOWN or b is UNKNOWN:
        return 0 if (a is not UNKNOWN and a == 0) or (b is not UNKNOWN and b == 0) else UNKNOWN
    return a & b


def _or(a: Value, b: Value) -> Value:
    if a is UNKNOWN or b is UNKNOWN:
        return 1 if (a is not UNKNOWN and a == 1) or (b is not UNKNOWN and b == 1) else UNKNOWN
    return a | b


def _not(x: Value) -> Value:
    return x if x is UNKNOWN else 1 - x


def select(predicate: Value, on_true: Value, on_false: Value) -> Value:
    """The chosen value; known also where both are the same."""
    if predicate is UNKNOWN:
        return on_true if on_true is on_false else UNKNOWN
    return on_true if predicate else on_false


def _unsigned(x: int) -> int:
    return x & _MASK


NAMESPACE: Mapping[str, Any] = {
    "U": UNKNOWN,
    "s32": s32,
    "NOT": _not,
    "SEL": select,
    "AND": _and,
    "OR": _or,
    "MULHI": _known(lambda a, b: s32((_unsigned(a) * _unsigned(b)) >> 32)),
    "SHL": _known(lambda a, b: s32(a << (b & 31))),
    "SHRL": _known(lambda a, b: s32(_unsigned(a) >> (b & 31))),
    "SHRA": _known(lambda a, b: a >> (b & 31)),
    "DIV": lambda a, b: (
        UNKNOWN if a is UNKNOWN or not _nonzero(b) else _unsigned(a) // _unsigned(b)
    ),
    "REM": lambda a, b: UNKNOWN if a is UNKNOWN or not _nonzero(b) else _unsigned(a) % _unsigned(b),
    "MIN": _known(min),
    "MAX": _known(max),
    "LT": _known(lambda a, b: int(a < b)),
    "LE": _known(lambda a, b: int(a <= b)),
    "EQ": _known(lambda a, b: int(a == b)),
    "LTU": _known(lambda a, b: int(_unsigned(a) < _unsigned(b))),
    "LEU": _known(lambda a, b: int(_unsigned(a) <= _unsigned(b))),
}
"""What generated code may call, by name."""

_SIGNED = {
    "lt": "LT({0},{1})",
    "le": "LE({0},{1})",
    "gt": "LT({1},{0})",
    "ge": "LE({1},{0})",
    "eq": "EQ({0},{1})",
    "ne": "NOT(EQ({0},{1}))",
}
_UNSIGNED = {
    **{name: text.replace("LT", "LTU").replace("LE", "LEU") for name, text in _SIGNED.items()},
    "eq": _SIGNED["eq"],
    "ne": _SIGNED["ne"],
}
_OPERATIONS = {
    "sadd": "s32({0}+{1})",
    "ssub": "s32({0}-{1})",
    "smul": "s32({0}*{1})",
    "smulhi.u32": "MULHI({0},{1})",  # how a buffer's number modulo three is computed
    "sand": "s32({0}&{1})",
    "sor": "s32({0}|{1})",
    "sxor": "s32({0}^{1})",
    "sshll": "SHL({0},{1})",
    "sshrl": "SHRL({0},{1})",
    "sshra": "SHRA({0},{1})",
    "smov": "{0}",
    "pmov": "{0}",
    "scalar_mov": "{0}",
    "compiler_barrier": "{0}",
    "int_to_ptr": "{0}",
    "scalar_lea": "s32({0}+{1})",
    "scalar_select": "SEL({0},{1},{2})",
    "smin": "MIN({0},{1})",
    "smax": "MAX({0},{1})",
    "pand": "AND({0},{1})",
    "por": "OR({0},{1})",
    "pnand": "NOT(AND({0},{1}))",
    "pnor": "NOT(OR({0},{1}))",
    "pxor": "s32({0}^{1})",
    "pneg": "NOT({0})",
    "sdivrem": "DIV({0},{1})",
    "sdiv": "DIV({0},{1})",
    "srem": "REM({0},{1})",
}
# Known opcodes whose values never matter in kernels seen so far; they need no warning.
_OPAQUE = ("sclz", "spop", "sc", "scvt", "reloc", "sshllo")


def _nonzero(x: Value) -> bool:
    return x is not UNKNOWN and x != 0


def expression(opcode: str, operands: list[str]) -> str | None:
    """Translate a scalar instruction to a Python expression.

    Args:
        opcode: Such as ``"scmp.lt.s32.totalorder"``.
        operands: Python expressions of its operands.

    Returns:
        The expression, in the names of `NAMESPACE`; None if the opcode is not known.

    Example:
        >>> expression("sadd.s32", ["E[0]", "1"])
        's32(E[0]+1)'
        >>> expression("sadd.f32", ["E[0]", "E[1]"])
        'U'
    """
    name, _, rest = opcode.partition(".")
    if name == "scmp":
        relation, _, kind = rest.partition(".")
        if kind.startswith("f"):
            return "U"
        template = (_UNSIGNED if kind.startswith("u") else _SIGNED).get(relation)
    elif name in _OPAQUE or rest.startswith("f32"):
        return "U"
    else:
        template = _OPERATIONS.get(opcode) or _OPERATIONS.get(name)
    if template is None:
        return None
    try:
        return template.format(*operands)
    except IndexError:
        return "U"
