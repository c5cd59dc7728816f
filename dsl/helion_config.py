"""Configs of Helion kernels, as a text that an operator schema, keys and files can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tpu_kernels import _compat_helion
from tpu_kernels.errors import ConfigError

NAME = "config"
"""The parameter of a Helion kernel's operator that takes its config."""


def to_text(value: Any) -> str:
    """A config as canonical JSON.

    Args:
        value: A `helion.Config`, a dict of its values, or JSON of one.

    Raises:
        TypeError: It is none of these.
        ValueError: The text is not JSON of a dict.

    Example:
        >>> to_text({"num_warps": 4, "block_sizes": [32, 128]})
        '{"block_sizes": [32, 128], "num_warps": 4}'
    """
    if isinstance(value, str):
        value = json.loads(value)
    elif _compat_helion.is_config(value):
        value = dict(value.config)
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a helion.Config or a dict, got {type(value).__name__}")
    return json.dumps(dict(value), sort_keys=True)


def from_text(text: Any) -> Any:
    """The `helion.Config` of such a text; a `helion.Config` unchanged."""
    import helion

    return helion.Config(**json.loads(to_text(text)))


def read(value: Any, name: str = NAME) -> dict[str, Any]:
    """A config of a kernel's parameters from whatever stands for one of a Helion kernel.

    Args:
        value: A `helion.Config`, a dict of its values, or a dict that has the parameter already.
        name: The operator's parameter that takes the config.

    Returns:
        ``{name: text}``, and what other parameters the dict has.

    Raises:
        ConfigError: It is no config.

    Example:
        >>> read({"block_sizes": [32, 128]})
        {'config': '{"block_sizes": [32, 128]}'}
    """
    if isinstance(value, Mapping) and name in value:
        inner = value[name]
        return {**value, name: inner if inner is None else to_text(inner)}
    if isinstance(value, Mapping) and not value:
        return {}
    try:
        return {name: to_text(value)}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{value!r} is not a config of a Helion kernel: {error}",
            hint="pass a helion.Config, or a dict such as {'block_sizes': [64, 128]}",
        ) from error
