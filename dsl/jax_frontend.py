"""The JAX and Pallas front end: a Python function on `jax.Array` becomes a `KernelSpec`.

Accepted are plain functions, functions under `jax.jit` or `functools.partial`, and `jax.custom_vjp`
or `jax.custom_jvp` functions (their own derivative rules are kept, since `jax.vjp` of the function
honours them).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_kernels.dsl.annotations import resolve
from tpu_kernels.dsl.signature import read_parameters, read_returns
from tpu_kernels.dsl.source import locate, unwrap
from tpu_kernels.dsl.spec import EMPTY, KernelSpec, Kind
from tpu_kernels.errors import SignatureError

_NAME = re.compile(r"[a-zA-Z]\w*(?:\.\w+)*::[a-zA-Z]\w*")
INT64_POLICIES = (None, "narrow_checked", "exact")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `tpu_kernel` that end up in the spec; see there for their meaning."""

    mutates_args: tuple[str, ...] = ()
    donate_args: tuple[str, ...] = ()
    dynamic_args: tuple[str, ...] = ()
    backward: str | None = "jax"
    vmap: str | None = "jax"
    autocast: Any = None
    sharding: Any = None
    int64: str | None = None
    flops: Callable[..., int] | None = None
    configs: Any = None
    constraints: Any = None
    bucket: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    precision: str | None = None
    cache_dir: Any = None


def qualified_name(name: str | None, fn: Callable[..., Any], where: str) -> str:
    """The operator's ``"namespace::op"`` name; a bare name or none lands in namespace ``tpu``.

    Raises:
        SignatureError: The name is not made of identifiers, or begins with an underscore.

    Example:
        >>> def scale(x): ...
        >>> qualified_name(None, scale, "f.py:1"), qualified_name("mine::scale", scale, "f.py:1")
        ('tpu::scale', 'mine::scale')
    """
    name = name or unwrap(fn).__name__
    if "::" not in name:
        name = f"tpu::{name}"
    if not _NAME.fullmatch(name):
        raise SignatureError(
            f"{name!r} is not a valid operator name",
            where=where,
            hint='use "namespace::op" of identifiers that do not begin with an underscore',
        )
    return name


def from_function(
    fn: Callable[..., Any],
    name: str | None,
    options: Options,
    caller_locals: Mapping[str, Any] | None = None,
) -> KernelSpec:
    """Build the spec of a kernel written as a JAX function.

    Args:
        fn: The author's function on `jax.Array`.
        name: ``"namespace::op"``, or None for the function's own name in namespace ``tpu``.
        options: The decorator's options.
        caller_locals: Local names of the decorating scope, to resolve postponed annotations.

    Returns:
        The `KernelSpec`.

    Raises:
        SignatureError: The signature or an option cannot become an operator; says which parameter
            and why.

    Example:
        >>> import jax
        >>> def scale(x: jax.Array, alpha: float = 2.0) -> jax.Array:
        ...     return x * alpha
        >>> from_function(scale, "doc::scale", Options()).schema
        'scale(Tensor x, float alpha=2.0) -> Tensor'
    """
    if not callable(fn):
        raise SignatureError(f"tpu_kernel decorates a function, got {type(fn).__name__}")
    source = locate(fn)
    where = str(source)
    kernel = qualified_name(name, fn, where)
    inner = unwrap(fn)
    if not inspect.isfunction(inner):
        raise SignatureError(
            f"kernel {kernel!r}: tpu_kernel decorates a Python function, got "
            f"{type(inner).__name__}",
            where=where,
        )
    resolved = resolve(inner, caller_locals, where)
    parameters = read_parameters(
        fn,
        resolved,
        kernel=kernel,
        where=where,
        dynamic_args=options.dynamic_args,
        tunables=tunable_names(options.configs, inner),
    )
    returns = read_returns(
        resolved.get("return", EMPTY),
        kernel=kernel,
        where=where,
        mutates=bool(options.mutates_args),
    )
    settings = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.name != "dynamic_args"
    }
    spec = KernelSpec(
        name=kernel,
        jax_fn=fn,
        parameters=parameters,
        returns=returns,
        source=source,
        doc=inspect.getdoc(inner),
        **settings,
    )
    check_options(spec, where)
    return spec


def tunable_names(configs: Any, fn: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that a ``configs`` option makes the toolkit choose.

    A mapping or a list of mappings names them; a function of the arguments does not, then all
    keyword-only parameters without tensors are meant.

    Example:
        >>> tunable_names({"block_m": [128, 256]}, print), tunable_names(None, print)
        (('block_m',), ())
    """
    if configs is None:
        return ()
    if isinstance(configs, Mapping):
        return tuple(configs)
    if callable(configs):
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        return tuple(
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind is keyword_only and p.name != "interpret"
        )
    names: dict[str, None] = {}
    for config in configs:
        names.update(dict.fromkeys(getattr(config, "config", config)))
    return tuple(names)


def check_options(spec: KernelSpec, where: str) -> None:
    """Refuse options that contradict the signature.

    Raises:
        SignatureError: Names the option, the value, and what is accepted.
    """
    tensors = [p.name for p in spec.parameters if p.kind.is_tensor]
    for option, names in (("mutates_args", spec.mutates_args), ("donate_args", spec.donate_args)):
        for name in names:
            if name not in tensors:
                raise SignatureError(
                    f"kernel {spec.name!r}: {option} names {name!r}, which is not a tensor "
                    "parameter",
                    where=where,
                    hint=f"tensor parameters: {', '.join(tensors) or 'none'}",
                )
    for name in spec.mutates_args:
        if spec.parameter(name).kind not in (Kind.TENSOR, Kind.LIST):
            raise SignatureError(
                f"kernel {spec.name!r}: mutates_args names {name!r}, but an optional argument "
                "cannot be mutated",
                where=where,
            )
    if not spec.returns.slots and not spec.mutates_args:
        raise SignatureError(
            f"kernel {spec.name!r} returns nothing and mutates nothing, so a compiler would drop "
            "the call",
            where=where,
            hint="return an array, or name the written argument: mutates_args=('out',) and return "
            "{'out': new_out}",
        )
    _check_choice(spec, "int64", spec.int64, INT64_POLICIES, where)
    _check_choice(spec, "backward", spec.backward, ("jax", "recompute", "reference", None), where)
    _check_choice(spec, "vmap", spec.vmap, ("jax", None), where)
    if spec.backward == "reference" and spec.reference is None:
        raise SignatureError(
            f"kernel {spec.name!r}: backward='reference' needs reference=", where=where
        )


def _check_choice(
    spec: KernelSpec, option: str, value: Any, choices: Sequence[Any], where: str
) -> None:
    if value not in choices:
        raise SignatureError(
            f"kernel {spec.name!r}: {option}={value!r} is not one of "
            f"{', '.join(map(repr, choices))}",
            where=where,
        )
