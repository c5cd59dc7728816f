"""What operators make of padding: those that keep rows apart, each with its rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from tpu_kernels.lowering.padding import (
    POINTWISE,
    Analysis,
    Axes,
    Padded,
    Refused,
    has_padding,
    rule,
)


def _tensor(node: Any) -> torch.Tensor | None:
    meta = node.meta.get("val") if isinstance(node, Node) else None
    return meta if isinstance(meta, torch.Tensor) else None


def _ndim(node: Any) -> int:
    meta = _tensor(node)
    return 0 if meta is None else meta.dim()


def _clean(node: Node, axes: Any, dims: Any) -> None:
    """Refuse padding along these dimensions."""
    ndim = len(axes or ())
    chosen = range(ndim) if dims is None or dims == [] else dims
    chosen = [chosen] if isinstance(chosen, int) else chosen
    if axes is not None and any(axes[d % ndim] is not None for d in chosen if ndim):
        raise Refused(f"{node.target} across a dynamic axis")


def _merged(node: Node, values: Sequence[tuple[Any, torch.Tensor]], out: torch.Tensor) -> Axes:
    """The axes of a result that operands are broadcast to."""
    found: list[Padded | None] = [None] * out.dim()
    for axes, meta in values:
        for back in range(1, meta.dim() + 1):
            axis = axes[-back] if axes is not None else None
            if axis is None:
                continue
            if found[-back] not in (None, axis):
                raise Refused(f"{node.target} of two axes that are padded differently")
            found[-back] = axis
    return tuple(found)


@rule(POINTWISE, "clone", "_to_copy", "alias", "detach", "lift_fresh_copy", "zeros_like",
      "ones_like", "full_like", "empty_like")  # fmt: skip
def _pointwise(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    tensors = [(n, _tensor(n)) for n in node.all_input_nodes]
    values = [(analysis.axes.get(n), meta) for n, meta in tensors if meta is not None]
    out = node.meta["val"]
    if isinstance(out, (list, tuple)):
        raise Refused(f"{node.target} along a dynamic axis")
    return _merged(node, values, out)


@rule("full", "zeros", "ones", "empty", "arange", "new_zeros", "new_ones", "new_full")
def _created(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    # Sizes come in lists, but the end of a range does not.
    numbers = [a for a in node.args if isinstance(a, Node) and analysis.is_number(a)]
    ends = {node.args[-1], node.args[0]} if "arange.default" in str(node.target) else set()
    if "arange.start" in str(node.target) and len(node.args) == 2:
        ends = {node.args[1]}
    if not set(numbers) <= ends:
        raise Refused(f"{node.target} with a dynamic size as a number")
    return analysis.fresh(node.meta["val"])


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")
def _regrouped(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    out = node.meta["val"]
    source = _tensor(node.args[0])
    found: list[Padded | None] = [None] * out.dim()
    for place, axis in enumerate(operands[0] or ()):
        if axis is None or source is None:
            continue
        results = set()
        for point in range(len(analysis.points)):
            shape, wanted = analysis.shape(source, point), analysis.shape(out, point)
            n = analysis.points[point][axis.symbol]
            before = math.prod(shape[:place]) * axis.outer
            after = axis.inner * math.prod(shape[place + 1 :])
            results.add(_place(wanted, before, n, after))
        if len(results) != 1 or None in results:
            raise Refused(f"{node.target} takes a dynamic axis apart")
        (result,) = results
        where, outer, inner = result  # type: ignore[misc]
        if found[where] is not None:
            raise Refused(f"{node.target} joins two dynamic axes")
        found[where] = Padded(axis.symbol, outer, inner)
    return tuple(found)


def _place(shape: Sequence[int], before: int, n: int, after: int) -> tuple[int, int, int] | None:
    """The axis of a shape that holds `n` rows, of which `before` lie outside and `after` inside."""
    for axis, size in enumerate(shape):
        outside, inside = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if not outside or not inside or before % outside or after % inside:
            continue
        outer, inner = before // outside, after // inside
        if size == outer * n * inner:
            return axis, outer, inner
    return None


@rule("permute", "transpose", "t", "numpy_T")
def _permuted(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    axes = operands[0] or (None,) * _ndim(node.args[0])
    order = list(range(len(axes)))
    if "permute" in str(node.target):
        order = [int(d) % len(axes) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    elif "transpose" in str(node.target):
        swapped: Any = node.args[1:3]
        a, b = (int(d) % len(axes) for d in swapped)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return tuple(axes[i] for i in order)


@rule("expand")
def _expanded(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    out = node.meta["val"]
    kept = _merged(node, [(operands[0], _tensor(node.args[0]))], out)  # type: ignore[list-item]
    grown = analysis.fresh(out) if not any(kept) else kept
    return tuple(k or g for k, g in zip(kept, grown, strict=True))


@rule("mm", "addmm", "bmm", "baddbmm", "dot", "mv")
def _product(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    *_, a, b = operands[: 2 if "add" not in str(node.target) else 3]
    left, right = node.args[-2:] if "add" not in str(node.target) else node.args[1:3]
    a, b = a or (None,) * _ndim(left), b or (None,) * _ndim(right)
    if len(a) < 2 or len(b) < 2 or a[-1] is not None or b[-2] is not None:
        raise Refused(f"{node.target} sums over a dynamic axis")
    out = node.meta["val"]
    product: Axes = (*a[:-2], a[-2], b[-1])
    batch = (*b[:-2], None, None)
    values = [(product, out), (batch, out)]
    if "add" in str(node.target):
        values.append((operands[0], _tensor(node.args[0])))
    return _merged(node, values, out)


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "sort", "topk")
def _along(analysis: Analysis, node: Node, operands: list[Any]) -> Any:
    place = 2 if "topk" in str(node.target) else 1
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1)
    _clean(node, operands[0], dim)
    many = isinstance(node.meta["val"], (list, tuple))
    return [operands[0]] * len(node.meta["val"]) if many else operands[0]


@rule("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "var", "std", "var_mean",
       "logsumexp", "prod", "linalg_vector_norm")  # fmt: skip
def _reduced(analysis: Analysis, node: Node, operands: list[Any]) -> Any:
    axes = operands[0] or ()
    place = 2 if "vector_norm" in str(node.target) else 1
    dims: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    _clean(node, axes, dims)
    chosen = {int(d) % len(axes) for d in ([dims] if isinstance(dims, int) else dims or ())}

    def result(meta: torch.Tensor) -> Axes:
        if meta.dim() == len(axes):
            return tuple(axes)
        return tuple(axis for i, axis in enumerate(axes) if i not in chosen)

    out = node.meta["val"]
    return [result(m) for m in out] if isinstance(out, (list, tuple)) else result(out)


@rule("native_layer_norm", "_fused_rms_norm")
def _normalised(analysis: Analysis, node: Node, operands: list[Any]) -> list[Any]:
    axes = operands[0] or ()
    width = len(node.args[1])  # type: ignore[arg-type]
    _clean(node, axes, list(range(len(axes) - width, len(axes))))
    if any(map(has_padding, operands[1:])):
        raise Refused(f"{node.target} with dynamic weights")
    return [axes] * len(node.meta["val"])


@rule("embedding")
def _embedded(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    _clean(node, operands[0], None)
    return (*(operands[1] or (None,) * _ndim(node.args[1])), None)


@rule("convolution")
def _convolved(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    axes = operands[0] or ()
    _clean(node, axes, list(range(1, len(axes))))
    if any(map(has_padding, operands[1:3])):
        raise Refused(f"{node.target} with dynamic weights")
    return tuple(axes)


@rule("cat")
def _joined(analysis: Analysis, node: Node, operands: list[Any]) -> Axes:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    parts = list(node.all_input_nodes)
    for part in parts:
        _clean(node, analysis.axes.get(part), dim)
    values = [(analysis.axes.get(p), _tensor(p)) for p in parts]
    return _merged(node, values, node.meta["val"])  # type: ignore[arg-type]


@rule("slice", "select", "split", "split_with_sizes", "unbind", "chunk")
def _taken(analysis: Analysis, node: Node, operands: list[Any]) -> Any:
    axes = operands[0] or ()
    name = str(node.target)
    place = 2 if "split" in name or "chunk" in name else 1
    dim: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    if "slice" not in name or not _everything(*node.args[2:]):
        _clean(node, axes, dim)
    kept = tuple(a for i, a in enumerate(axes) if i != dim % len(axes))
    result = kept if "select" in name or "unbind" in name else tuple(axes)
    out = node.meta["val"]
    return [result] * len(out) if isinstance(out, (list, tuple)) else result


def _everything(start: Any = None, end: Any = None, step: Any = 1) -> bool:
    """Whether a slice takes all there is: its end is the greatest number then."""
    return start in (None, 0) and step == 1 and (end is None or (type(end) is int and end > 2**62))


@rule("scaled_dot_product_attention", "_scaled_dot_product_fused_attention_overrideable",
      "_scaled_dot_product_flash_attention_for_cpu",
      "_scaled_dot_product_attention_math")  # fmt: skip
def _attended(analysis: Analysis, node: Node, operands: list[Any]) -> Any:
    q, k, v = (o or (None,) * 4 for o in operands[:3])
    if len(q) != 4 or k != v or k[2] is not None or q[:2] != k[:2] or any((q[3], k[3])):
        raise Refused(f"{node.target} attends to a dynamic axis")
    if any(isinstance(a, float) and a for a in node.args[3:5]) or node.kwargs.get("dropout_p"):
        raise Refused(f"{node.target} with dropout")
    if any(map(has_padding, operands[3:])):
        raise Refused(f"{node.target} with a dynamic mask")
    out = node.meta["val"]
    if isinstance(out, torch.Tensor):
        return q
    return [q if m is not None and m.dim() == 4 else q[:3] if m is not None and m.dim() == 3
            else (None,) * getattr(m, "ndim", 0) for m in out]  # fmt: skip
