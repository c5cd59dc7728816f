"""From a score_mod or mask_mod, a Python function or a graph, to its `Program`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from tpu_kernels import _compat_torch
from tpu_kernels.errors import TraceError
from tpu_kernels.lowering import decompositions, rules
from tpu_kernels.ops.flex_program import INDICES, Program, Ref, Step

_REASON = 200  # characters of torch's own message
_known: weakref.WeakKeyDictionary[Any, dict[Any, Traced]] = weakref.WeakKeyDictionary()


class Traced:
    """A mod as text, and the tensors that it captures.

    Attributes:
        text: Text of its `Program`.
        tensors: Tensors that the mod's own closure holds; those that it was given come first in
            the program, and are not here.
    """

    def __init__(self, program: Program, tensors: Sequence[torch.Tensor]) -> None:
        self.text = program.text()
        self.tensors = tuple(tensors)


def trace(
    mod: Callable[..., Any], buffers: Sequence[Any], *, scored: bool, device: torch.device | str
) -> Traced:
    """Trace a mod once, at tensors without dimensions.

    Args:
        mod: ``(score, b, h, q_idx, kv_idx, *buffers)`` or the same without a score; a function, or
            a graph that torch made of one.
        buffers: Captured tensors and numbers that it takes as further arguments.
        scored: Whether it is a score_mod.
        device: Where the tensors are.

    Returns:
        The program; a closure's own tensors.

    Raises:
        TraceError: torch cannot trace it, or what it does has no form as a program.
    """
    signature = tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in buffers
    )
    key = (scored, torch.device(device).type, signature)
    try:
        found = _known.setdefault(mod, {}) if isinstance(mod, GraphModule) else {}
    except TypeError:
        found = {}
    if key not in found:
        found[key] = _trace(mod, buffers, scored, torch.device(device))
    return found[key]


def _trace(
    mod: Callable[..., Any], buffers: Sequence[Any], scored: bool, device: torch.device
) -> Traced:
    kind = "score_mod" if scored else "mask_mod"
    mode = _compat_torch.fake_mode()
    places = [n for n, x in enumerate(buffers) if isinstance(x, torch.Tensor)]
    with mode:
        examples = [torch.zeros((), device=device)] if scored else []
        examples += [torch.zeros((), dtype=torch.int32, device=device) for _ in INDICES]
        count = len(examples)
        for n in places:
            x = buffers[n]
            examples.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device))

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(buffers)
        for place, tensor in zip(places, tensors[count:], strict=True):
            filled[place] = tensor
        return mod(*tensors[:count], *filled)

    try:
        with mode, torch.no_grad(), _compat_torch.items_are_indices():
            graph = _compat_torch.functional_graph(of_tensors, examples, decompositions.table())
    except Exception as error:
        text = str(error).strip().partition("\n")[0][:_REASON]
        raise TraceError(
            f"the {kind} cannot be traced: {type(error).__name__}: {text}",
            hint="a mod is a function of numbers: no control flow on values, no writes",
        ) from error
    return _program(graph, kind, scored, count, len(places))


def _program(graph: GraphModule, kind: str, scored: bool, inputs: int, given: int) -> Traced:
    nodes = list(graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    constants = [n for n in nodes if n.op == "get_attr"]
    tensors: list[torch.Tensor] = []
    literals: dict[Node, Step] = {}
    for node in constants:
        tensor = getattr(graph, str(node.target))
        if _is_literal(tensor):
            literals[node] = _literal(tensor)
        else:
            tensors.append(tensor)
    captured = [n for n in constants if n not in literals]
    numbers: dict[Node, int] = {n: i for i, n in enumerate([*placeholders, *captured])}
    ranks = [_meta(n).dim() for n in placeholders[inputs:]] + [t.dim() for t in tensors]
    first = len(numbers)
    steps: list[Step] = []
    for node, step in literals.items():
        numbers[node] = first + len(steps)
        steps.append(step)
    for node in nodes:
        if node.op == "call_function":
            numbers[node] = first + len(steps)
            steps.append(_step(node, numbers, kind))
    (result,) = torch.utils._pytree.tree_leaves(nodes[-1].args[0])[:1] or (None,)
    if not isinstance(result, Node):
        raise TraceError(f"the {kind} returns {result!r}, not a tensor")
    meta = _meta(result)
    if meta.dim() or (not scored and meta.dtype is not torch.bool):
        raise TraceError(
            f"the {kind} returns a tensor of {meta.dtype} with {meta.dim()} dimensions",
            hint="return a " + ("number" if scored else "bool") + " for one pair",
        )
    for node in (*placeholders, *captured):
        _check_dtype(_meta(node) if node in placeholders else getattr(graph, node.target), kind)
    program = Program(scored, tuple(ranks), tuple(steps), numbers[result])
    return Traced(_without_dead_steps(program), tensors)


def _step(node: Node, numbers: dict[Node, int], kind: str) -> Step:
    op: Any = node.target
    if not isinstance(op, OpOverload):
        raise TraceError(f"the {kind} calls {op}, which is no operator of numbers")
    if rules.find(op) is None:
        raise TraceError(f"the {kind} calls {op}, which has no JAX form")
    meta = node.meta.get("val")
    if not isinstance(meta, torch.Tensor):
        raise TraceError(f"the {kind} calls {op}, which does not return one tensor")
    _check_dtype(meta, kind)

    def of(value: Any) -> Any:
        if isinstance(value, Node):
            return Ref(numbers[value])
        if isinstance(value, (list, tuple)):
            return [of(each) for each in value]
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            return value
        raise TraceError(f"the {kind} calls {op} with {value!r}")

    kwargs = {
        name: of(value)
        for name, value in node.kwargs.items()
        if name not in ("device", "layout", "memory_format", "pin_memory")
    }
    return Step(op, tuple(of(a) for a in node.args), kwargs, meta.dim())


def _meta(node: Node) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def _check_dtype(tensor: torch.Tensor, kind: str) -> None:
    if tensor.dtype is torch.float64 or tensor.is_complex():
        raise TraceError(f"the {kind} computes with {tensor.dtype}")


def _is_literal(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the graph is a number that the mod's own code wrote down."""
    return tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad


def _literal(tensor: torch.Tensor) -> Step:
    op = torch.ops.aten.full.default
    return Step(op, ([], tensor.item()), {"dtype": tensor.dtype}, 0)


def _without_dead_steps(program: Program) -> Program:
    """The program without steps that nobody reads, and without copies of copies."""
    alive: set[int] = set()

    def visit(number: int) -> None:
        if number in alive:
            return
        alive.add(number)
        step = program.step_of(number)
        for operand in step.operands if step is not None else ():
            visit(operand)

    visit(program.result)
    every = range(program.first_step, program.first_step + len(program.steps))
    kept = [n for n in every if n in alive]
    place = {n: n for n in range(program.first_step)}
    place.update({n: program.first_step + i for i, n in enumerate(kept)})

    def moved(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(place[value.number])
        if isinstance(value, (list, tuple)):
            return type(value)(moved(each) for each in value)
        return value

    steps = []
    for n in kept:
        step = program.steps[n - program.first_step]
        kwargs = {name: moved(each) for name, each in step.kwargs.items()}
        steps.append(Step(step.op, moved(step.args), kwargs, step.rank))
    return Program(program.scored, program.ranks, tuple(steps), place[program.result])
