"""Output shapes and dtypes of an operator, from tracing its JAX program; sizes may be symbolic.

Concrete sizes are traced with `jax.eval_shape`. For symbolic sizes each distinct torch expression
becomes a JAX dimension variable, the program is traced once for all sizes, and the resulting
dimension expressions are evaluated on torch's symbolic integers. Method: jax.export's shape
polymorphism, with an evaluator of our own (`dimexpr`), since JAX's own one would specialise the
sizes.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels import _compat_torch
from tpu_kernels.dsl import dtypes
from tpu_kernels.errors import DTypeError, KernelError, TraceError
from tpu_kernels.registry import dimexpr
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import Layout, split
from tpu_kernels.registry.tracing import explained

if TYPE_CHECKING:
    from tpu_kernels.registry.operator import Operator

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Meta:
    """Shape (ints or symbolic) and torch dtype of a tensor."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


class ShapeRule:
    """Shapes and dtypes of an operator's result slots and mutated arguments, from those of its
    arguments.

    Args:
        operator: The operator whose program is traced.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.cache: dict[Any, list[Any]] = {}
        self.lock = threading.RLock()
        self._told: set[Any] = set()

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """One entry per slot: `Meta`, None, or a list of `Meta`.

        Args:
            arguments: One argument per parameter in schema order; tensors may be fake, with
                symbolic sizes.

        Raises:
            TraceError: The kernel's own code raised.
            DTypeError: An argument has a dtype that the kernel does not take.
        """
        layout, tensors, _ = split(self.operator.definition.parameters, arguments)
        self.operator.check_dtypes(layout, tensors)
        layout = _concrete(layout)
        if any(_compat_torch.symbol_of(size) is not None for t in tensors for size in t.shape):
            return self._symbolic(layout, tensors)
        metas = [Meta(tuple(int(s) for s in t.shape), t.dtype) for t in tensors]
        return self.concrete(layout, metas)

    def concrete(self, layout: Layout, metas: Sequence[Meta]) -> list[Any]:
        """The slots for concrete sizes."""
        key = (layout, tuple((m.shape, m.dtype) for m in metas))
        slots = self.cache.get(key)
        if slots is None:
            with self.lock:
                slots = self.cache.get(key)
                if slots is None:
                    slots = self.cache[key] = self._trace(layout, metas)
        return slots

    def _trace(self, layout: Layout, metas: Sequence[Meta]) -> list[Any]:
        definition = self.operator.definition
        try:
            with explained(definition.kernel, definition.where):
                return self._eval_shape(layout, metas)
        except TraceError:
            # Block and grid arithmetic often divides by a size of zero; the shapes are still well
            # defined.
            if any(0 in m.shape for m in metas):
                slots = self._zero_sized(layout, metas)
                if slots is not None:
                    return slots
            raise

    def _eval_shape(self, layout: Layout, metas: Sequence[Any]) -> list[Any]:
        import jax

        operator = self.operator
        call = operator.call_of(layout, metas)
        policy = operator.definition.int64
        # Narrowed integers come out as wide as they would be without narrowing; floats, which are
        # never narrowed, as they are computed.
        narrowed = policy == "narrow_checked" and any(m.dtype in dtypes.NARROW for m in metas)
        engine = Engine(x64=policy == "exact" or narrowed)
        program = operator.jax_function(call, engine)
        with jax.enable_x64(engine.x64):
            slots = jax.eval_shape(program, *operator.abstract_arguments(call))
        try:
            return [_meta(slot, narrow_floats=narrowed) for slot in slots]
        except DTypeError as error:
            where = operator.definition.where
            problem = f"kernel {operator.definition.kernel!r}, a result: {error.problem}"
            raise DTypeError(problem, where=where, hint=error.hint) from error

    def _zero_sized(self, layout: Layout, metas: Sequence[Meta]) -> list[Any] | None:
        """The slots of sizes with zeros: traced with a variable in place of each zero, then
        evaluated at zero."""
        try:
            return self._polymorphic(layout, metas, zero_is_symbol=True)
        except (KernelError, ArithmeticError, TypeError, ValueError):
            return None  # the caller raises the concrete trace's error, which is the helpful one

    def _symbolic(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[Any]:
        try:
            return self._polymorphic(layout, [Meta(tuple(t.shape), t.dtype) for t in tensors])
        except (
            Exception
        ) as error:  # whatever the author's code or JAX raises for sizes that are no numbers
            definition = self.operator.definition
            symbols = {
                s
                for t in tensors
                for size in t.shape
                if (s := _compat_torch.symbol_of(size)) is not None
            }
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if (layout, reason) not in self._told:
                self._told.add((layout, reason))
                _log.warning(
                    "kernel %r (%s): the output shape cannot be derived for symbolic sizes %s, so "
                    "that each size is "
                    "compiled anew; @kernel.register_fake can give it. JAX said: %s",
                    definition.kernel,
                    definition.where,
                    ", ".join(sorted(symbols)),
                    reason,
                )
        # int() makes torch guard on (export: refuse) these sizes.
        return self.concrete(
            layout, [Meta(tuple(int(size) for size in t.shape), t.dtype) for t in tensors]
        )

    def _polymorphic(
        self, layout: Layout, metas: Sequence[Meta], *, zero_is_symbol: bool = False
    ) -> list[Any]:
        from jax import export

        names: dict[str, str] = {}
        sizes: dict[str, Any] = {}

        def variable(size: Any) -> str:
            text = "zero" if zero_is_symbol and size == 0 else _compat_torch.symbol_of(size)
            if text is None:
                return str(int(size))
            name = names.setdefault(text, f"d{len(names)}")
            sizes[name] = size
            return name

        shapes = [tuple(variable(size) for size in m.shape) for m in metas]
        key = (layout, tuple(zip(shapes, (m.dtype for m in metas), strict=True)))
        with self.lock:
            slots = self.cache.get(key)
            if slots is None:
                # Torch itself specialises sizes 0 and 1, so that a symbol stands for 2 and more.
                scope = export.SymbolicScope([f"{name} >= 2" for name in sizes])
                symbolic = [
                    Meta(
                        tuple(export.symbolic_shape(",".join(shape), scope=scope)) if shape else (),
                        m.dtype,
                    )
                    for shape, m in zip(shapes, metas, strict=True)
                ]
                slots = self.cache[key] = self._eval_shape(layout, symbolic)

        def value(meta: Meta) -> Meta:
            return Meta(tuple(dimexpr.evaluate(d, sizes) for d in meta.shape), meta.dtype)

        return [
            None if s is None else [value(m) for m in s] if isinstance(s, list) else value(s)
            for s in slots
        ]


def _concrete(layout: Layout) -> Layout:
    """Static integers may reach a fake kernel as symbols; a program is specialised for their
    value."""

    def number(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return int(value)
        if isinstance(value, torch.SymFloat):
            return float(value)
        if isinstance(value, torch.SymBool):
            return bool(value)
        return [number(v) for v in value] if isinstance(value, (list, tuple)) else value

    return Layout(layout.slots, tuple(number(v) for v in layout.values))


_NARROW_FLOATS = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _meta(slot: Any, *, narrow_floats: bool) -> Any:
    if slot is None:
        return None
    if isinstance(slot, (list, tuple)):
        return [_meta(s, narrow_floats=narrow_floats) for s in slot]
    dtype = dtypes.to_torch(slot.dtype)
    shape = dtypes.tensor_shape(slot.shape, dtype)
    return Meta(shape, _NARROW_FLOATS.get(dtype, dtype) if narrow_floats else dtype)
