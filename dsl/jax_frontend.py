"""The JAX and Pallas front end: a Python function on `jax.Array` becomes a `KernelSpec`.

Accepted are plain functions, functions under `jax.jit` or `functools.partial`, and `jax.custom_vjp`
or `jax.custom_jvp` functions (their own derivative rules are kept, since `jax.vjp` of the function
honours them).
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tpu_kernels.dsl.annotations import classify, resolve
from tpu_kernels.dsl.signature import read_parameters, read_returns
from tpu_kernels.dsl.source import locate, unwrap
from tpu_kernels.dsl.spec import EMPTY, KernelSpec, Kind
from tpu_kernels.errors import SignatureError

_RESERVED = ("aten", "at", "prim", "prims", "torch", "pytorch")
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
        SignatureError: The name is not made of identifiers, begins with an underscore, or is in a
            namespace of torch's.

    Example:
        >>> def scale(x): ...
        >>> qualified_name(None, scale, "f.py:1"), qualified_name("mine::scale", scale, "f.py:1")
        ('tpu::scale', 'mine::scale')
    """
    name = name or unwrap(fn).__name__
    if "::" not in name:
        name = f"tpu::{name}"
    namespace, _, opname = name.partition("::")
    if not _NAME.fullmatch(name) or keyword.iskeyword(namespace) or keyword.iskeyword(opname):
        raise SignatureError(
            f"{name!r} is not a valid operator name",
            where=where,
            hint='use "namespace::op" of identifiers that do not begin with an underscore',
        )
    if namespace in _RESERVED:
        raise SignatureError(
            f"kernel {name!r}: namespace {namespace!r} is torch's own, which treats what is in it "
            "as built in",
            where=where,
            hint=f"choose another namespace; override('{name}', kernel) replaces such an operator",
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
    _check_values(options, kernel, where)
    parameters = read_parameters(
        fn,
        resolved,
        kernel=kernel,
        where=where,
        dynamic_args=options.dynamic_args,
        tunables=_tunables(options, inner, resolved),
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


def _tunables(
    options: Options, fn: Callable[..., Any], resolved: Mapping[str, Any]
) -> tuple[str, ...]:
    names = tunable_names(options.configs, fn)
    if not callable(options.configs):
        return names
    free = [name for name in names if name in resolved and name not in options.dynamic_args]
    meanings = {name: classify(resolved[name]) for name in free}
    return tuple(
        name for name, meaning in meanings.items() if meaning and meaning.kind is Kind.STATIC
    )


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


def _check_values(options: Options, kernel: str, where: str) -> None:
    """Refuse options of a wrong kind, whose mistake would only come up in some later call."""

    def refuse(option: str, wanted: str) -> SignatureError:
        value = getattr(options, option)
        return SignatureError(f"kernel {kernel!r}: {option}={value!r} is not {wanted}", where=where)

    for option in ("flops", "constraints", "bucket", "reference"):
        value = getattr(options, option)
        if value is not None and not callable(value):
            raise refuse(option, "a function")
    configs = options.configs
    if isinstance(configs, Mapping):
        if not all(map(_is_list, configs.values())):
            raise refuse("configs", "a dict of lists of candidates")
    elif configs is not None and not callable(configs) and not _is_list(configs):
        raise refuse("configs", "a dict of lists, a list of dicts, or a function")
    if options.cache_dir is not None and not isinstance(options.cache_dir, (str, os.PathLike)):
        raise refuse("cache_dir", "a path")
    if options.precision is not None:
        import jax

        try:
            with jax.default_matmul_precision(options.precision):
                pass
        except ValueError:
            raise refuse("precision", "one that jax.default_matmul_precision takes") from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


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
    both = sorted(set(spec.mutates_args) & set(spec.donate_args))
    if both:
        raise SignatureError(
            f"kernel {spec.name!r}: argument {both[0]!r} is in mutates_args and in donate_args",
            where=where,
            hint="what is written to is the caller's, what is donated is not any more",
        )
    for name in spec.mutates_args:
        if spec.parameter(name).kind not in (Kind.TENSOR, Kind.OPTIONAL, Kind.LIST):
            raise SignatureError(
                f"kernel {spec.name!r}: mutates_args names {name!r}, but a list that is optional "
                "or has holes cannot be mutated",
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
