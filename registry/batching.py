"""Batching (`torch.vmap`) of an operator by `jax.vmap` of its program: one launch for the whole
batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tpu_kernels import _compat_torch
from tpu_kernels.dsl import dtypes
from tpu_kernels.dsl.spec import Parameter, ReturnKind
from tpu_kernels.errors import KernelError
from tpu_kernels.registry import policies
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import fill
from tpu_kernels.registry.operator import Body, Call, Operator
from tpu_kernels.registry.programs import flat_outputs


class Batching:
    """The batching rule of an operator.

    Args:
        operator: What is batched.
        enabled: False leaves the operator to torch's slow loop over the batch.
    """

    def __init__(self, operator: Operator, *, enabled: bool = True) -> None:
        self.operator = operator
        self._children: dict[Any, tuple[Operator, Any, Batching]] = {}
        self._lock = threading.RLock()
        if enabled:
            self.use(self._rule)

    def use(self, rule: Callable[..., Any]) -> None:
        """Register a batching rule ``rule(info, in_dims, *arguments)``, arguments in schema
        order."""
        operator = self.operator
        kernel = _compat_torch.batching_kernel(operator.arguments, operator.call, rule)
        with operator.replacing():
            operator.library.impl(operator.opname, kernel, "FuncTorchBatched", with_keyset=True)

    def inherit_autocast(self) -> None:
        """Give the batched operators the operator's autocast policies: torch comes to autocast only
        after it has batched."""
        with self._lock:
            for operator, _, batching in self._children.values():
                for device_type, policy in self.operator.autocast.items():
                    policies.register_autocast(operator, device_type, policy)
                batching.inherit_autocast()

    def destroy(self) -> None:
        """Destroy the batched operators."""
        with self._lock:
            for operator, autograd, batching in self._children.values():
                batching.destroy()
                autograd.destroy()
                operator.destroy()
            self._children.clear()

    def _rule(self, info: Any, in_dims: Sequence[Any], *given: Any) -> Any:
        definition = self.operator.definition
        if definition.mutated:
            raise KernelError(
                f"kernel {definition.kernel!r} writes to its arguments and cannot be vmapped",
                where=definition.where,
            )
        arguments, in_dims = _unpackable(definition.parameters, given, in_dims)
        flat_dims: list[int | None] = []
        for p, argument, dim in zip(definition.parameters, arguments, in_dims, strict=True):
            if not p.kind.is_tensor or argument is None:
                continue
            if isinstance(argument, (list, tuple)):
                each = dim if isinstance(dim, (list, tuple)) else [dim] * len(argument)
                flat_dims.extend(d for a, d in zip(argument, each, strict=True) if a is not None)
            else:
                flat_dims.append(dim)
        child = self._child(
            tuple(flat_dims), info.batch_size if all(d is None for d in flat_dims) else None
        )
        result = child.op(*arguments)
        out_dims = [
            [0] * len(r) if isinstance(r, (list, tuple)) else None if r is None else 0
            for r in _slots(result, definition.returns)
        ]
        return result, out_dims[0] if len(out_dims) == 1 else tuple(out_dims)

    def _child(self, dims: tuple[int | None, ...], axis_size: int | None) -> Operator:
        key = (dims, axis_size)
        with self._lock:
            if key not in self._children:
                self._children[key] = self._make(dims, axis_size)
                self.inherit_autocast()
            return self._children[key][0]

    def _make(
        self, dims: tuple[int | None, ...], axis_size: int | None
    ) -> tuple[Operator, Any, Batching]:
        from tpu_kernels.registry.autograd import Autograd
        from tpu_kernels.registry.derivatives import derived_operator

        base = self.operator.definition

        def program(call: Call, engine: Engine) -> Body:
            return _batched_body(self.operator, call, engine, dims, axis_size)

        name = f"{base.name}__vmap{len(self._children)}"
        operator = derived_operator(self.operator, name, (), base.returns, program)
        return operator, Autograd(operator, "jax"), Batching(operator)


def _unpackable(
    parameters: Sequence[Parameter], arguments: Sequence[Any], in_dims: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The arguments with no batch in the dimension along which values are packed."""

    def move(tensor: Any, dim: int | None) -> tuple[Any, int | None]:
        if tensor is None or dim != tensor.ndim - 1 or tensor.dtype not in dtypes.PACKED:
            return tensor, dim
        return tensor.movedim(dim, 0), 0

    moved, dims = [], []
    for p, argument, dim in zip(parameters, arguments, in_dims, strict=True):
        if not p.kind.is_tensor or argument is None:
            moved.append(argument)
            dims.append(dim)
        elif isinstance(argument, (list, tuple)):
            each = dim if isinstance(dim, (list, tuple)) else [dim] * len(argument)
            pairs = [move(a, d) for a, d in zip(argument, each, strict=True)]
            moved.append([a for a, _ in pairs])
            dims.append([d for _, d in pairs])
        else:
            argument, dim = move(argument, dim)
            moved.append(argument)
            dims.append(dim)
    return moved, dims


def _batched_body(
    operator: Operator,
    call: Call,
    engine: Engine,
    dims: Sequence[int | None],
    axis_size: int | None,
) -> Body:
    import jax

    base = operator.definition
    avals = tuple(
        jax.ShapeDtypeStruct(tuple(s for i, s in enumerate(a.shape) if i != d), a.dtype)
        if d is not None
        else a
        for a, d in zip(call.avals, dims, strict=True)
    )
    run = base.program(Call(call.layout, avals), engine)

    def body(tensors: Sequence[Any], dynamics: Sequence[Any]) -> list[Any]:
        flat = flat_outputs([list(t) if isinstance(t, tuple) else t for t in tensors])
        flat = [x for x in flat if x is not None]

        def one(*items: Any) -> list[Any]:
            return run(fill(call.layout, items), dynamics)

        return jax.vmap(one, in_axes=tuple(dims), axis_size=axis_size)(*flat)

    return body


def _slots(result: Any, returns: Sequence[ReturnKind]) -> list[Any]:
    return [] if not returns else [result] if len(returns) == 1 else list(result)
