"""Runs an operator on host memory: one compiled JAX program per key, called with as little Python
as possible.

The function that torch's dispatcher calls is generated from the operator's parameters: it forms the
key (shapes, dtypes, static values, the caller's mode), looks the compiled program up, and calls it
on arrays that share the tensors' memory. Everything unusual happens once per key in
`Executor.first_call`, or on a slow path.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_kernels import _compat_jax
from tpu_kernels.backends import packing, resident
from tpu_kernels.backends.bridge import Bridge, WrongDevice
from tpu_kernels.backends.call_source import (
    array_expression,
    import_lines,
    key_parts,
    mode_lines,
    return_lines,
)
from tpu_kernels.backends.disk import compile_jitted
from tpu_kernels.backends.program_cache import cache_for
from tpu_kernels.config import settings
from tpu_kernels.dsl import dtypes
from tpu_kernels.dsl.spec import Kind
from tpu_kernels.errors import ArgumentError, DeviceError, TraceError
from tpu_kernels.registry import config_table
from tpu_kernels.registry.engine import Engine, current_mode
from tpu_kernels.registry.layout import Layout, fill, flat_names, freeze, is_empty, split
from tpu_kernels.registry.operator import Operator, results_of, signature_source
from tpu_kernels.registry.shapes import Meta
from tpu_kernels.registry.tracing import explained


class Executor:
    """The programs of one operator on one kind of tensor.

    Args:
        operator: What to run.
        device_type: Type of the tensors' device.
        make_bridge: Returns the bridge between the tensors and JAX. Called on the first call, not
            before: decorating a kernel must not start JAX.
    """

    def __init__(
        self, operator: Operator, device_type: str, make_bridge: Callable[[], Bridge]
    ) -> None:
        self.operator = operator
        self.device_type = device_type
        self.make_bridge = make_bridge
        self.programs: dict[Any, Callable[..., Any]] = {}  # called with arrays
        self.slow_programs: dict[
            Any, Callable[..., Any]
        ] = {}  # called with the operator's arguments
        self.lock = threading.RLock()
        config_table.watch(self)

    @functools.cached_property
    def bridge(self) -> Bridge:
        """The bridge between the tensors and JAX."""
        return self.make_bridge()

    def forget_configs(self) -> None:
        """Drop all programs: other configurations may apply now."""
        with self.lock:
            self.programs.clear()
            self.slow_programs.clear()

    def drop(self, key: Any) -> None:
        """Let go of one program; taking no lock, since another executor asks while it holds its
        own."""
        self.programs.pop(key, None)
        self.slow_programs.pop(key, None)

    # ------------------------------------------------------------------ the generated fast path
    def implementation(self, modes: Any = None) -> Callable[..., Any]:
        """The function to register with torch for the bridge's dispatch key.

        Args:
            modes: What has ``FLAGS``, ``intercept``, ``GO``, ``ACTIVE`` and ``settle_all`` of a
                device with eager modes.
        """
        definition = self.operator.definition
        env: dict[str, Any] = {
            "_find": self.programs.get,
            "_first": self.first_call,
            "_mode": current_mode,
            "_launch": self.operator.counters.launch,
            "_id": id,  # a parameter may be called like a builtin
            "_tuple": tuple,
            "_freeze": freeze,
            "_WrongDevice": WrongDevice,
            "_wrong_device": self.operator.wrong_device,
            "_too_wide": self.too_wide,
        }
        names = [p.name for p in definition.parameters]
        keys = ["_mode()"] + [k for p in definition.parameters for k in key_parts(p)]
        tensors = [p for p in definition.parameters if p.kind.is_tensor]
        plain = [p.name for p in tensors if p.kind is Kind.TENSOR]
        arrays = [array_expression(p) for p in tensors]
        arrays += [p.name for p in definition.parameters if p.kind is Kind.DYNAMIC]
        call = f"_program({', '.join(arrays)})"
        lines = [
            f"def implementation({signature_source(definition, env)[0]}):",
            *([] if modes is None else mode_lines(definition.parameters)),
            *(f"    _shape_{n} = {n}.shape; _dtype_{n} = {n}.dtype" for n in plain),
            f"    _key = ({', '.join(keys)},)",
            "    _program = _find(_key)",
            "    if _program is None:",
            f"        return _first(_key, [{', '.join(names)}])",
            "    _launch()",
            "    try:",
            *(line for name in plain for line in import_lines(name)),
            *return_lines(definition.returns, definition.mutated, definition.parameters, call),
            "    except _WrongDevice:",
            f"        raise _wrong_device([{', '.join(names)}]) from None",
            "    except OverflowError as _error:",
            f"        raise _too_wide([{', '.join(names)}], _error) from _error",
        ]
        exec(compile("\n".join(lines), f"<tpu_kernels executor of {definition.name}>", "exec"), env)
        self.environment = env
        if modes is not None:
            env.update(
                _FLAGS=modes.FLAGS,
                _intercept=modes.intercept,
                _GO=modes.GO,
                _ACTIVE=modes.ACTIVE,
                _settle=modes.settle_all,
                _operator=self.operator.op,
                _self=env["implementation"],
            )
        return env["implementation"]  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ once per key
    def first_call(self, key: Any, arguments: list[Any]) -> Any:
        """Answer a call whose key has no fast program: compile it, or take a slow path."""
        slow = self.slow_programs.get(key)
        if slow is not None:
            return slow(arguments)
        with self.lock:
            # The generated function reaches these names only after a first call came here.
            bridge = self.bridge
            self.environment.update(
                _J=bridge.to_jax,
                _T=bridge.to_torch,
                _remembered=bridge.remembered,
                _import=bridge.import_tensor,
            )
            program, slow = self.programs.get(key), self.slow_programs.get(key)
            if program is not None:
                return self._run(program, arguments)
            return self._build(key, arguments) if slow is None else slow(arguments)

    def _build(self, key: Any, arguments: list[Any]) -> Any:
        operator = self.operator
        definition = operator.definition
        layout, tensors, _ = split(definition.parameters, arguments)
        self._check_devices(layout, tensors, arguments)
        slots = operator.shapes(arguments)  # checks dtypes as well
        if slots and all(is_empty(m.shape) for slot in slots for m in _metas(slot)):
            return self._keep_slow(key, lambda args: self._empty_results(slots), arguments)
        metas = [Meta(tuple(t.shape), t.dtype) for t in tensors]
        narrow = definition.int64 == "narrow_checked" and any(
            m.dtype in dtypes.NARROW for m in metas
        )
        # Arrays without elements come out of DLPack with strides of their own, packed values
        # as bytes.
        odd = narrow or any(
            is_empty(m.shape) or m.dtype in dtypes.PACKED for slot in slots for m in _metas(slot)
        )
        if narrow:
            metas = [Meta(m.shape, dtypes.NARROW.get(m.dtype, m.dtype)) for m in metas]
        mode = current_mode()
        engine = Engine(
            interpret=mode.interpret,
            x64=definition.int64 == "exact",
            target=settings().sim_chip,
            numerics=mode.numerics,
            precision=mode.precision,
        )
        program, prepare = self._compile(operator, layout, metas, engine)
        loaded = False

        def first(*inputs: Any) -> Any:
            nonlocal loaded
            loaded = prepare(inputs)
            return program(*inputs)

        try:
            with explained(definition.kernel, definition.where, "running"):
                if odd:
                    result = self._declared(first, slots, narrow=narrow)(arguments)
                else:
                    result = self._run(first, arguments)
        except TraceError:
            if definition.reference is None or not any(is_empty(m.shape) for m in metas):
                raise
            return self._keep_slow(key, self._by_reference, arguments)
        operator.counters.disk_hit() if loaded else operator.counters.compilation()
        if odd:
            self.slow_programs[key] = self._declared(program, slots, narrow=narrow)
        else:
            self.programs[key] = program
        resident.programs.enter(self, key, definition.kernel)
        return result

    def _compile(
        self, operator: Operator, layout: Layout, metas: Sequence[Meta], engine: Engine
    ) -> tuple[Callable[..., Any], Callable[[Sequence[Any]], bool]]:
        """A program, and what compiles it for its arguments or loads it from disk (then True)."""
        import jax

        if _compat_jax.client_is_inherited():
            raise DeviceError(
                f"kernel {operator.definition.kernel!r} has to be compiled for these arguments, "
                "which a process cannot do that was forked from one that has called kernels",
                where=operator.definition.where,
                hint="start the process by 'spawn' (a DataLoader takes "
                "multiprocessing_context='spawn'), or make the first call before the fork",
            )
        call = operator.call_of(layout, metas)
        function = _fresh(packing.on_bytes(operator.jax_function(call, engine), call.avals))
        if len(operator.definition.returns) == 1 and not operator.definition.mutated:
            inner = function

            def function(
                *args: Any,
            ) -> Any:  # the common case: a bare result costs less to hand over
                return inner(*args)[0]

        jitted: Callable[..., Any] = jax.jit(function)
        cache = cache_for(operator.definition.cache_dir)

        def prepare(inputs: Sequence[Any]) -> bool:
            return compile_jitted(cache, jitted, inputs, name=operator.definition.name)

        if not engine.x64:
            return jitted, prepare

        def wide(*args: Any) -> Any:
            with jax.enable_x64(True):
                return jitted(*args)

        def prepare_wide(inputs: Sequence[Any]) -> bool:
            with jax.enable_x64(True):
                return prepare(inputs)

        return wide, prepare_wide

    def _keep_slow(self, key: Any, program: Callable[..., Any], arguments: list[Any]) -> Any:
        result = program(arguments)
        self.slow_programs[key] = program
        return result

    # ------------------------------------------------------------------ slow paths
    def _run(self, program: Callable[..., Any], arguments: list[Any]) -> Any:
        """What the generated function does after the lookup, for any operator."""
        parameters = self.operator.definition.parameters
        layout, tensors, dynamics = split(parameters, arguments)
        arrays = fill(layout, [self.bridge.to_jax(t) for t in tensors])
        return self._deliver(self._launch(program, [*arrays, *dynamics], arguments), arguments)

    def _launch(self, program: Callable[..., Any], inputs: list[Any], arguments: list[Any]) -> Any:
        self.operator.counters.launch()
        try:
            return program(*inputs)
        except OverflowError as error:
            raise self.too_wide(arguments, error) from error

    def _deliver(
        self, outcome: Any, arguments: list[Any], declared: Sequence[Any] | None = None
    ) -> Any:
        definition = self.operator.definition
        slots = (
            [outcome] if len(definition.returns) == 1 and not definition.mutated else list(outcome)
        )

        def torch_of(slot: Any, meta: Any) -> Any:
            if slot is None:
                return None
            if isinstance(slot, (list, tuple)):
                metas = meta or [None] * len(slot)
                return [torch_of(s, m) for s, m in zip(slot, metas, strict=True)]
            if meta is not None and is_empty(meta.shape):
                return self._empty(meta)
            tensor = self.bridge.to_torch(slot)
            if meta is None or tensor.dtype is meta.dtype:
                return tensor
            packed = meta.dtype in dtypes.PACKED
            return tensor.view(meta.dtype) if packed else tensor.to(meta.dtype)

        wanted = declared or [None] * len(slots)
        values = [torch_of(s, m) for s, m in zip(slots, wanted, strict=True)]
        by_name = dict(zip((p.name for p in definition.parameters), arguments, strict=True))
        for name, value in zip(definition.mutated, values[len(definition.returns) :], strict=True):
            _write_back(by_name[name], value)
        return results_of(values[: len(definition.returns)])

    def _declared(
        self, program: Callable[..., Any], slots: Sequence[Any], *, narrow: bool
    ) -> Callable[[list[Any]], Any]:
        """Runs a program whose results are not yet what is declared. Policy "narrow_checked":
        integers that fit go in as 32 bits, results are widened."""
        parameters = self.operator.definition.parameters

        def run(arguments: list[Any]) -> Any:
            layout, tensors, dynamics = split(parameters, arguments)
            names = flat_names(parameters, layout)
            if narrow:
                tensors = [self._narrow(n, t) for n, t in zip(names, tensors, strict=True)]
            arrays = [self.bridge.to_jax(t) for t in tensors]
            outcome = self._launch(program, [*fill(layout, arrays), *dynamics], arguments)
            return self._deliver(outcome, arguments, slots)

        return run

    def _narrow(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        narrow = dtypes.NARROW.get(tensor.dtype)
        if narrow is None:
            return tensor
        if tensor.numel():
            limits = torch.iinfo(narrow)
            low, high = int(tensor.min()), int(tensor.max())
            if low < limits.min or high > limits.max:
                raise ArgumentError(
                    f"kernel {self.operator.definition.kernel!r}: argument {name!r} holds values "
                    "out of the range of "
                    f"{str(narrow).removeprefix('torch.')} ({low} to {high})",
                    where=self.operator.definition.where,
                    hint="the kernel declares int64='narrow_checked'; int64='exact' keeps 64 bits "
                    "on CPU",
                )
        return tensor.to(narrow)

    def _by_reference(self, arguments: list[Any]) -> Any:
        """Answer by the kernel's reference: the kernel itself cannot run on empty inputs."""
        definition = self.operator.definition
        self.operator.counters.fallback()
        values = {
            p.name: p.for_kernel(a) if not p.kind.is_tensor else a
            for p, a in zip(definition.parameters, arguments, strict=True)
        }
        if definition.reference is None:  # the caller has checked
            raise TraceError(
                f"kernel {definition.kernel!r} has no reference", where=definition.where
            )
        return definition.reference(values)

    def _empty(self, meta: Meta) -> torch.Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.device_type)

    def _empty_results(self, slots: Sequence[Any]) -> Any:
        def empty(slot: Any) -> Any:
            if slot is None:
                return None
            if isinstance(slot, list):
                return [empty(s) for s in slot]
            return self._empty(slot)

        return results_of([empty(s) for s in slots[: len(self.operator.definition.returns)]])

    # ------------------------------------------------------------------ devices
    def _check_devices(
        self, layout: Layout, tensors: Sequence[torch.Tensor], arguments: list[Any]
    ) -> None:
        if any(t.device.type != self.device_type for t in tensors):
            raise self.operator.wrong_device(arguments)

    def too_wide(self, arguments: list[Any], error: OverflowError) -> Exception:
        """The error for a dynamic integer that has no 32 bits, or the original error."""
        definition = self.operator.definition
        for p, value in zip(definition.parameters, arguments, strict=True):
            if p.schema_type == "SymInt" and not -(2**31) <= value < 2**31:
                return ArgumentError(
                    f"kernel {definition.kernel!r}: argument {p.name!r} is {value}, out of the "
                    "range of int32",
                    where=definition.where,
                    hint="int64='exact' computes in 64 bits on CPU",
                )
        return error


def _fresh(program: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A program whose results alias nothing under `jax.disable_jit` either, where it may return the
    very arrays that it was given."""
    import jax
    import jax.numpy as jnp

    def fresh(*args: Any) -> tuple[Any, ...]:
        results = program(*args)
        if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return results
        return jax.tree_util.tree_map(lambda x: jnp.array(x, copy=True), results)  # type: ignore[no-any-return]

    fresh.__name__ = fresh.__qualname__ = program.__name__
    return fresh


def _metas(slot: Any) -> list[Meta]:
    return [] if slot is None else slot if isinstance(slot, list) else [slot]


def _write_back(old: Any, new: Any) -> None:
    if isinstance(old, (list, tuple)):
        for o, n in zip(old, new, strict=True):
            o.copy_(n)
    elif old is not None:
        old.copy_(new)
