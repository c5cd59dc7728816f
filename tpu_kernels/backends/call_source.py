"""Source text of the functions that the executor generates: keys, conversions, results."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_kernels.dsl.spec import Kind, Parameter, ReturnKind


def key_parts(p: Parameter) -> list[str]:
    """Source texts of a parameter's part of a program's key.

    They use the names ``_shape_<name>`` and ``_dtype_<name>`` of plain tensors, ``_tuple`` and
    ``_freeze``.
    """
    name = p.name
    if p.kind is Kind.TENSOR:
        return [f"_shape_{name}", f"_dtype_{name}"]
    if p.kind is Kind.OPTIONAL:
        return [f"None if {name} is None else ({name}.shape, {name}.dtype)"]
    if p.kind is Kind.LIST:
        return [f"_tuple([(_t.shape, _t.dtype) for _t in {name}])"]
    if p.kind.is_list:
        items = f"_tuple([None if _t is None else (_t.shape, _t.dtype) for _t in {name}])"
        return [f"None if {name} is None else {items}"]
    if p.kind is Kind.DYNAMIC:
        return []
    return [name] if p.schema_type in ("str", "int", "ScalarType") else [f"_freeze({name})"]


def mode_lines(parameters: Sequence[Parameter]) -> list[str]:
    """Source lines that let a device's eager mode take a call."""
    positional = "".join(f"{p.name}, " for p in parameters if not p.keyword_only)
    keywords = ", ".join(f"{p.name!r}: {p.name}" for p in parameters if p.keyword_only)
    return [
        "    if _FLAGS.special:",
        f"        _done = _intercept(_operator, _self, ({positional}), {{{keywords}}})",
        "        if _done is not _GO:",
        "            return _done",
        "    if _ACTIVE:",
        "        _settle()",
    ]


def import_lines(name: str) -> list[str]:
    """`Bridge.to_jax` of a plain tensor, written out: a call would cost as much as its content."""
    return [
        f"        _hit = _remembered(_id({name}))",
        f"        if (_hit is not None and _hit[1]() is {name} and _hit[2] == {name}.data_ptr()"
        f" and _hit[3] == _shape_{name} and _hit[4] is _dtype_{name} and {name}.is_contiguous()):",
        f"            _array_{name} = _hit[0]",
        "        else:",
        f"            _array_{name} = _import({name})",
    ]


def array_expression(p: Parameter) -> str:
    """Source text of a tensor argument as the program takes it."""
    name = p.name
    if p.kind is Kind.TENSOR:
        return f"_array_{name}"
    if p.kind is Kind.OPTIONAL:
        return f"None if {name} is None else _J({name})"
    if p.kind is Kind.LIST:
        return f"_tuple([_J(_t) for _t in {name}])"
    return f"None if {name} is None else _tuple([None if _t is None else _J(_t) for _t in {name}])"


def return_lines(
    returns: Sequence[ReturnKind],
    mutated: Sequence[str],
    parameters: Sequence[Parameter],
    call: str,
) -> list[str]:
    """Source lines that call the program, write mutated arguments back, and return the results."""
    if len(returns) == 1 and not mutated:
        if returns[0] is ReturnKind.TENSOR:
            return [f"        return _T({call})"]
        lines = [f"        _r = {call}"]
        return [*lines, f"        return {_torch_expression(returns[0], '_r')}"]
    lines = [f"        _r = {call}"]
    kinds = {p.name: p.kind for p in parameters}
    for i, name in enumerate(mutated, start=len(returns)):
        if kinds[name].is_list:
            lines.append(f"        for _o, _n in zip({name}, _r[{i}]): _o.copy_(_T(_n))")
        else:
            given = f"if {name} is not None: " if kinds[name] is Kind.OPTIONAL else ""
            lines.append(f"        {given}{name}.copy_(_T(_r[{i}]))")
    results = [_torch_expression(kind, f"_r[{i}]") for i, kind in enumerate(returns)]
    if len(results) > 1:
        lines.append(f"        return ({', '.join(results)})")
    elif results:
        lines.append(f"        return {results[0]}")
    else:
        lines.append("        return None")
    return lines


def _torch_expression(kind: ReturnKind, value: str) -> str:
    if kind is ReturnKind.TENSOR:
        return f"_T({value})"
    if kind is ReturnKind.OPTIONAL:
        return f"None if {value} is None else _T({value})"
    return f"[_T(_v) for _v in {value}]"
