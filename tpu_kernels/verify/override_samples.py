"""Calls of an operator to check an override with: torch's own samples, or the user's."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_kernels import _compat_torch as compat
from tpu_kernels.registry.overrides.targets import is_composite, qualified

DTYPES = (torch.float32, torch.bfloat16)
# Kernels whose names do not begin like the function that calls them.
_FUSED = {
    "convolution": "conv2d",
    "fused_rms_norm": "rms_norm",
    "scaled_dot_product": "scaled_dot_product_attention",
}
_AFFIXES = r"^_+|^native_|^thnn_|_backward.*$|_data$|_for_cpu$|_+$"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One call that reaches the operator.

    Attributes:
        source: Where it is from, such as ``"mm float32"``.
        function: The operator itself, or a function that calls it.
        args: Arguments, with tensors on the CPU.
        kwargs: Keyword arguments.
    """

    source: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def size(self) -> int:
        """Number of elements of all tensors, to find the smallest sample that fails."""
        return sum(t.numel() for t in tensors((self.args, self.kwargs)))

    def __str__(self) -> str:
        values = [_short(a) for a in self.args]
        values += [f"{k}={_short(v)}" for k, v in self.kwargs.items()]
        return f"({', '.join(values)}), from {self.source}"


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of nested tuples, lists and dictionaries in order."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Nested tuples, lists and dictionaries with every tensor changed.

    Example:
        >>> mapped((torch.ones(2), [1, None]), lambda t: t.tolist())
        ([1.0, 1.0], [1, None])
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    return value


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}{'' if value.is_contiguous() else ' strided'}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_short(v) for v in value)}]"
    return repr(value)


def given_samples(op: OpOverload, calls: Sequence[Any]) -> list[Sample]:
    """The user's calls: each a tuple of arguments, or a pair of those and a dictionary."""
    samples = []
    for index, call in enumerate(calls):
        args, kwargs = tuple(call), {}
        if len(args) == 2 and isinstance(args[0], (tuple, list)) and isinstance(args[1], Mapping):
            args, kwargs = tuple(args[0]), dict(args[1])
        on_cpu = mapped((args, kwargs), lambda t: t.detach().cpu())
        samples.append(Sample(f"call {index}", op, *on_cpu))
    return samples


def torch_samples(op: OpOverload, device: str, limit: int) -> list[Sample]:
    """Calls of an operator that torch's own samples lead to.

    Args:
        op: The operator.
        device: That of the override; says whether the operator is composite there.
        limit: Most samples of each dtype.

    Returns:
        Samples, none where torch's database has no operator that calls this one.
    """
    samples: list[Sample] = []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # what torch's samples make torch say is no news
        torch.manual_seed(0)
        entries = _entries(op)
        for dtype in _dtypes(entries):
            of_dtype: list[Sample] = []
            for entry in entries:
                if dtype in entry.dtypes and len(of_dtype) < limit:
                    of_dtype += _calls(op, entry, dtype, device, limit - len(of_dtype))
            samples += of_dtype
    return samples


def _entries(op: OpOverload) -> list[Any]:
    """The operators of torch's database that may call this one, the likeliest first."""
    base = qualified(op).partition("::")[2].partition(".")[0]
    stem = _stem(base)

    def names(entry: Any) -> set[str]:
        aliases = {alias.name for alias in entry.aliases}
        return {entry.name, entry.aten_name, *aliases, entry.aten_backward_name or entry.name}

    exact, similar = [], []
    for entry in compat.operator_samples_database():
        known = {name.rpartition(".")[2] if name else "" for name in names(entry)}
        if base in known:
            exact.append(entry)
        elif stem in {_stem(name) for name in known}:
            similar.append(entry)
    return exact + similar


def _stem(name: str) -> str:
    """The part of a name that an operator shares with its backward and its fused forms.

    Example:
        >>> _stem("native_layer_norm_backward"), _stem("_softmax_backward_data"), _stem("add_")
        ('layer_norm', 'softmax', 'add')
    """
    before = ""
    while name != before:
        before, name = name, re.sub(_AFFIXES, "", name)
    for kernel, function in _FUSED.items():
        if name.startswith(kernel):
            return function
    return name


def _dtypes(entries: Sequence[Any]) -> list[torch.dtype]:
    known = {dtype for entry in entries for dtype in entry.dtypes}
    floating = [dtype for dtype in DTYPES if dtype in known]
    return floating or [dtype for dtype in (torch.int32, torch.int64, torch.bool) if dtype in known]


def _calls(
    op: OpOverload, entry: Any, dtype: torch.dtype, device: str, limit: int
) -> Iterator[Sample]:
    name = f"{entry.name} {str(dtype).removeprefix('torch.')}"
    backward = "backward" in qualified(op)
    composite = is_composite(op, device)
    inplace = op.name().partition(".")[0].endswith("_")
    function = (entry.inplace_variant or op) if inplace else entry.op
    given = entry.sample_inputs("cpu", dtype, requires_grad=backward and entry.supports_autograd)
    for taken, sample in enumerate(given):
        if taken >= limit:
            return
        args = (sample.input, *sample.args)
        recorder = _Calls(op)
        try:
            with recorder:
                result = function(*mapped(args, torch.clone), **sample.kwargs)
                if backward:
                    _differentiate(result)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue  # a sample of torch's that this build of torch does not run
        if composite:  # consists of others when it is recorded; the function itself reaches it
            yield Sample(name, function, args, dict(sample.kwargs))
        for recorded_args, recorded_kwargs in recorder.found[:1]:
            yield Sample(name, op, recorded_args, recorded_kwargs)


def _differentiate(result: Any) -> None:
    outputs = [t for t in tensors(result) if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])


class _Calls(TorchDispatchMode):
    """Records the arguments of one operator's calls."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.found: list[tuple[Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self.op:
            given = (tuple(args), dict(kwargs or {}))
            self.found.append(mapped(given, lambda t: t.detach().clone()))
        return func(*args, **(kwargs or {}))
