"""The Helion front end: a `helion.Kernel` becomes a `KernelSpec`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tpu_kernels import _compat_helion
from tpu_kernels.dsl import helion_config
from tpu_kernels.dsl.annotations import resolve
from tpu_kernels.dsl.helion_function import HelionFunction
from tpu_kernels.dsl.jax_frontend import Options, check_options, qualified_name
from tpu_kernels.dsl.signature import INTERPRET, read_parameters, read_returns
from tpu_kernels.dsl.source import locate
from tpu_kernels.dsl.spec import EMPTY, KernelSpec, Kind, Parameter
from tpu_kernels.errors import SignatureError

is_kernel = _compat_helion.is_kernel


def from_kernel(
    kernel: Any,
    name: str | None,
    options: Options,
    caller_locals: Mapping[str, Any] | None = None,
) -> KernelSpec:
    """Build the spec of a Helion kernel.

    Args:
        kernel: The `helion.Kernel`.
        name: ``"namespace::op"``, or None for the function's own name in namespace ``tpu``.
        options: The decorator's options.
        caller_locals: Local names of the decorating scope, to resolve postponed annotations.

    Returns:
        The `KernelSpec`; its operator takes one parameter more, a keyword ``config``.

    Raises:
        SignatureError: The signature or an option cannot become an operator; says which parameter
            and why.
    """
    fn = kernel.fn
    source = locate(fn)
    where = str(source)
    qualified = qualified_name(name, fn, where)
    _refuse(options, qualified, where)
    resolved = resolve(fn, caller_locals, where)
    constants = _constants(fn, resolved, qualified, where)
    parameters = list(read_parameters(fn, resolved, kernel=qualified, where=where))
    parameters = [
        dataclasses.replace(p, schema_type="Scalar") if p.name in constants else p
        for p in parameters
    ]
    config_name = helion_config.NAME
    if any(p.name == config_name for p in parameters):
        config_name = "helion_config"
    parameters.append(_config_parameter(config_name))
    if not any(p.kind is Kind.INTERPRET for p in parameters):
        parameters.append(Parameter(INTERPRET, Kind.INTERPRET, "", keyword_only=True))
    returns = read_returns(
        resolved.get("return", EMPTY),
        kernel=qualified,
        where=where,
        mutates=bool(options.mutates_args),
    )
    settings = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.name not in ("dynamic_args", "backward", "vmap", "configs")
    }
    digest = _digest(kernel, source.digest)
    function = HelionFunction(kernel, options.mutates_args, where, config_name, digest)
    spec = KernelSpec(
        name=qualified,
        jax_fn=function,
        parameters=tuple(parameters),
        returns=returns,
        source=dataclasses.replace(source, digest=digest),
        language="helion",
        doc=inspect.getdoc(fn),
        # JAX can neither differentiate nor batch what Helion generates.
        backward=None if options.backward == "jax" else options.backward,
        vmap=None,
        configs=_configs(options.configs, config_name),
        read_config=_Reader(config_name),
        config_space=function.space,
        **settings,
    )
    check_options(spec, where)
    return spec


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads configs of one kernel (a class, so that specs can be pickled)."""

    name: str

    def __call__(self, value: Any) -> dict[str, Any]:
        return helion_config.read(value, self.name)


def _config_parameter(name: str) -> Parameter:
    return Parameter(
        name,
        Kind.STATIC,
        "str?",
        default=None,
        keyword_only=True,
        to_schema=helion_config.to_text,
        tunable=True,
        annotation="helion.Config | None",
    )


def _configs(configs: Any, name: str) -> Any:
    """The candidates of ``configs=`` as configs of the operator's parameter."""
    if configs is None or callable(configs):
        return configs
    if isinstance(configs, Mapping):
        return configs if name in configs else {name: _product(configs)}
    return [helion_config.read(c, name) for c in configs]


def _product(space: Mapping[str, Any]) -> list[str]:
    import itertools

    names = list(space)
    return [
        helion_config.to_text(dict(zip(names, values, strict=True)))
        for values in itertools.product(*(space[n] for n in names))
    ]


def _refuse(options: Options, kernel: str, where: str) -> None:
    if options.dynamic_args:
        raise SignatureError(
            f"kernel {kernel!r}: dynamic_args are for JAX functions; Helion makes a program for "
            "each number",
            where=where,
            hint="pass a tensor for a value that varies from call to call",
        )
    if options.backward == "recompute":
        raise SignatureError(
            f"kernel {kernel!r}: JAX cannot differentiate a Helion kernel",
            where=where,
            hint="define a backward with @kernel.backward, or pass backward='reference'",
        )
    if options.int64 == "exact":
        raise SignatureError(
            f"kernel {kernel!r}: Helion's Pallas backend has no 64-bit types",
            where=where,
            hint="int64='narrow_checked' takes integers that fit into 32 bits",
        )


def _constants(
    fn: Callable[..., Any], resolved: dict[str, Any], kernel: str, where: str
) -> set[str]:
    """Parameters annotated `hl.constexpr`: their type is that of the default, or any number.

    Changes the annotations in place.
    """
    import helion.language as hl

    any_number = set()
    for p in inspect.signature(fn).parameters.values():
        if resolved.get(p.name) is not hl.constexpr:
            continue
        default = getattr(p.default, "value", p.default)
        if default is EMPTY:
            any_number.add(p.name)
            resolved[p.name] = int
        elif isinstance(default, (bool, int, float, str)):
            resolved[p.name] = type(default)
        else:
            raise SignatureError(
                f"kernel {kernel!r}: the default of the constant {p.name!r} is a "
                f"{type(default).__name__}",
                where=where,
                hint="a constant is an int, float, bool or str",
            )
    return any_number


def _digest(kernel: Any, of_function: str) -> str:
    """Hash of the kernel's function, its declared configs and what else decides its code."""
    import hashlib

    parts = [of_function, str(kernel.settings.static_shapes)]
    parts += [helion_config.to_text(c) for c in kernel.configs]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
