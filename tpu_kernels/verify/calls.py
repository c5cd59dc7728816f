"""A call of a kernel as plain data that can be changed and written down as Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kernels.compiler import pickling
from tpu_kernels.dsl import source
from tpu_kernels.registry.kernel import Kernel

Path = tuple[str | int, ...]
"""Where a value lies: ``("x",)`` is an argument by name, ``(0, 2)`` the third of a list."""

_LITERAL_ELEMENTS = 16
_CONSTRUCTORS: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
    "torch.zeros({shape})": torch.zeros,
    "torch.ones({shape})": torch.ones,
    "torch.arange({count}).reshape({shape})": lambda shape: torch.arange(_count(shape)).reshape(
        shape
    ),
    "torch.randn({shape}, generator=torch.Generator().manual_seed(0))": lambda shape: torch.randn(
        shape, generator=torch.Generator().manual_seed(0)
    ),
}


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True)
class GivenCall:
    """A kernel's arguments.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        config: Static parameters that were given, None for the kernel's own choice.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    config: Mapping[str, Any] | None = None

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Every tensor and every other value with its path, configuration included."""
        for index, value in enumerate(self.args):
            yield from _leaves((index,), value)
        for name, value in self.kwargs.items():
            yield from _leaves((name,), value)
        for name, value in (self.config or {}).items():
            yield ("config", name), value

    def replaced(self, values: Mapping[Path, Any]) -> GivenCall:
        """The call with other values at some paths."""
        config = self.config
        if config is not None:
            config = {k: values.get(("config", k), v) for k, v in config.items()}
        return GivenCall(
            tuple(_rebuilt((index,), value, values) for index, value in enumerate(self.args)),
            {name: _rebuilt((name,), value, values) for name, value in self.kwargs.items()},
            config,
        )

    @property
    def weight(self) -> tuple[int, float]:
        """What a smaller call has less of: elements, then magnitude of its numbers."""
        elements, magnitude = 0, 0.0
        for _, value in self.leaves():
            if isinstance(value, torch.Tensor):
                elements += value.numel()
            elif isinstance(value, (int, float)):
                magnitude += min(abs(float(value)), 1e30)
        return elements, magnitude


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)
    else:
        yield path, value


def _rebuilt(path: Path, value: Any, values: Mapping[Path, Any]) -> Any:
    if path in values:
        return values[path]
    if isinstance(value, (list, tuple)):
        items = [_rebuilt((*path, index), item, values) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def simple_tensors(like: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors with simple values, of the shape and dtype of another, the simplest first."""
    exact = not (like.is_floating_point() or like.is_complex())
    for template, make in _CONSTRUCTORS.items():
        if exact and "randn" in template:
            return  # random numbers between -3 and 3 say little in integers
        values = make(tuple(like.shape))
        yield values.to(like.dtype).requires_grad_(like.requires_grad)


def snippet(kernel: Callable[..., Any], call: GivenCall, given: GivenCall, name: str) -> str:
    """Write a call down as Python that checks it again.

    Args:
        kernel: The kernel or function.
        call: Its arguments.
        given: The arguments that the author passed, which `call` was made of.
        name: Name of the pass.

    Returns:
        Lines of Python. Tensors without a simple form are parts of ``args`` or ``kwargs``, the
        author's own.

    Example:
        >>> call = GivenCall((torch.ones(8, 3), 2.0), {})
        >>> print(snippet(torch.nn.functional.relu, call, call, "edges"))
        from torch.nn.functional import relu
        tk.check(relu, (torch.ones(8, 3), 2.0), passes=('edges',))
    """
    known = dict(given.leaves())
    texts = {path: _Text(_written(path, value, known)) for path, value in call.leaves()}
    written = call.replaced(texts)
    line = [_name(kernel), repr(written.args), f"passes={(name,)!r}"]
    if written.config is not None:
        line.append(f"config={dict(written.config)!r}")
    line += [f"{key}={value!r}" for key, value in written.kwargs.items()]
    return f"{_import(kernel)}\ntk.check({', '.join(line)})"


class _Text(str):
    """Python text that is its own `repr`, so that containers print it unquoted."""

    def __repr__(self) -> str:
        return str(self)


def _name(kernel: Callable[..., Any]) -> str:
    if isinstance(kernel, Kernel):
        return str(kernel.spec.source.qualname.rpartition(".")[2])
    return str(getattr(source.unwrap(kernel), "__name__", "kernel"))


def _import(kernel: Callable[..., Any]) -> str:
    if isinstance(kernel, Kernel):
        module, place = kernel.spec.source.module, str(kernel.spec.source)
    else:
        inner = source.unwrap(kernel)
        code = getattr(inner, "__code__", None)
        module = str(getattr(inner, "__module__", "") or "")
        place = f"{code.co_filename}:{code.co_firstlineno}" if code else module
    name = _name(kernel)
    if module and pickling.is_importable(module):
        return f"from {module} import {name}"
    return f"# {name} is defined at {place}"


def _written(path: Path, value: Any, given: Mapping[Path, Any]) -> str:
    """Python for a value: how it is made, its elements, or a part of the author's argument."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = "" if value.dtype is torch.float32 else f".to({value.dtype})"
    shape = ", ".join(map(str, value.shape)) if value.dim() else "()"
    plain = value.detach().cpu()
    if not plain.is_meta:
        for template, make in _CONSTRUCTORS.items():
            made = make(tuple(value.shape)).to(value.dtype)
            if equal(made, plain):
                text = template.format(shape=shape, count=value.numel()) + dtype
                return text + _graded(value)
        if value.numel() <= _LITERAL_ELEMENTS:
            rows = plain.to(torch.float64) if plain.is_floating_point() else plain
            return f"torch.tensor({rows.tolist()}, dtype={value.dtype})" + _graded(value)
    original = given.get(path)
    where = f"kwargs[{path[0]!r}]" if isinstance(path[0], str) else f"args[{path[0]}]"
    where += "".join(f"[{step!r}]" for step in path[1:])
    if isinstance(original, torch.Tensor) and original.dim() == value.dim():
        cuts = [
            ":" if new == old else f":{new}"
            for new, old in zip(value.shape, original.shape, strict=True)
        ]
        if any(cut != ":" for cut in cuts):
            where += f"[{', '.join(cuts)}]"
    return where


def _graded(value: torch.Tensor) -> str:
    return ".requires_grad_()" if value.requires_grad else ""


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and values, whatever their dtypes."""
    if a.shape != b.shape:
        return False
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    return bool(torch.equal(a, b))
