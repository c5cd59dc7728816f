"""Runs a lowered graph on torch tensors: programs compiled by XLA:CPU, one call each.

A graph is specialised when it is first called, and again for other symbolic sizes, for another mode
(`numerics`), and when other overrides are in force. What has no lowering runs by torch between
programs; a graph that cannot be split at all runs node by node.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_kernels import _compat_jax
from tpu_kernels.backends import bridges, dropout
from tpu_kernels.backends.buckets import Buckets
from tpu_kernels.backends.device.capsule import ACTIVE, settle_all
from tpu_kernels.backends.disk import compile_jitted
from tpu_kernels.backends.program_cache import cache_for
from tpu_kernels.config import settings
from tpu_kernels.dsl import dtypes
from tpu_kernels.registry import config_table
from tpu_kernels.registry.engine import Engine, Mode, current_mode
from tpu_kernels.registry.overrides import chain

log = logging.getLogger("tpu_kernels.compile")

_told: set[tuple[str, str]] = set()
_told_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    """How graphs are lowered, from the ``options`` of ``torch.compile``.

    Attributes:
        dump: Folder for the StableHLO of each program, or None.
        target: The chip whose configurations kernels use, or None for the simulated one.
    """

    dump: Path | None = None
    target: str | None = None


@dataclasses.dataclass
class CompileStats:
    """What has been compiled in this process by ``torch.compile(backend="tpu")``.

    Attributes:
        graphs: Graphs of ATen operators that were handed over.
        specialisations: Times that a graph was lowered: once for each set of symbolic sizes.
        programs: Programs made.
        loaded: Those among them that another process had compiled (see `tpu-kernels cache`).
        nodes: Operators in programs.
        padded: Calls whose arguments were padded to the sizes of a program (see `mark_dynamic`).
        unpadded: Specialisations for want of that, by reason.
        left: Operators that ran outside of programs for want of a lowering, by name.
        whole: Graphs that run node by node, by reason.
    """

    graphs: int = 0
    specialisations: int = 0
    programs: int = 0
    loaded: int = 0
    nodes: int = 0
    padded: int = 0
    unpadded: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    whole: dict[str, int] = dataclasses.field(default_factory=dict)


_stats = CompileStats()


def compile_stats() -> CompileStats:
    """Return what ``torch.compile(backend="tpu")`` has done in this process.

    Returns:
        A copy of the counts.

    Example:
        >>> import torch, tpu_kernels.device
        >>> before = compile_stats().programs
        >>> _ = torch.compile(torch.sin, backend="tpu")(torch.ones(3))
        >>> compile_stats().programs - before
        1
    """
    tables: dict[str, Any] = {n: dict(getattr(_stats, n)) for n in ("left", "whole", "unpadded")}
    return dataclasses.replace(_stats, **tables)


class CompiledGraph:
    """A graph of ATen operators as a function of its inputs.

    Args:
        graph: The graph.
        options: How to lower it.
    """

    def __init__(self, graph: GraphModule, options: GraphOptions) -> None:
        dropout.split(graph)
        self.graph = graph
        self.options = options
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        metas = [n.meta.get("val") for n in inputs]
        self.numbers = [i for i, m in enumerate(metas) if not isinstance(m, torch.Tensor)]
        self.dynamic = [i for i, m in enumerate(metas) if _is_dynamic(m)]
        self.known: dict[Any, Callable[..., Any]] = {}
        self.left: dict[str, str] = {}
        self.lock = threading.RLock()
        self.buckets = Buckets.of(graph)
        config_table.watch(self)
        _stats.graphs += 1

    def forget_configs(self) -> None:
        """Lower again at the next call: other configurations may apply."""
        with self.lock:
            self.known.clear()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        if ACTIVE:  # programs look at memory
            settle_all()
        if chain.FLAGS.slow:  # calls are being checked or recorded one by one
            return self.graph(*args)
        return self._run(*args) if self.buckets is None else self._bucketed(*args)

    def _bucketed(self, *args: Any) -> Any:
        """Run the program of a larger size on padded arguments, where that is the same."""
        buckets = cast(Buckets, self.buckets)
        actual, padded = buckets.sizes(args)
        if actual == padded:
            return self._run(*args)
        axes = buckets.plan(padded, args)
        if not isinstance(axes, str):
            results = buckets.run(self._run, args, actual, padded, axes)
            if not self.left:
                _stats.padded += 1
                return results
            axes = buckets.refuse(padded, "operators run outside of the program")
        before = len(self.known)
        results = self._run(*args)
        if len(self.known) > before:
            _stats.unpadded[axes] = _stats.unpadded.get(axes, 0) + 1
            tell("a dynamic size", axes, "cannot be padded, each size has a program of its own")
        return results

    def _run(self, *args: Any) -> Any:
        key = (
            current_mode(),
            chain.active_key(),
            *[args[i] for i in self.numbers],
            *[args[i].shape for i in self.dynamic],
        )
        run = self.known.get(key)
        if run is None:
            with self.lock, torch.no_grad():
                run = self.known.get(key)
                if run is None:
                    run = self.known[key] = self.specialise(args, current_mode())
        return run(args)

    def unlowered(self) -> dict[str, str]:
        """The operators that run outside of programs for want of a lowering, and why."""
        return dict(self.left)

    def specialise(self, args: Sequence[Any], mode: Mode) -> Callable[..., Any]:
        """Lower the graph for the sizes of some arguments."""
        import jax

        from tpu_kernels.lowering.lowered import Unplannable, lower

        reason = self._reason_to_run_whole(args, mode)
        if reason is None:
            target = self.options.target or settings().sim_chip
            engine = Engine(
                interpret=mode.interpret,
                target=target,
                numerics=mode.numerics,
                precision=mode.precision,
            )
            try:
                # Without a default device, JAX would start every backend that it finds.
                with jax.enable_x64(True), jax.default_device(_compat_jax.cpu_device()):
                    lowered = lower(self.graph, args, engine)
            except Unplannable as error:
                reason = str(error)
        if reason is not None:
            _stats.whole[reason] = _stats.whole.get(reason, 0) + 1
            self.left["the graph"] = reason
            tell("a graph", reason)
            return lambda given: self.graph(*given)
        _stats.specialisations += 1
        for node, why in lowered.unlowered.items():
            name = str(node.target)
            _stats.left[name] = _stats.left.get(name, 0) + 1
            self.left[name] = why
            tell(name, why)
        if mode.numerics == "tpu":
            from tpu_kernels.registry.numerics.jaxpr import emulated

            for program in lowered.programs:
                program.function = emulated(program.function)
        runner = Runner(self.graph, lowered)
        _stats.programs += len(lowered.programs)
        _stats.nodes += sum(n.op == "call_function" for n in self.graph.graph.nodes)
        if self.options.dump is not None:
            runner.dump(self.options.dump)
        return runner.run

    def _reason_to_run_whole(self, args: Sequence[Any], mode: Mode) -> str | None:
        if mode.interpret is not True:
            return "kernels are being checked by the TPU interpreter"
        for value in args:
            if not isinstance(value, torch.Tensor):
                continue
            if value.device.type not in ("cpu", "tpu"):
                return f"a tensor on {value.device.type}"
            if value.layout is not torch.strided or value.is_quantized:
                return "a tensor that is not dense"
            if value.dtype in dtypes.PACKED or not dtypes.is_supported(value.dtype):
                return f"a tensor of {value.dtype}"
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return f"a {type(value).__name__}"
        return None


def tell(what: str, why: str, how: str = "runs outside of the program") -> None:
    """Note once per process how something runs that is not one program for all sizes."""
    with _told_lock:
        if (what, why) in _told:
            return
        _told.add((what, why))
    log.warning("torch.compile(backend='tpu'): %s %s: %s", what, how, why)


def _is_dynamic(meta: Any) -> bool:
    return isinstance(meta, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in meta.shape)


class Runner:
    """The steps of a lowered graph, compiled.

    Args:
        graph: The graph.
        lowered: Its programs.
    """

    def __init__(self, graph: GraphModule, lowered: Any) -> None:
        from tpu_kernels.lowering import plan

        self.lowered = lowered
        self.inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self.outputs = plan.outputs(graph)
        self.flat = isinstance(self.outputs, (list, tuple)) and not any(
            isinstance(n, (list, tuple, dict)) for n in self.outputs
        )
        self.attributes = {
            n: getattr(graph, n.target) for n in graph.graph.nodes if n.op == "get_attr"
        }
        steps = lowered.steps
        self.kept = {n for s in steps if isinstance(s, Node) for n in s.all_input_nodes}
        map_arg(self.outputs, self.kept.add)
        self.steps = [self._host(s) if isinstance(s, Node) else self._program(s) for s in steps]
        self.launches = [operator.counters.launch for operator in lowered.launches]
        self.counts = lowered.counts or None

    def run(self, args: Sequence[Any]) -> Any:
        """Run the graph on its arguments."""
        values: dict[Node, Any] = dict(zip(self.inputs, args, strict=True))
        values.update(self.attributes)
        values.update(self.lowered.constants)
        arrays: dict[Node, Any] = {}
        for step in self.steps:
            step(values, arrays)
        for launch in self.launches:
            launch()
        if self.counts is not None:
            self.counts.add()
        if self.flat:  # what AOTAutograd hands over
            return [values[n] if isinstance(n, Node) else n for n in self.outputs]
        return map_arg(self.outputs, values.__getitem__)

    def _program(self, program: Any) -> Callable[[dict[Node, Any], dict[Node, Any]], None]:
        import jax

        # Without its arguments' device, JAX would ask every backend that it finds.
        jitted = jax.jit(program.function, keep_unused=True)
        inputs, outputs = program.inputs, program.outputs
        to_jax = bridges.to_jax
        deliver = [(n, self._delivery(n) if n in self.kept else None) for n in outputs]
        wide = jax.enable_x64
        device = _compat_jax.cpu_device()
        call = jitted if inputs else lambda: _on_device(jitted, device)
        compiled = False

        def step(values: dict[Node, Any], arrays: dict[Node, Any]) -> None:
            nonlocal compiled
            given = [arrays[n] if n in arrays else to_jax(values[n]) for n in inputs]
            with wide(True):
                if not compiled:
                    # Found by the lowered module: whatever decides what it computes is in it.
                    compiled = True
                    known = compile_jitted(cache_for(), jitted, given, name="graph") if given else 0
                    _stats.loaded += bool(known)
                results = call(*given)  # type: ignore[no-untyped-call]
            for (node, delivery), result in zip(deliver, results, strict=True):
                if delivery is None:
                    arrays[node] = result
                else:
                    values[node] = delivery(result)

        return step

    def _delivery(self, node: Node) -> Callable[[Any], Any]:
        """How a program's result becomes a tensor (or a list of tensors)."""
        meta = node.meta["val"]
        if isinstance(meta, (list, tuple)):
            each = [_deliver(m, None) for m in meta]
            return lambda arrays: [d(a) for d, a in zip(each, arrays, strict=True)]
        deliver = _deliver(meta, self.lowered.forms.get(node))
        gaps = self.lowered.gaps.get(node)
        return deliver if gaps is None else lambda array: _spread(deliver(array), *gaps)

    def _host(self, node: Node) -> Callable[[dict[Node, Any], dict[Node, Any]], None]:
        from tpu_kernels.lowering import plan

        target: Any = node.target
        by_shape = plan.drawn_by_torch(node)

        def step(values: dict[Node, Any], arrays: dict[Node, Any]) -> None:
            def value(n: Node) -> Any:
                return _blank(n, self.lowered) if by_shape and n not in values else values[n]

            args, kwargs = map_arg((node.args, node.kwargs), value)
            values[node] = target(*args, **kwargs)

        return step

    def dump(self, folder: Path) -> None:
        """Write each program's StableHLO to a folder."""
        import jax

        folder.mkdir(parents=True, exist_ok=True)
        for program in self.lowered.programs:
            with jax.enable_x64(True), jax.default_device(_compat_jax.cpu_device()):
                text = jax.jit(program.function).lower(*program.structs).as_text()
            number = len(list(folder.glob("*.stablehlo.mlir")))
            (folder / f"{number:03d}-graph.stablehlo.mlir").write_text(text, encoding="utf-8")


def _on_device(jitted: Callable[..., Any], device: Any) -> Any:
    """Call a program without arguments, which say where others run."""
    import jax

    with jax.default_device(device):
        return jitted()


def _deliver(meta: Any, form: Any) -> Callable[[Any], Any]:
    if not isinstance(meta, torch.Tensor):
        return lambda array: array
    to_torch, device = bridges.to_torch(meta.device.type), meta.device
    dtype, ndim = meta.dtype, meta.dim()

    def plain(array: Any) -> torch.Tensor:
        if 0 in array.shape:  # DLPack gives those strides of their own
            return torch.empty(array.shape, dtype=dtype, device=device)
        return to_torch(array)

    if form is None or not ndim:
        return plain
    return lambda array: form.of_tensor(plain(array))


def _spread(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A copy with gaps in memory, as eager leaves them where a result is part of something."""
    found = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)


def _blank(node: Node, lowered: Any) -> torch.Tensor:
    """A tensor without contents, for an operator that only looks at its shape."""
    meta = node.meta["val"]
    shape = lowered.evaluator.sizes.all(meta.shape)
    return torch.empty(shape, dtype=meta.dtype, device=meta.device)
