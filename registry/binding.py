"""A call of a kernel that is described but not run: for checks, compilation and tuning."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tpu_kernels.config import settings
from tpu_kernels.errors import ArgumentError, ConfigError
from tpu_kernels.registry.caller import make_converter
from tpu_kernels.registry.config_table import ConfigChoice, ConfigRequest
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.layout import split, static_values
from tpu_kernels.registry.operator import Call
from tpu_kernels.registry.programs import flat_function

if TYPE_CHECKING:
    from tpu_kernels.registry.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Bound:
    """A kernel with arguments.

    Attributes:
        kernel: The kernel.
        call: Layout and abstract values.
        tensors: The flat torch tensors.
        dynamics: Values of the dynamic scalars.
    """

    kernel: Kernel
    call: Call
    tensors: tuple[torch.Tensor, ...]
    dynamics: tuple[Any, ...]

    @property
    def avals(self) -> list[Any]:
        """A `jax.ShapeDtypeStruct` per tensor."""
        return list(self.call.avals)

    @property
    def static(self) -> dict[str, Any]:
        """All static values by name; None for a tunable that is left open."""
        return static_values(self.kernel.spec.op_parameters, self.call.layout)

    @property
    def config(self) -> dict[str, Any]:
        """The tunables in force on the simulated chip."""
        return self.choice(settings().sim_chip).config

    def choice(self, target: str) -> ConfigChoice:
        """The configuration on a chip, with its provenance."""
        return self.kernel.choices.decide(self.call, self.static, target)

    def request(self, target: str) -> ConfigRequest:
        """What identifies this call to the tuning cache."""
        return self.kernel.choices.request(self.call, self.static, target)

    def function(self, interpret: Any = False, target: str | None = None) -> Callable[..., Any]:
        """The kernel as a JAX function of its flat arrays alone; static values and configuration
        are fixed.

        Args:
            interpret: False to lower Pallas calls for a TPU, True (or `pltpu.InterpretParams`) to
                interpret them.
            target: Chip whose configuration applies; the simulated chip by default.

        Returns:
            ``fn(*arrays) -> tuple of arrays``.
        """
        definition = self.kernel.operator.definition
        engine = Engine(
            interpret=interpret,
            x64=definition.int64 == "exact",
            target=target or settings().sim_chip,
        )
        flat = flat_function(definition, self.call, engine, self.dynamics)

        def function(*arrays: Any) -> tuple[Any, ...]:
            with engine.scope():
                return flat(*arrays)

        function.__name__ = function.__qualname__ = self.kernel.spec.opname
        return function


def bind(
    kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], config: Mapping[str, Any] | None
) -> Bound:
    """Bind arguments to a kernel; see `Kernel.bind`."""
    spec = kernel.spec
    parameters = spec.op_parameters
    if spec.read_config is not None and config is not None:
        config = spec.read_config(config)
    config = dict(getattr(config, "config", config) or {})
    _check_config(kernel, config)
    named = {k: v for k, v in kwargs.items() if k not in config}
    try:
        # What the config supplies need not be passed, whatever the author's signature says.
        bound = inspect.Signature([p for p in _signature(kernel) if p.name not in config]).bind(
            *args, **named
        )
    except TypeError as error:
        raise ArgumentError(f"kernel {spec.name!r}: {error}", where=str(spec.source)) from error
    bound.apply_defaults()
    values = {**bound.arguments, **config}
    arguments = []
    for p in parameters:
        value = values[p.name]
        arguments.append(
            value if p.kind.is_tensor and p.to_schema is None else make_converter(spec, p)(value)
        )
    layout, tensors, dynamics = split(parameters, arguments)
    _check_tensors(kernel, tensors)
    kernel.operator.check_dtypes(layout, tensors)
    return Bound(kernel, kernel.operator.call_of(layout, tensors), tuple(tensors), tuple(dynamics))


def _signature(kernel: Kernel) -> list[inspect.Parameter]:
    return list(inspect.signature(kernel._call).parameters.values())


def _check_config(kernel: Kernel, config: Mapping[str, Any]) -> None:
    static = [p.name for p in kernel.spec.op_parameters if not p.kind.is_tensor]
    for name in config:
        if name not in static:
            raise ConfigError(
                f"kernel {kernel.name!r}: config names {name!r}, which is not a static parameter",
                where=str(kernel.spec.source),
                hint=f"static parameters: {', '.join(static) or 'none'}",
            )


def _check_tensors(kernel: Kernel, tensors: list[Any]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"kernel {kernel.name!r}: expected a torch tensor, got {type(tensor).__name__}",
                where=str(kernel.spec.source),
            )
