"""Kernels on DTensors: each device runs the kernel on its part, as the sharding rule allows.

A call on DTensors becomes: redistribute the arguments, run the operator on the local tensors, wrap
the local results. With gradients the three steps are differentiated one by one, so that the local
operator's own backward is used (residuals, hand-written backwards and all) and no derivative needs
a rule of its own. Arguments may be keywords, lists and absent, which torch's rules do not cover.

Where nothing else is said every device computes everything: correct for any kernel, and noted once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tpu_kernels import _compat_torch
from tpu_kernels.errors import ArgumentError, KernelError
from tpu_kernels.integrations.placement import (
    Placements,
    Plan,
    Tensor,
    local_shape,
    make_plan,
    row_major_strides,
    spot_of,
)
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import Layout, flat_names, join, split
from tpu_kernels.registry.operator import results_of
from tpu_kernels.registry.sharding import Choice, FunctionRule

_log = logging.getLogger(__name__)
_REMEMBERED = 4096  # plans per kernel; a bound for programs whose shapes never repeat


class DistributedKernel:
    """How one kernel runs on DTensors.

    Args:
        kernel: The kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._plans: dict[Any, tuple[Plan, list[Any]]] = {}
        self._noted = False

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], *, differentiate: bool) -> Any:
        """Run a call of the kernel's operator that has a DTensor among its arguments.

        Args:
            args: Positional arguments of the operator.
            kwargs: Keyword arguments of the operator.
            differentiate: Whether autograd is to record the steps.

        Returns:
            What the operator returns, as DTensors.

        Raises:
            ArgumentError: The rule does not fit the arguments, or they cannot be used together.
        """
        operator = self.kernel.operator
        definition = operator.definition
        arguments = operator.arguments(args, kwargs)
        layout, flat, dynamics = split(definition.parameters, arguments)
        names = flat_names(definition.parameters, layout)
        mesh = self._mesh(names, flat)
        tensors = [self._as_dtensor(n, t, mesh) for n, t in zip(names, flat, strict=True)]
        written = [name.split("[")[0] in definition.mutated for name in names]
        plan, slots = self._plan(layout, names, tensors, written, dynamics, mesh, differentiate)
        parts = [
            _local(t, plan.inputs[i], plan.gradients[i], written[i]) for i, t in enumerate(tensors)
        ]
        if mesh.get_coordinate() is None:  # this process is not part of the mesh
            results = [_map(lambda meta: torch.empty(0, dtype=meta.dtype), s) for s in slots]
        else:
            local_arguments = join(definition.parameters, layout, parts, dynamics)
            positional, keywords = _call_arguments(self.kernel, local_arguments)
            result = operator.op(*positional, **keywords)
            count = len(definition.returns)
            results = [] if count == 0 else [result] if count == 1 else list(result)
        if differentiate:  # below autograd torch does it
            for tensor, is_written in zip(tensors, written, strict=True):
                if is_written and not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        placements = iter(plan.outputs)
        return results_of(
            [
                self._wrap_slot(result, meta, placements, mesh)
                for result, meta in zip(results, slots, strict=True)
            ]
        )

    def _mesh(self, names: Sequence[str], tensors: Sequence[Any]) -> DeviceMesh:
        first: tuple[str, DeviceMesh] | None = None
        for name, tensor in zip(names, tensors, strict=True):
            if not isinstance(tensor, DTensor):
                continue
            if first is None:
                first = name, tensor.device_mesh
            elif tensor.device_mesh != first[1]:
                raise ArgumentError(
                    f"kernel {self.kernel.name!r}: {first[0]!r} and {name!r} are on two meshes",
                    where=str(self.kernel.spec.source),
                    hint=f"they are {first[1]} and {tensor.device_mesh}",
                )
        if first is None:
            raise KernelError(f"kernel {self.kernel.name!r}: called for DTensors without any")
        return first[1]

    def _as_dtensor(self, name: str, tensor: Any, mesh: DeviceMesh) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        # A number in a tensor is the same everywhere, as for torch's own operators.
        if tensor.ndim and not _compat_torch.implicit_replication_allowed():
            raise ArgumentError(
                f"kernel {self.kernel.name!r}: {name!r} is a plain tensor among DTensors",
                where=str(self.kernel.spec.source),
                hint=f"distribute_tensor({name}, mesh, placements), or call under"
                " torch.distributed.tensor.experimental.implicit_replication()",
            )
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def _wrap_slot(self, result: Any, meta: Any, placements: Any, mesh: DeviceMesh) -> Any:
        if meta is None:
            return None
        if isinstance(meta, list):
            return [
                self._wrap_slot(r, m, placements, mesh) for r, m in zip(result, meta, strict=True)
            ]
        where: Placements = next(placements)
        expected = local_shape(meta.shape, where, mesh)
        if mesh.get_coordinate() is not None and any(
            isinstance(size, int) and isinstance(got, int) and size != got
            for size, got in zip(expected, result.shape, strict=True)
        ):
            raise ArgumentError(
                f"kernel {self.kernel.name!r}: its sharding rule is wrong: a shard of the arguments"
                f" gives {tuple(result.shape)}, a shard of the result is {expected}",
                where=str(self.kernel.spec.source),
                hint="mark the axes that the kernel needs whole: name!",
            )
        shape = torch.Size(meta.shape)
        stride = row_major_strides(shape)
        return _wrap(result, mesh, where, shape, stride)

    # ------------------------------------------------------------------ planning
    def _plan(
        self,
        layout: Layout,
        names: Sequence[str],
        tensors: Sequence[DTensor],
        written: Sequence[bool],
        dynamics: Sequence[Any],
        mesh: DeviceMesh,
        differentiate: bool,
    ) -> tuple[Plan, list[Any]]:
        """The plan of a call, and the global shapes of its result slots."""
        rule = self.kernel.sharding
        described = [
            Tensor(tuple(t.shape), t.dtype.itemsize, tuple(t.placements), w)
            for t, w in zip(tensors, written, strict=True)
        ]
        dtypes = tuple(t.dtype for t in tensors)
        key: Any = (rule, layout, mesh, tuple(described), dtypes, differentiate)
        try:
            known = self._plans.get(key)
        except TypeError:  # symbolic sizes have no hash; they occur while tracing only
            key, known = None, None
        if known is not None:
            return known
        operator = self.kernel.operator
        arguments = join(operator.definition.parameters, layout, tensors, dynamics)
        slots = operator.shapes(arguments)[: len(operator.definition.returns)]
        choices = self._choices(layout, described, arguments, slots)
        plan = make_plan(mesh, choices, described, differentiate=differentiate)
        if plan is None:
            raise self._unplannable(names, described)
        if key is not None:
            if len(self._plans) >= _REMEMBERED:
                self._plans.clear()
            self._plans[key] = plan, slots
        return plan, slots

    def _choices(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        arguments: Sequence[Any],
        slots: Sequence[Any],
    ) -> list[Choice]:
        _refuse_rules_of_torch(self.kernel)
        rule = self.kernel.sharding
        metas = [(i, m) for i, slot in enumerate(slots) for m in _listed(slot)]
        shapes = [tuple(m.shape) for _, m in metas]
        everything = Choice((None,) * len(tensors), (None,) * len(metas))
        if rule is None:
            if not self._noted:
                self._noted = True
                _log.warning(
                    "kernel %r (%s) has no sharding rule: its DTensor arguments are gathered and"
                    " every device computes everything; state one with sharding=",
                    self.kernel.name,
                    self.kernel.spec.source,
                )
            return [everything]
        if isinstance(rule, FunctionRule):
            ndims = [len(t.shape) for t in tensors], [len(s) for s in shapes]
            return [*self._from_function(rule, arguments, *ndims), everything]
        inputs = [t.shape for t in tensors]
        return rule.choices(self.kernel.spec, layout, inputs, shapes, [slot for slot, _ in metas])

    def _from_function(
        self, rule: FunctionRule, arguments: Sequence[Any], inputs: list[int], outputs: list[int]
    ) -> list[Choice]:
        positional, keywords = _call_arguments(self.kernel, arguments)
        choices = []
        for entry in rule.fn(*positional, **keywords):
            try:
                out, given = entry
                spots_out = tuple(spot_of(p, n) for p, n in zip(out, outputs, strict=True))
                present = [p for p in given if p is not None]  # None stands for what is no tensor
                spots_in = tuple(spot_of(p, n) for p, n in zip(present, inputs, strict=True))
            except (TypeError, ValueError) as error:
                raise ArgumentError(
                    f"kernel {rule.kernel!r}: its sharding function returned {entry!r}: {error}",
                    where=rule.where,
                    hint=f"return a list of (placements of {len(outputs)} results, placements of"
                    f" {len(inputs)} tensor arguments)",
                ) from error
            choices.append(Choice(spots_in, spots_out))
        return choices

    def _unplannable(self, names: Sequence[str], tensors: Sequence[Tensor]) -> ArgumentError:
        written = ", ".join(
            f"{n!r} ({t.placements})" for n, t in zip(names, tensors, strict=True) if t.written
        )
        return ArgumentError(
            f"kernel {self.kernel.name!r}: cannot write to {written} where they are",
            where=str(self.kernel.spec.source),
            hint="the sharding rule allows no such placement of an argument that is written to;"
            " redistribute it before the call, for example to Replicate()",
        )


def _wrap(
    result: torch.Tensor, mesh: DeviceMesh, where: Placements, shape: torch.Size, stride: Any
) -> DTensor:
    if torch.is_grad_enabled() and result.requires_grad:
        return _FromLocal.apply(result, mesh, where, shape, stride)  # type: ignore[no-any-return, no-untyped-call]
    return DTensor.from_local(result, mesh, where, run_check=False, shape=shape, stride=stride)


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local` whose backward can be differentiated.

    torch's own leaves the graph where the gradient arrives in other placements than the result has,
    as it always does for partial sums: second derivatives would silently lack terms.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        where: Placements,
        shape: torch.Size,
        stride: Any,
    ) -> DTensor:
        ctx.where = where
        return DTensor.from_local(
            local.detach(), mesh, where, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        # Each part of a sum has the gradient of the whole; what flows back into that gradient is a
        # sum over the parts in turn.
        wanted = tuple(Replicate() if p.is_partial() else p for p in ctx.where)
        if tuple(grad.placements) != wanted:
            grad = grad.redistribute(placements=wanted)
        return grad.to_local(grad_placements=ctx.where), None, None, None, None


def _local(
    tensor: DTensor, placements: Placements, gradients: Placements, written: bool
) -> torch.Tensor:
    if written:  # the local tensor itself: a view made under autograd refuses to be written to
        with torch.no_grad():
            return tensor.to_local()
    if tuple(tensor.placements) != placements:
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local(grad_placements=gradients)


def _call_arguments(kernel: Kernel, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in schema order as a call passes them."""
    pairs = list(zip(kernel.spec.op_parameters, arguments, strict=True))
    return [a for p, a in pairs if not p.keyword_only], {
        p.name: a for p, a in pairs if p.keyword_only
    }


def _listed(slot: Any) -> Sequence[Any]:
    return slot if isinstance(slot, list) else () if slot is None else (slot,)


def _map(fn: Any, slot: Any) -> Any:
    if slot is None:
        return None
    return [fn(meta) for meta in slot] if isinstance(slot, list) else fn(slot)


def _refuse_rules_of_torch(kernel: Kernel) -> None:
    if _compat_torch.has_dtensor_strategy(kernel.op):
        raise KernelError(
            f"kernel {kernel.name!r}: its operator has a sharding rule that torch would ignore",
            where=str(kernel.spec.source),
            hint="pass the rule to kernel.register_sharding instead of"
            " torch.distributed.tensor.experimental.register_sharding",
        )
