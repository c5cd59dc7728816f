"""Which configuration a call of a kernel uses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tpu_kernels.dsl.spec import EMPTY, KernelSpec
from tpu_kernels.errors import ConfigError
from tpu_kernels.registry import config_table, observing
from tpu_kernels.registry.config_table import ConfigChoice, ConfigRequest
from tpu_kernels.registry.engine import Engine
from tpu_kernels.registry.operator import Call


class Choices:
    """Chooses values for what a call leaves open.

    Open are the kernel's declared tunables that the caller left out. Other keyword-only parameters
    stay at their declared default unless somebody tuned exactly them: then a caller's value that
    equals the default counts as "left out" too.

    Args:
        spec: The kernel.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.declared: dict[str, Any] = {
            p.name: None if p.default is EMPTY else p.default for p in spec.parameters if p.tunable
        }
        self.adjustable = tuple(
            p.name
            for p in spec.op_parameters
            if p.keyword_only and not p.tunable and not p.kind.is_tensor and p.default is not EMPTY
        )

    def choose(self, call: Call, statics: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
        """Values for the open parameters of a call (a `tpu_kernels.registry.programs.Chooser`)."""
        observing.tell(self.spec, call, statics)
        return self.decide(call, statics, engine.target).config

    def decide(self, call: Call, statics: Mapping[str, Any], target: str) -> ConfigChoice:
        """The configuration of a call, with its provenance.

        Args:
            call: Layout and abstract values.
            statics: Static values by name; None for a tunable that the caller left out.
            target: Chip name.

        Raises:
            ConfigError: A tunable without default was left out, and nothing is known for it.
        """
        explicit = {n: statics[n] for n in self.declared if statics.get(n) is not None}
        open_names = [n for n in self.declared if n not in explicit]
        adjustable = [
            n
            for n in self.adjustable
            if n in statics and statics[n] == self.spec.parameter(n).default
        ]
        found = self._find(call, statics, target) if open_names or adjustable else None
        if found is not None:
            known = {k: v for k, v in found.config.items() if k in open_names or k in adjustable}
            if known:
                values = {
                    **{n: self.declared[n] for n in open_names},
                    **explicit,
                    **self._typed(known),
                }
                return ConfigChoice(values, found.provenance, found.reason)
        if not open_names:
            return ConfigChoice(explicit, "explicit" if explicit else "default", "")
        return self._declared(open_names, explicit)

    def _declared(self, open_names: list[str], explicit: dict[str, Any]) -> ConfigChoice:
        values = dict(explicit)
        for name in open_names:
            p = self.spec.parameter(name)
            if p.default is EMPTY:
                first = self._first_candidate(name)
                if first is None:
                    raise ConfigError(
                        f"kernel {self.spec.name!r}: nothing is known for the tunable {name!r}",
                        where=str(self.spec.source),
                        hint=f"pass {name}=..., give it a default, or run tpu_kernels.autotune",
                    )
                values[name] = first
            else:
                values[name] = p.default
        return ConfigChoice(
            values, "default", "nothing is tuned for this call; these are the declared defaults"
        )

    def _first_candidate(self, name: str) -> Any:
        configs = self.spec.configs
        if isinstance(configs, Mapping):
            return next(iter(configs.get(name, ())), None)
        if isinstance(configs, (list, tuple)) and configs:
            first: Any = getattr(configs[0], "config", configs[0])
            return first.get(name)
        return None

    def _typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values from a file as the kernel's annotations want them (lists become tuples)."""
        return {name: self.spec.parameter(name).for_kernel(value) for name, value in values.items()}

    def _find(self, call: Call, statics: Mapping[str, Any], target: str) -> ConfigChoice | None:
        if not all(isinstance(size, int) for aval in call.avals for size in aval.shape):
            return None  # symbolic sizes: the shapes of results do not depend on the configuration
        return config_table.find(self.request(call, statics, target))

    def request(self, call: Call, statics: Mapping[str, Any], target: str) -> ConfigRequest:
        """The question that is put to the configuration sources."""
        arrays = tuple((tuple(a.shape), np.dtype(a.dtype).name) for a in call.avals)
        # A value other than the default, such as transpose_x=True, makes it another computation.
        left_out = {
            *self.declared,
            *(n for n in self.adjustable if statics.get(n) == self.spec.parameter(n).default),
        }
        return ConfigRequest(
            kernel=self.spec.name,
            source_hash=self.spec.source.digest,
            arrays=arrays,
            static={k: v for k, v in statics.items() if k not in left_out},
            target=target,
            bucket=self._bucket(call),
            default=dict(self.declared),
        )

    def _bucket(self, call: Call) -> Any:
        if self.spec.bucket is None:
            return None
        with contextlib.suppress(
            TypeError
        ):  # a bucket function of fewer arguments than the call has tensors
            return self.spec.bucket(*call.avals)
        return None
