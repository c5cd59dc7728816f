"""A queue as one JAX program: storages are flat arrays, and writes make new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels import _compat_jax
from tpu_kernels.backends.deferred import geometry, operators
from tpu_kernels.backends.device import bounds
from tpu_kernels.backends.disk import compile_jitted
from tpu_kernels.backends.program_cache import cache_for
from tpu_kernels.config import settings
from tpu_kernels.registry.engine import Engine

if TYPE_CHECKING:
    from tpu_kernels.backends.deferred.operators import Entry
    from tpu_kernels.backends.deferred.queue import Node, Slot


class CannotLower(Exception):
    """Some calls have no form in JAX.

    Args:
        reasons: Those calls, and why.
    """

    def __init__(self, reasons: Sequence[tuple[Entry, str]]) -> None:
        super().__init__(", ".join(reason for _, reason in reasons))
        self.reasons = tuple(reasons)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled queue.

    Attributes:
        function: The compiled function of flat arrays and numbers.
        inputs: Numbers of the given slots whose elements it takes.
        numbers: Positions of the floats that it takes.
        outputs: Numbers of the slots whose elements it returns.
        checks: Positions of the nodes whose indices it checks.
        launches: What counts a launch of each kernel in it.
    """

    function: Callable[..., Any]
    inputs: tuple[int, ...]
    numbers: tuple[int, ...]
    outputs: tuple[int, ...]
    checks: tuple[int, ...]
    launches: tuple[Callable[[], None], ...]

    def run(self, arrays: Sequence[Any], numbers: Sequence[float]) -> tuple[list[Any], Any]:
        """Run it: the outputs' elements, and for each check whether an index was out of bounds."""
        import jax
        import numpy as np

        given = [*arrays, *[np.float64(number) for number in numbers]]
        with jax.enable_x64(True):
            if given:
                results = list(self.function(*given))
            else:
                with jax.default_device(_compat_jax.cpu_device()):
                    results = list(self.function())
        flags = np.asarray(results.pop()) if self.checks else None
        return results, flags


def build(
    nodes: Sequence[Node], order: Sequence[Slot], wanted: Sequence[int], varying: frozenset[int]
) -> Program:
    """Compile recorded calls.

    Args:
        nodes: The calls.
        order: The slots by number.
        wanted: Numbers of the slots whose elements are to be returned.
        varying: Positions of the floats that are arguments, among all floats of the calls.

    Raises:
        CannotLower: Some calls have no form in JAX.
    """
    import jax
    import numpy as np

    nodes = list(nodes)
    used = {index for node in nodes for index in node.slots}
    inputs = tuple(s.index for s in order if s.weak is None and s.index in used)
    numbers = tuple(sorted(varying))
    trace = _Trace(nodes, order, varying)
    with jax.enable_x64(True), jax.default_device(_compat_jax.cpu_device()):
        structs: list[Any] = [
            jax.ShapeDtypeStruct((order[i].count,), _jax(order[i].dtype)) for i in inputs
        ]
        structs += [jax.ShapeDtypeStruct((), "float64")] * len(numbers)

        def program(*values: Any) -> tuple[Any, ...]:
            arrays = dict(zip(inputs, values, strict=False))
            changing = dict(zip(numbers, values[len(inputs) :], strict=True))
            return trace(arrays, changing, wanted)

        program.__name__ = program.__qualname__ = "deferred"
        jaxpr = jax.make_jaxpr(program)(*structs)
        if trace.evaluator.unlowered:
            raise CannotLower(trace.failures())
        function = jax.jit(_fresh(jaxpr), keep_unused=True)
        # Compiled before anything runs: a Ctrl-C finds nothing changed.
        device = _compat_jax.cpu_device()
        samples = [
            jax.device_put(np.zeros(s.shape, s.dtype), device) for s in structs[: len(inputs)]
        ]
        samples += [np.float64(0)] * len(numbers)
        if (
            not compile_jitted(cache_for(), function, samples, name="deferred")
            and cache_for() is None
        ):
            function(*samples)
    return Program(
        function,
        inputs,
        numbers,
        tuple(wanted),
        tuple(trace.checks),
        tuple(operator.counters.launch for operator in trace.evaluator.launches),
    )


def _fresh(jaxpr: Any) -> Callable[..., Any]:
    """The program as a function whose results are neither its arguments nor each other: JAX would
    hand over one array for both, and two storages would share memory."""
    import jax.extend.core
    import jax.numpy as jnp

    flat = jax.extend.core.jaxpr_as_fun(jaxpr)
    seen = set(jaxpr.jaxpr.invars)
    shared = []
    for variable in jaxpr.jaxpr.outvars:
        hashable = not isinstance(variable, jax.extend.core.Literal)
        shared.append(not hashable or variable in seen)
        if hashable:
            seen.add(variable)

    def deferred(*values: Any) -> tuple[Any, ...]:
        results = flat(*values)
        return tuple(
            jnp.copy(result) if again else result
            for result, again in zip(results, shared, strict=True)
        )

    return deferred


def _jax(dtype: torch.dtype) -> Any:
    from tpu_kernels.dsl import dtypes

    return dtypes.to_jax(dtype)


class _Trace:
    """Evaluates nodes while JAX traces."""

    def __init__(self, nodes: list[Node], order: Sequence[Slot], varying: frozenset[int]) -> None:
        from tpu_kernels.lowering import fakes
        from tpu_kernels.lowering.evaluate import Evaluator
        from tpu_kernels.lowering.overriding import no_overrides

        self.nodes, self.order, self.varying = nodes, order, varying
        self.evaluator = Evaluator(
            Engine(interpret=True, target=settings().sim_chip), fakes.Sizes(), no_overrides()
        )
        self.checks: list[int] = []
        self.graph = torch.fx.Graph()
        self.entries: dict[Any, Entry] = {}
        self.flat: dict[int, Any] = {}
        # What was last written to a slot as a whole or read from it, to spare XLA the reshapes.
        self.views: dict[tuple[int, operators.Geometry], Any] = {}

    def failures(self) -> list[tuple[Entry, str]]:
        """The calls that have no form in JAX."""
        return [(self.entries[n], why) for n, why in self.evaluator.unlowered.items()]

    def __call__(
        self, arrays: dict[int, Any], numbers: dict[int, Any], wanted: Sequence[int]
    ) -> tuple[Any, ...]:
        self.flat = dict(arrays)
        flags: list[Any] = []
        position = 0
        for number, node in enumerate(self.nodes):
            floats = [
                numbers[position + i] if position + i in self.varying else value
                for i, value in enumerate(node.floats)
            ]
            position += len(node.floats)
            self._node(number, node, floats, flags)
        results = [self.flat[index] for index in wanted]
        if flags:
            import jax.numpy as jnp

            results.append(jnp.stack(flags))
        return tuple(results)

    def _node(self, number: int, node: Node, floats: list[Any], flags: list[Any]) -> None:
        entry = node.entry
        values = [
            self._read(index, place) for index, place in zip(node.slots, entry.inputs, strict=True)
        ]
        if entry.info.functional is None:  # copy_
            self._write(node, 0, values[1])
            return
        if entry.checked:
            flag = self._check(entry, values)
            if flag is not None:
                self.checks.append(number)
                flags.append(flag)
        result = self._evaluate(entry, values, floats)
        if entry.info.writes:
            leaves = [leaf for leaf in _leaves(result) if leaf is not None]
            for index, leaf in zip(entry.written, leaves, strict=True):
                self._write(node, index, leaf)
            return
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        made = iter(node.made)
        for place, value in zip(entry.outputs, results, strict=True):
            if place is not None:
                self._make(next(made), place, value)

    def _evaluate(self, entry: Entry, values: list[Any], floats: list[Any]) -> Any:
        """Evaluate a call; where it has no form in JAX, its results are zeros for now."""
        with self.evaluator.faker.mode:
            metas = [_meta(place) for place in entry.inputs]
            made = [None if place is None else _meta(place) for place in entry.outputs]
        nodes = []
        for meta in metas:
            node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
            node.meta["val"] = meta
            nodes.append(node)
        # FX holds no arrays: a float that is an argument is one more placeholder.
        numbers: list[Any] = []
        known = dict(zip(nodes, values, strict=True))
        for value in floats:
            if isinstance(value, float):
                numbers.append(value)
                continue
            node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
            known[node] = value
            numbers.append(node)
        args = tuple(operators.fill(value, nodes, numbers) for value in entry.args)
        kwargs = {k: operators.fill(v, nodes, numbers) for k, v in entry.kwargs.items()}
        functional: Any = entry.info.functional
        call = self.graph.call_function(functional, args, kwargs)
        if not entry.info.writes:  # what is computed before a write may have another dtype
            call.meta["val"] = made[0] if entry.form == "one" else tuple(made)
        self.entries[call] = entry
        self.evaluator.run([call], known)
        return known[call]

    # ------------------------------------------------------------------ storages
    def _read(self, index: int, place: operators.Geometry) -> Any:
        found = self.views.get((index, place))
        if found is None:
            view = geometry.view(place.shape, place.stride, place.offset)
            if view is None:
                raise CannotLower([])
            found = self.views[index, place] = view.read(self.flat[index])
        return found

    def _make(self, index: int, place: operators.Geometry, value: Any) -> None:
        view = geometry.view(place.shape, place.stride, 0, writable=True)
        import jax.numpy as jnp

        if view is None:
            raise CannotLower([])
        blank = jnp.zeros((place.count,), value.dtype)
        self.flat[index] = view.write(blank, value)
        self.views[index, place] = value

    def _write(self, node: Node, index: int, value: Any) -> None:
        from tpu_kernels.lowering.values import cast, expand

        place, slot = node.entry.inputs[index], node.slots[index]
        view = geometry.view(place.shape, place.stride, place.offset, writable=True)
        if view is None:
            raise CannotLower([])
        value = expand(cast(value, place.dtype), place.shape)
        self.flat[slot] = view.write(self.flat[slot], value)
        for key in [key for key in self.views if key[0] == slot]:
            del self.views[key]
        self.views[slot, place] = value

    # ------------------------------------------------------------------ indices
    def _check(self, entry: Entry, values: list[Any]) -> Any:
        import jax.numpy as jnp

        from tpu_kernels import _compat_torch

        metas = [
            torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device="meta")
            for p in entry.inputs
        ]
        floats = [0.0] * 64
        args = [operators.fill(value, metas, floats) for value in entry.args]
        kwargs = {k: operators.fill(v, metas, floats) for k, v in entry.kwargs.items()}
        named = bounds.by_name(_compat_torch.schema_of(entry.info.op), args, kwargs)
        flag = None
        for found in bounds.indices(entry.info.op._opname, named):
            place = next(i for i, meta in enumerate(metas) if meta is found.indices)
            index = values[place]
            bad = (index < found.least) | (index >= found.size)
            if found.ignored is not None:
                bad &= index != found.ignored
            flag = jnp.any(bad) if flag is None else flag | jnp.any(bad)
        return flag


def _meta(place: operators.Geometry) -> torch.Tensor:
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="cpu")


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]
