"""Config spaces: every way of naming candidates becomes a list of configs.

A space is one of: a dict of lists (all combinations), a list of dicts, a list of Helion configs, or
a function that returns one of these for given arguments. Functions of the author's (spaces,
constraints, buckets) are called by name: they receive those of the kernel's arguments, and for
constraints of the config's values, that their own parameters name.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tpu_kernels.errors import ArgumentError, ConfigError
from tpu_kernels.tuning.records import canonical, encode, frozen

LIMIT = 20_000
"""The largest space that is listed; a larger one needs a function that picks from it."""


def expand(
    space: Any, arguments: Mapping[str, Any] | None = None, *, kernel: str = "kernel"
) -> list[dict[str, Any]]:
    """List the configs of a space, each once, in the order given.

    Args:
        space: A dict of lists, a list of dicts or Helion configs, or a function that returns one.
        arguments: The kernel's arguments by name, for a space that is a function of them.
        kernel: Name of the kernel, for messages.

    Returns:
        The configs, with the values as they were given.

    Raises:
        ConfigError: The space is none of these, is empty, or has more than `LIMIT` configs.

    Example:
        >>> expand({"block_m": [128, 256], "stages": [2]})
        [{'block_m': 128, 'stages': 2}, {'block_m': 256, 'stages': 2}]
        >>> expand(lambda m: {"block": [b for b in (8, 16) if m % b == 0]}, {"m": 24, "n": 5})
        [{'block': 8}]
    """
    if callable(space) and not isinstance(space, Mapping):
        space = call_by_name(space, arguments or {}, what="configs", kernel=kernel)
    if isinstance(space, Mapping):
        configs = _combinations(space, kernel)
    elif isinstance(space, Iterable) and not isinstance(space, str | bytes):
        configs = [_as_config(item, kernel) for item in space]
    else:
        raise ConfigError(
            f"kernel {kernel!r}: configs is a {type(space).__name__}",
            hint="give a dict of lists, a list of dicts, or a function that returns one",
        )
    unique: dict[str, dict[str, Any]] = {}
    for config in configs:
        unique.setdefault(identity(config), config)
    if not unique:
        raise ConfigError(f"kernel {kernel!r}: there is no config in the given space")
    return list(unique.values())


def _combinations(space: Mapping[str, Any], kernel: str) -> list[dict[str, Any]]:
    choices: list[list[Any]] = []
    for name, values in space.items():
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ConfigError(
                f"kernel {kernel!r}: configs[{name!r}] is {values!r}, not a list of values",
                hint=f"write {{{name!r}: [{values!r}]}} for one value, or a list of dicts",
            )
        choices.append(list(values))
    if (size := math.prod(map(len, choices))) > LIMIT:
        raise ConfigError(
            f"kernel {kernel!r}: the space has {size} configs, more than {LIMIT}",
            hint="give fewer values, or a function that returns the list worth trying",
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*choices)]


def _as_config(item: Any, kernel: str) -> dict[str, Any]:
    if isinstance(inner := getattr(item, "config", None), Mapping):  # helion.Config and its kin
        item = inner
    if not isinstance(item, Mapping) or not all(isinstance(name, str) for name in item):
        raise ConfigError(
            f"kernel {kernel!r}: {item!r} is not a config",
            hint='a config is a dict of parameter values, such as {"block_m": 128}',
        )
    return dict(item)


def identity(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal configs, tuples and lists taken for one another."""
    try:
        return canonical(encode(config))
    except ArgumentError:
        return repr(sorted(config.items(), key=lambda item: item[0]))


def same_config(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two configs are the same once tuples and lists are taken for one another.

    Example:
        >>> same_config({"block": (8, 128)}, {"block": [8, 128]}), same_config({"n": 1}, {"n": 1.0})
        (True, False)
    """
    return identity(a) == identity(b)


def check_names(
    configs: Sequence[Mapping[str, Any]], allowed: Iterable[str], *, kernel: str, where: str = ""
) -> None:
    """Refuse configs that name what the kernel does not have.

    Args:
        configs: The candidates.
        allowed: Names of the parameters that a config may set.
        kernel: Name of the kernel, for the message.
        where: The kernel's ``file:line``.

    Raises:
        ConfigError: A config names another parameter.
    """
    known = list(allowed)
    for config in configs:
        unknown = [name for name in config if name not in known]
        if unknown:
            raise ConfigError(
                f"kernel {kernel!r}: a config sets {unknown[0]!r}, which is no parameter of it",
                where=where or None,
                hint=f"it may set {', '.join(known)}" if known else "it has no parameter to tune",
            )


def violation(
    constraints: Any,
    config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    kernel: str = "kernel",
) -> str | None:
    """Say which constraint a config violates.

    Args:
        constraints: None, a function, or a sequence of functions. Each returns true for a config to
            try; false, or a text with the reason, for one to leave out; raising is a reason, too.
        config: The candidate.
        arguments: The kernel's arguments by name.
        kernel: Name of the kernel, for messages.

    Returns:
        The reason in one line, None if all constraints hold.

    Example:
        >>> fits = lambda block, m: m % block == 0 or f"{block} does not divide {m}"
        >>> violation(fits, {"block": 16}, {"m": 24}), violation(fits, {"block": 8}, {"m": 24})
        ('16 does not divide 24', None)
    """
    if constraints is None:
        return None
    rules = [constraints] if callable(constraints) else list(constraints)
    available = {**arguments, **config, "config": dict(config)}
    for rule in rules:
        try:
            verdict = call_by_name(rule, available, what="constraint", kernel=kernel)
        except ConfigError:
            raise
        except Exception as error:
            return f"constraint {_place(rule)} raised {type(error).__name__}: {error}"
        if isinstance(verdict, str):
            return verdict
        if not verdict:
            return f"constraint {_place(rule)} does not hold"
    return None


def bucket_of(
    bucket: Callable[..., Any] | None, arguments: Mapping[str, Any], *, kernel: str = "kernel"
) -> Any:
    """Return the bucket that the author's function puts arguments into, None without a function.

    Args:
        bucket: A function of the kernel's arguments (by name); it returns any key value.
        arguments: The arguments by name; tensors need only have ``shape`` and ``dtype``.
        kernel: Name of the kernel, for messages.

    Example:
        >>> bucket_of(lambda m: -(-m // 128) * 128, {"m": 200, "n": 3})
        256
    """
    if bucket is None:
        return None
    return frozen(call_by_name(bucket, arguments, what="bucket", kernel=kernel))


_OTHER_NAMES = ("cfg", "conf")  # that people give to `config`


def call_by_name(
    function: Callable[..., Any], available: Mapping[str, Any], *, what: str, kernel: str
) -> Any:
    """Call a function with those of the available values that its parameters name.

    Raises:
        ConfigError: A parameter without a default names nothing that is available.
    """
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if name in _OTHER_NAMES and name not in available:
            name = "config"
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords |= {k: v for k, v in available.items() if k not in keywords}
        elif name in available:
            value = available[name]
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                keywords[parameter.name] = value
        elif parameter.default is parameter.empty:
            names = ", ".join(name for name in available if name != "config")
            raise ConfigError(
                f"kernel {kernel!r}: {what} function {_place(function)} asks for "
                f"{parameter.name!r}, which is no parameter of the kernel",
                hint=f"it is called by name with any of: {names}",
            )
    return function(*positional, **keywords)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
