"""Arguments of a kernel as words on the command line.

Grammar (no spaces needed; quote a word in the shell because of the brackets)::

    argument = [name "="] value
    value    = tensor | list | scalar
    tensor   = dtype "[" [size {"," size}] "]"        f32[1024,512]   bf16[4096,4096]   i32[]
    list     = "[" value {"," value} "]"              [f32[8],f32[4]]
    scalar   = number | true | false | none | "(" ... ")" | quoted text | bare word
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_kernels.errors import ArgumentError

if TYPE_CHECKING:
    import torch

# Short names are XLA's, so that a shape can be pasted from a compiler dump; torch's own work too.
DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "s64": "int64",
    "s32": "int32",
    "s16": "int16",
    "s8": "int8",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "pred": "bool",
}

_TENSOR = re.compile(r"(?P<dtype>[a-z][a-z0-9_]*)\[(?P<sizes>[0-9, ]*)\]")
_NAMED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor given by its type alone.

    Attributes:
        dtype: Name of the torch dtype, such as ``"bfloat16"``.
        shape: Sizes, outermost first; empty for a scalar tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def parse_value(text: str) -> Any:
    """Read one value.

    Args:
        text: A tensor, a list or a scalar; see the module's docstring.

    Returns:
        A `TensorSpec`, a list of values, or a Python scalar.

    Raises:
        ArgumentError: If the text looks like a tensor or a list but is none.

    Example:
        >>> parse_value("bf16[8,128]")
        TensorSpec(dtype='bfloat16', shape=(8, 128))
        >>> parse_value("[f32[8],none]"), parse_value("2.5"), parse_value("silu")
        ([TensorSpec(dtype='float32', shape=(8,)), None], 2.5, 'silu')
    """
    text = text.strip()
    if text.startswith("["):
        if not text.endswith("]"):
            raise ArgumentError(f"list {text!r} has no closing bracket")
        return [parse_value(item) for item in split_commas(text[1:-1])]
    if match := _TENSOR.fullmatch(text):
        return TensorSpec(_dtype(match["dtype"], text), _sizes(match["sizes"], text))
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if "[" in text or "]" in text:
        raise ArgumentError(
            f"{text!r} is not a tensor",
            hint="write the dtype and the sizes, such as f32[1024,512], or bf16[] for a scalar",
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # about odd literals, such as "\\d"
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text  # whatever Python cannot read is a bare word


def parse_arguments(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Read the arguments of one call.

    Args:
        words: ``value`` for positional and ``name=value`` for keyword arguments.

    Returns:
        Positional values and keyword values.

    Raises:
        ArgumentError: If a word cannot be read, a name occurs twice, or a positional value follows
            a named one.

    Example:
        >>> parse_arguments(["f32[8]", "alpha=2.0"])
        ([TensorSpec(dtype='float32', shape=(8,))], {'alpha': 2.0})
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for word in words:
        if match := _NAMED.fullmatch(word):
            if match["name"] in named:
                raise ArgumentError(f"argument {match['name']!r} is given twice")
            named[match["name"]] = parse_value(match["value"])
        elif named:
            raise ArgumentError(
                f"positional argument {word!r} follows a named one",
                hint="put positional arguments first, as in a Python call",
            )
        else:
            positional.append(parse_value(word))
    return positional, named


def parse_config(words: Sequence[str]) -> dict[str, Any]:
    """Read one configuration from ``name=value`` words.

    Example:
        >>> parse_config(["block_m=128", "block=(8,128)"])
        {'block_m': 128, 'block': (8, 128)}
    """
    positional, config = parse_arguments(words)
    if positional:
        raise ArgumentError(f"--config {words[0]!r} is not of the form NAME=VALUE")
    return config


def parse_choices(words: Sequence[str]) -> dict[str, list[Any]]:
    """Read the values to try for each tunable parameter from ``name=value,value,...`` words.

    Example:
        >>> parse_choices(["block_m=128,256", "block=(8,128),(16,128)"])
        {'block_m': [128, 256], 'block': [(8, 128), (16, 128)]}
    """
    choices: dict[str, list[Any]] = {}
    for word in words:
        match = _NAMED.fullmatch(word)
        if match is None:
            raise ArgumentError(f"--configs {word!r} is not of the form NAME=VALUE,VALUE,...")
        if match["name"] in choices:
            raise ArgumentError(
                f"--configs gives {match['name']!r} twice",
                hint=f"list all its values at once: {match['name']}=VALUE,VALUE,...",
            )
        choices[match["name"]] = [parse_value(item) for item in split_commas(match["value"])]
    return choices


def split_commas(text: str) -> list[str]:
    """Split at the commas that are outside brackets and parentheses.

    Example:
        >>> split_commas("f32[8,128],(1,2),x")
        ['f32[8,128]', '(1,2)', 'x']
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if text.strip() else []


def materialize(value: Any, make: Callable[[TensorSpec], torch.Tensor]) -> Any:
    """Replace every `TensorSpec` in a value by a tensor.

    Args:
        value: What `parse_value` returned.
        make: Makes the tensor of a spec: `empty_tensor`, or what `random_tensors` returns.

    Returns:
        The value, with lists kept as lists.
    """
    if isinstance(value, TensorSpec):
        return make(value)
    if isinstance(value, list):
        return [materialize(item, make) for item in value]
    return value


def empty_tensor(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor without contents, where only the type counts: nothing is allocated."""
    import torch

    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


def random_tensors() -> Callable[[TensorSpec], torch.Tensor]:
    """Return a maker of tensors with normal random values, the same in every process.

    Integers, which are often indices, are zeros.

    Example:
        >>> spec = TensorSpec("float32", (3,))
        >>> bool((random_tensors()(spec) == random_tensors()(spec)).all())
        True
    """
    import torch

    generator = torch.Generator().manual_seed(0)

    def make(spec: TensorSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(spec.shape, generator=generator).to(dtype)
        return torch.zeros(spec.shape, dtype=dtype)

    return make


def with_values(value: Any) -> Any:
    """Replace the tensors in an argument by some of their shapes and dtypes with values.

    Args:
        value: A tensor, a list or dict of such, or anything else.

    Example:
        >>> import torch
        >>> with_values({"x": torch.empty(3, device="meta")})["x"].device
        device(type='cpu')
    """
    import torch

    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return random_tensors()(TensorSpec(name, tuple(value.shape)))
    if isinstance(value, list):
        return [with_values(item) for item in value]
    if isinstance(value, dict):
        return {name: with_values(item) for name, item in value.items()}
    return value


def _dtype(name: str, text: str) -> str:
    if name in DTYPES:
        return DTYPES[name]
    if name in DTYPES.values():
        return name
    raise ArgumentError(
        f"{text!r}: no dtype is called {name!r}", hint=f"dtypes: {', '.join(DTYPES)}"
    )


def _sizes(sizes: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in sizes.split(",")) if sizes.strip() else ()
    except ValueError:
        raise ArgumentError(f"{text!r} has an empty or malformed size") from None
