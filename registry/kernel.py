"""`Kernel`: what `@tpu_kernel` returns, a complete torch operator made from a `KernelSpec`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpu_kernels import _compat_torch
from tpu_kernels.config import settings
from tpu_kernels.dsl.spec import KernelSpec, Source
from tpu_kernels.errors import GradientError, KernelError
from tpu_kernels.registry import (
    backward_contract,
    config_table,
    kernel_hooks,
    naming,
    policies,
    reference,
    sharding,
    within_jax,
)
from tpu_kernels.registry.autograd import Autograd
from tpu_kernels.registry.batching import Batching
from tpu_kernels.registry.binding import Bound, bind
from tpu_kernels.registry.caller import make_caller
from tpu_kernels.registry.choice import Choices
from tpu_kernels.registry.config_table import ConfigChoice
from tpu_kernels.registry.freshness import Freshness
from tpu_kernels.registry.operator import Definition, Operator
from tpu_kernels.registry.programs import kernel_program
from tpu_kernels.registry.stats import Counters, KernelStats


@_compat_torch.compiles_as(lambda kernel: kernel._call)
class Kernel:
    """A kernel as a torch operator; call it with torch tensors, or with JAX arrays inside JAX
    programs.

    Made by `tpu_kernel`, not directly.

    Attributes:
        name: Qualified operator name, ``"ns::op"``.
        spec: Everything known of the kernel.
        op: The `torch._ops.OpOverload` behind ``torch.ops.<ns>.<op>``.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self._counters = Counters()
        self.choices = Choices(spec)
        self._retired_by: Source | None = None
        answer = None if spec.reference is None else functools.partial(reference.flat_call, spec)
        self.operator = Operator(
            Definition(
                name=spec.name,
                schema=spec.schema,
                parameters=spec.op_parameters,
                returns=spec.returns.slots,
                program=kernel_program(spec, self.choices.choose),
                where=str(spec.source),
                kernel=spec.name,
                int64=spec.int64,
                mutated=spec.mutates_args,
                reference=answer,
                donated=spec.donate_args,
                flops=spec.flops,
                cache_dir=spec.cache_dir,
                freshness=Freshness(spec.name, spec.jax_fn) or None,
            ),
            self._counters,
        )
        self.op: torch._ops.OpOverload = self.operator.op
        try:
            self._complete(spec)
        except BaseException:
            self.operator.destroy()  # half an operator would keep the name
            raise
        kernel_hooks.add_kernel(self)

    def _complete(self, spec: KernelSpec) -> None:
        self.autograd = Autograd(
            self.operator, spec.backward, None if spec.backward != "reference" else spec
        )
        self.batching = Batching(self.operator, enabled=spec.vmap == "jax")
        self.sharding = sharding.read_rule(spec.sharding, spec)
        # What was registered by hand and is not in the spec: bundles take it along.
        self.customised: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        if spec.autocast is not None:
            for device_type in policies.AUTOCAST_KEYS:
                policies.register_autocast(self.operator, device_type, spec.autocast)
        if spec.flops is not None:
            policies.register_flops(self.operator, spec.flops)
            if spec.backward in ("jax", "recompute"):
                self.autograd.derivatives.prepare()
        self._call = make_caller(spec, self.op)
        functools.update_wrapper(
            self, spec.jax_fn, assigned=("__doc__", "__module__", "__qualname__"), updated=()
        )
        self.__signature__ = inspect.signature(self._call)

    # ------------------------------------------------------------------ calling
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel: on torch tensors as an operator, on JAX arrays by plain tracing."""
        if args and isinstance(args[0], torch.Tensor):
            return self._call(*args, **kwargs)
        return self._call_unusual(args, kwargs)

    def _call_unusual(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if within_jax.has_arrays(args, kwargs):
            bound = inspect.signature(self._call).bind(*args, **kwargs)
            bound.apply_defaults()
            return within_jax.call(self.spec, bound.arguments, self.choices.declared)
        return self._call(*args, **kwargs)

    def retire(self, by: Source) -> None:
        """Take the operator out of torch: another definition takes its name."""
        self._retired_by = by
        kernel_hooks.remove_kernel(self)
        self.batching.destroy()
        self.autograd.destroy()
        self.operator.destroy()

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise KernelError(
                f"kernel {self.name!r} of {self.spec.source} was replaced by a later definition",
                where=str(by),
                hint=f"use the new object, or torch.ops.{self.spec.namespace}.{self.spec.opname}",
            )

        self._call = refuse

    # ------------------------------------------------------------------ looking inside
    def bind(self, /, *args: Any, config: Mapping[str, Any] | None = None, **kwargs: Any) -> Bound:
        """Bind arguments without running anything.

        Args:
            *args: Arguments of the kernel (torch tensors on any device, fake and meta tensors
                included).
            config: Values for tunables or other static parameters, which win over ``kwargs``.
            **kwargs: Arguments by name.

        Returns:
            The `Bound` call: its JAX function, abstract values, static values and configuration.

        Raises:
            ArgumentError: An argument does not fit.
            ConfigError: ``config`` names an unknown parameter.
        """
        return bind(self, args, kwargs, config)

    def config_for(self, /, *args: Any, target: str | None = None, **kwargs: Any) -> ConfigChoice:
        """The configuration that a call with these arguments uses, and why.

        Args:
            *args: Arguments of the kernel.
            target: Chip name; the simulated chip by default.
            **kwargs: Arguments by name.

        Returns:
            A `ConfigChoice` with the values, where they come from, and the reason; where nothing is
            tuned for exactly this call, the reason says field by field how the nearest tuned one
            differs.
        """
        bound, chip = self.bind(*args, **kwargs), target or settings().sim_chip
        choice = bound.choice(chip)
        if not choice.config or choice.provenance in ("explicit", "tuned"):
            return choice
        told = config_table.explain(bound.request(chip))
        reason = "\n".join(filter(None, (choice.reason, told)))
        return dataclasses.replace(choice, reason=reason)

    def explain(self, /, *args: Any, **kwargs: Any) -> str:
        """Which configuration a call would use and why, as text."""
        choice = self.config_for(*args, **kwargs)
        values = (
            ", ".join(f"{k}={v!r}" for k, v in choice.config.items()) or "no tunable parameters"
        )
        lines = choice.reason.splitlines()
        return "\n  ".join([f"{self.name}: {values} ({choice.provenance})", *lines])

    def stats(self) -> KernelStats:
        """Counters of this process: launches, compilations, cache hits, fallbacks."""
        return self._counters.snapshot()

    # ------------------------------------------------------------------ customising, as torch's
    # CustomOpDef
    def backward(
        self, fn: Callable[..., Any] | None = None, *, language: str | None = None
    ) -> Callable[..., Any]:
        """Define the backward as a function; usable as a decorator.

        Args:
            fn: ``fn(grad, <inputs by name>)`` returns a dict of gradients by input name, or a tuple
                with one for each tensor input. ``grad`` is the output's gradient (a tuple of them,
                zeros where an output was unused, if there are several outputs). The new values of
                mutated arguments count as outputs after the others, and inputs are as they were
                before the call. Of the inputs it receives those that it names; a parameter ``out``
                receives the outputs, one called ``needs_input_grad`` a dict of flags. It may be a
                torch function, another `Kernel`, or a JAX function: that one becomes the operator
                ``<name>__bwd``, and `jax.vjp` of it is the second derivative.
            language: ``"jax"`` or ``"torch"``. By default a function is JAX's if a parameter is
                annotated with `jax.Array`.

        Returns:
            ``fn`` itself.

        Raises:
            GradientError: The function asks for what there is not.

        Example:
            >>> import jax, torch
            >>> import tpu_kernels as tk
            >>> @tk.tpu_kernel("doc::square")
            ... def square(x: jax.Array) -> jax.Array:
            ...     return x * x
            >>> @square.backward
            ... def square_backward(grad: jax.Array, x: jax.Array):
            ...     return {"x": 2 * x * grad}
            >>> x = torch.tensor(3.0, requires_grad=True)
            >>> square(x).backward()
            >>> x.grad
            tensor(6.)
        """
        if language not in (None, *backward_contract.LANGUAGES):
            raise GradientError(
                f"kernel {self.name!r}: no backward is written in {language!r}",
                where=str(self.spec.source),
                hint="language is 'jax' or 'torch'; left out, the annotations say it",
            )
        caller_locals = dict(sys._getframe(1).f_locals)

        def define(fn: Callable[..., Any]) -> Callable[..., Any]:
            written_in = language or (
                "torch"
                if isinstance(fn, Kernel)
                else backward_contract.language_of(fn, caller_locals)
            )
            if written_in == "jax":
                self.autograd.use_jax(fn, self.spec, self.choices.choose)
            else:
                self.autograd.use(fn, self.spec)
            self.customised.append(("backward", (fn,), {"language": written_in}))
            return fn

        return define if fn is None else define(fn)

    def register_fake(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Replace the derived fake kernel, as `torch.library.CustomOpDef.register_fake`."""
        torch.library.register_fake(self.name, fn, lib=self.operator.library, allow_override=True)
        self.customised.append(("register_fake", (fn,), {}))
        return fn

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Define the backward as `torch.library.CustomOpDef.register_autograd` does:
        ``backward(ctx, *grads)``."""
        self.autograd.use_context_style(backward, setup_context)
        self.customised.append(("register_autograd", (backward,), {"setup_context": setup_context}))

    def register_vmap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Replace the derived batching rule, as `torch.library.CustomOpDef.register_vmap`."""
        self.batching.use(fn)
        self.customised.append(("register_vmap", (fn,), {}))
        return fn

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> None:
        """Cast floating inputs under autocast, as `torch.library.CustomOpDef.register_autocast`."""
        policies.register_autocast(self.operator, device_type, cast_inputs)
        self.batching.inherit_autocast()
        self.customised.append(("register_autocast", (device_type, cast_inputs), {}))

    def register_sharding(self, rule: Any) -> Any:
        """State how the kernel may be split over devices; usable as a decorator.

        Args:
            rule: An einsum-like string such as ``"m k, k n -> m n; sum k"``, or a function with the
                contract of `torch.distributed.tensor.experimental.register_sharding`. Replaces the
                ``sharding`` option.

        Returns:
            ``rule`` itself.

        Raises:
            SignatureError: The string cannot be parsed, or does not fit the kernel's signature.
        """
        self.sharding = sharding.read_rule(rule, self.spec)
        self.customised.append(("register_sharding", (rule,), {}))
        return rule

    # ------------------------------------------------------------------ plumbing
    def __repr__(self) -> str:
        signature = " (replaced)" if self._retired_by else str(inspect.signature(self._call))
        return f"<Kernel {self.name}{signature}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name, self.spec.source.module)


def _by_name(name: str, module: str) -> Kernel:
    """Unpickle a kernel: import the module that defines it, then look it up."""
    import importlib

    if naming.lookup(name) is None:
        importlib.import_module(module)
    kernel = naming.lookup(name)
    if kernel is None:
        raise KernelError(f"kernel {name!r} is not defined by its module {module!r}")
    return kernel


def register(spec: KernelSpec, *, replace: bool = False, kind: type[Kernel] = Kernel) -> Kernel:
    """Make a kernel of a spec and register its operator.

    Args:
        spec: The kernel.
        replace: Whether to take the name over from another place.
        kind: `Kernel`, or a class derived from it.

    Returns:
        The `Kernel`.

    Raises:
        NameClashError: Another place owns the name.
    """
    sharding.read_rule(spec.sharding, spec)  # a broken rule must not take the old kernel away
    policies.check_autocast(spec)
    with naming.lock:
        naming.make_way(spec, replace=replace)
        kernel = kind(spec)
        naming.enter(kernel)
    return kernel
