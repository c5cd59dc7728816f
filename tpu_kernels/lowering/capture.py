"""From a torch module or function to one graph of ATen operators, without computing anything.

The module runs once on fake tensors. Parameters and buffers become inputs of the graph, so that no
weight ends up as a constant in a program. With the backward, autograd runs inside the trace: the
graph returns the loss, and the gradient of every parameter that has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kernels import _compat_torch
from tpu_kernels.errors import TraceError


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph and what its inputs and outputs are.

    Attributes:
        graph: Functional but for writes to its inputs; every node knows its module.
        inputs: A fake tensor for each input: parameters, buffers, then the arguments' tensors.
        names: A name for each input.
        state: Names of the parameters and buffers among them.
        gradients: Names of the parameters whose gradients the graph returns after its outputs.
    """

    graph: GraphModule
    inputs: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    state: frozenset[str] = frozenset()
    gradients: tuple[str, ...] = ()


def capture(
    function: nn.Module | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    device: str = "cpu",
) -> Captured:
    """Trace a module or function of torch tensors.

    Args:
        function: A module, or a function of tensors.
        args: Its arguments; of tensors only shape, strides and dtype count.
        kwargs: Its keyword arguments.
        backward: Whether to trace the backward as well. The loss is the function's result, or the
            sum of all its floating results where that is not one number.
        device: The type of device that the tensors seem to be on.

    Returns:
        The graph.

    Raises:
        TraceError: torch cannot trace it, for example because it looks at values.

    Example:
        >>> graph = capture(nn.Linear(2, 3), (torch.ones(4, 2),)).graph
        >>> [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        ['aten.t.default', 'aten.addmm.default']
    """
    module = function if isinstance(function, nn.Module) else None
    state: dict[str, torch.Tensor] = {}
    if module is not None:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    flat, spec = tree_flatten((tuple(args), dict(kwargs or {})))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    mode = _compat_torch.fake_mode()
    with mode:
        fakes = [_fake(t, device) for t in [*state.values(), *(flat[i] for i in places)]]
    trained = [name for name, tensor in state.items() if tensor.requires_grad] if backward else []

    def run(*tensors: torch.Tensor) -> Any:
        weights = dict(zip(state, tensors, strict=False))
        for name in trained:
            weights[name] = weights[name].detach().requires_grad_()
        filled = list(flat)
        for place, tensor in zip(places, tensors[len(state) :], strict=True):
            filled[place] = tensor
        positional, named = tree_unflatten(filled, spec)
        with _scopes(module) as paths:
            if module is None:
                result = function(*positional, **named)
            else:
                result = torch.func.functional_call(module, weights, positional, named)
        outputs = [v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor)]
        if not backward:
            return outputs
        _name_backward(paths)
        wanted = [weights[name] for name in trained]
        grads = torch.autograd.grad(_loss(outputs), wanted, allow_unused=True)
        return [*outputs, *[g for g in grads if g is not None]]

    try:
        with (
            mode,
            torch.set_grad_enabled(backward),
            torch.autograd.set_multithreading_enabled(False),
            torch.fx.traceback.preserve_node_meta(),
        ):
            graph = _compat_torch.functional_graph(run, fakes, {}, keep_meta=True)
    except Exception as error:
        raise TraceError(
            f"torch cannot trace {getattr(function, '__name__', type(function).__name__)!r}: "
            f"{type(error).__name__}: {error}",
            hint="the function must not look at the values of tensors (`item`, `if tensor`)",
        ) from error
    names = [*state, *[f"input {i}" for i in range(len(places))]]
    return Captured(graph, tuple(fakes), tuple(names), frozenset(state), tuple(trained))


def _fake(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    floating = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise ValueError("no output depends on a parameter, so there is no backward")
    if len(floating) == 1 and floating[0].numel() == 1:
        return floating[0].reshape(())
    total = floating[0].sum()
    for tensor in floating[1:]:
        total = total + tensor.sum()
    return total


@contextlib.contextmanager
def _scopes(module: nn.Module | None) -> Iterator[dict[Any, str]]:
    """Let the nodes that a submodule makes know its path; yields the path of each autograd node."""
    paths: dict[Any, str] = {}
    if module is None:
        yield paths
        return
    meta = torch.fx.traceback.current_meta
    handles = []
    before = meta.get("nn_module_stack")
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any) -> None:
            # What came before is the outer module's own.
            if stack:
                _assign(paths, _functions(inputs), stack[-1])
            stack.append(path)
            meta["nn_module_stack"] = {path: (path, "")}

        return hook

    def leave(_module: nn.Module, _inputs: Any, result: Any) -> None:
        path = stack.pop()
        _assign(paths, _functions(result), path)
        if stack:
            meta["nn_module_stack"] = {stack[-1]: (stack[-1], "")}
        else:
            meta.pop("nn_module_stack", None)

    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(enter(path)))
        handles.append(child.register_forward_hook(leave, always_call=True))
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()
        meta.pop("nn_module_stack", None)
        if before is not None:
            meta["nn_module_stack"] = before


def _functions(value: Any) -> list[Any]:
    """The autograd nodes of the tensors in a value."""
    tensors = [v for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]
    return [t.grad_fn for t in tensors if t.grad_fn is not None]


def _assign(paths: dict[Any, str], functions: list[Any], path: str) -> None:
    """Give a path to the autograd nodes of a module: those that no inner or earlier one has."""
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if function in paths:
            continue
        paths[function] = path
        waiting.extend(following for following, _ in function.next_functions if following)


def _name_backward(paths: dict[Any, str]) -> None:
    """Let what an autograd node computes know the module whose forward made it."""
    meta = torch.fx.traceback.current_meta

    def name(path: str) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            meta["nn_module_stack"] = {path: (path, "")}

        return hook

    for function, path in paths.items():
        function.register_prehook(name(path))
