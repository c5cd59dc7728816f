"""A whole graph as one JAX function for a target: what has no lowering is named, not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tpu_kernels.lowering import fakes, plan
from tpu_kernels.lowering.context import Keys, drawing_from
from tpu_kernels.lowering.evaluate import Evaluator, constant
from tpu_kernels.lowering.overriding import Overrides
from tpu_kernels.lowering.values import expand, is_array, jax_dtype
from tpu_kernels.registry.engine import Engine

COPY = "aten::copy_"


@dataclasses.dataclass
class WholeGraph:
    """A graph as a function of arrays.

    Attributes:
        graph: The graph.
        inputs: A tensor (values do not count) for each placeholder.
        draws: Whether its function takes a random key as its last argument.
        unlowered: After a trace, for each operator without a lowering, why; its results are zeros.
        inlined: After a trace, the names of the kernels in it.
    """

    graph: GraphModule
    inputs: Sequence[torch.Tensor]
    draws: bool = dataclasses.field(init=False)
    unlowered: dict[str, str] = dataclasses.field(default_factory=dict)
    inlined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.draws = any(plan.draws(node) for node in plan.calls(self.graph))

    def avals(self) -> list[Any]:
        """Shape and dtype of each argument: 64-bit types are 32 bits wide on a TPU."""
        import jax

        with jax.enable_x64(False):
            found = [jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(t.dtype)) for t in self.inputs]
            if self.draws:
                found.append(jax.ShapeDtypeStruct((2,), "uint32"))
        return found

    def trace(self, engine: Engine, *arrays: Any) -> list[Any]:
        """Evaluate the graph on arrays, while JAX traces.

        Args:
            engine: How kernels are traced.
            *arrays: One for each input, and the data of a random key if `draws`.

        Returns:
            The arrays of the graph's outputs, then the new values of the inputs that it writes to.
        """
        import jax

        sizes = fakes.Sizes()
        evaluator = Evaluator(engine, sizes, Overrides())
        values: dict[Node, Any] = {}
        written: list[Any] = []
        given = list(arrays)
        keys = Keys(jax.random.wrap_key_data(given.pop())) if self.draws else None
        values.update(zip(fakes.placeholders(self.graph), given, strict=True))
        with jax.enable_x64(False), drawing_from(keys):
            for node in self.graph.graph.nodes:
                if node.op == "get_attr":
                    values[node] = constant(getattr(self.graph, node.target))
                elif node.op.startswith("call_"):
                    self._node(node, values, written, evaluator)
        self.unlowered = {str(n.target): why for n, why in evaluator.unlowered.items()}
        self.inlined = tuple(dict.fromkeys(o.definition.name for o in evaluator.launches))
        results: list[Any] = []
        map_arg(plan.outputs(self.graph), lambda n: results.append(values[n]))
        return [r for r in results if is_array(r)] + written

    def _node(
        self, node: Node, values: dict[Node, Any], written: list[Any], evaluator: Evaluator
    ) -> None:
        target: Any = node.target
        if plan.writes(node) and target.name() == COPY:
            old, new = (values[a] for a in node.args[:2] if isinstance(a, Node))
            values[node] = expand(new.astype(old.dtype), old.shape)
            written.append(values[node])
            return
        evaluator.run([node], values)
