"""Workloads: which kernels a program runs, with which shapes, dtypes and static values.

A workload is a file that a tuner can work through, without the program that it came from::

    {"format": "tpu_kernels.workload/1",
     "calls": [{"kernel": "tpu::matmul",
                "arguments": {"x": "bfloat16[64,4096]", "y": "bfloat16[4096,6144]"},
                "static": {"transpose_x": false},
                "origin": "..."}]}

Arguments hold the tensors by parameter name: a text, a list of texts, or null where there is none.
Tunable parameters are left out: they are what tuning decides.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning.records import canonical, decode, encode, frozen

if TYPE_CHECKING:
    import torch

    from tpu_kernels.registry.kernel import Kernel

FORMAT = "tpu_kernels.workload/1"
_ARRAY = re.compile(r"([A-Za-z][A-Za-z0-9_]*)\[([0-9, ]*)\]")


@dataclass(frozen=True)
class WorkloadCall:
    """One call of a kernel.

    Attributes:
        kernel: Qualified name.
        arguments: Tensors by parameter name: ``"bfloat16[64,4096]"``, a list of such, or None.
        static: Other arguments by name, as `records.encode` writes them.
        origin: Where it comes from, for reports.
    """

    kernel: str
    arguments: Mapping[str, Any]
    static: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def identity(self) -> str:
        """Equal for equal calls, wherever they come from."""
        return canonical([self.kernel, dict(self.arguments), dict(self.static)])

    def __str__(self) -> str:
        """The call as words of the command line.

        Example:
            >>> call = WorkloadCall("ns::f", {"x": "bfloat16[8]"}, {"causal": True})
            >>> str(call)
            'ns::f x=bfloat16[8] causal=true'
        """
        tensors = {k: v for k, v in self.arguments.items() if v is not None}
        words = [f"{k}={_word(v)}" for k, v in {**tensors, **self.static}.items()]
        return " ".join([self.kernel, *words])

    def bind_arguments(self, kernel: Kernel) -> dict[str, Any]:
        """Return the arguments of the call by name, with tensors that hold no values.

        Args:
            kernel: The kernel of that name; parameters that it no longer has are an error when the
                call is bound, dynamic scalars get a placeholder.

        Raises:
            ArgumentError: A dtype or static value cannot be made here.
        """
        from tpu_kernels.dsl.spec import Kind

        values: dict[str, Any] = {name: _tensors(v) for name, v in self.arguments.items()}
        for name, value in self.static.items():
            values[name] = _static(name, value)
        placeholders = {"SymInt": 1, "float": 1.0, "bool": True}
        for parameter in kernel.spec.op_parameters:
            if parameter.kind is Kind.DYNAMIC:
                values.setdefault(parameter.name, placeholders.get(parameter.schema_type, 1))
        return values

    def to_json(self) -> dict[str, Any]:
        """Return the call as it stands in the file."""
        plain: dict[str, Any] = {"kernel": self.kernel, "arguments": dict(self.arguments)}
        if self.static:
            plain["static"] = dict(self.static)
        if self.origin:
            plain["origin"] = self.origin
        return plain

    @classmethod
    def from_json(cls, entry: Any) -> WorkloadCall:
        """Read a call from a file.

        Raises:
            ArgumentError: It is not a call.
        """
        try:
            call = cls(
                str(entry["kernel"]),
                dict(entry["arguments"]),
                dict(entry.get("static", {})),
                str(entry.get("origin", "")),
            )
            for value in call.arguments.values():
                _tensors(value)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArgumentError(f"{entry!r} is not a call: {error}") from error
        return call


class Workload:
    """Distinct calls, in the order met.

    Args:
        calls: The calls; equal ones count once.

    Example:
        >>> call = WorkloadCall("ns::f", {"x": "float32[8]"})
        >>> len(Workload([call, call]))
        1
    """

    def __init__(self, calls: Iterable[WorkloadCall] = ()) -> None:
        self._calls: dict[str, WorkloadCall] = {}
        for call in calls:
            self.add(call)

    def add(self, call: WorkloadCall) -> bool:
        """Add a call; return whether it is new."""
        return self._calls.setdefault(call.identity, call) is call

    def __iter__(self) -> Iterator[WorkloadCall]:
        return iter(tuple(self._calls.values()))

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        kernels = {call.kernel for call in self}
        return f"<Workload of {len(self)} calls of {len(kernels)} kernels>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the workload into a file; a reader sees the old file or the new one."""
        from tpu_kernels.tuning.cache import write_atomically

        document = {"format": FORMAT, "calls": [call.to_json() for call in self]}
        write_atomically(Path(path), json.dumps(document, indent=1, allow_nan=False) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Workload:
        """Read a file.

        Raises:
            ArgumentError: It cannot be read, or is no workload of this format.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            document = json.loads(text)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"cannot read the workload {path}: {error}") from error
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT or not isinstance(document.get("calls"), list):
            raise ArgumentError(
                f"{path} is not a workload ({FORMAT}), its format is {found!r}",
                hint="write one with `tpu-kernels record` or tk.record()",
            )
        return cls(map(WorkloadCall.from_json, document["calls"]))


def describe(spec: Any, call: Any, statics: Mapping[str, Any]) -> WorkloadCall | None:
    """Return a call that a program is made for as part of a workload.

    Args:
        spec: The kernel's `KernelSpec`.
        call: Its `Call`.
        statics: Static values by name.

    Returns:
        None if sizes are symbolic: such a call has no shapes to tune for.
    """
    if not all(isinstance(size, int) for aval in call.avals for size in aval.shape):
        return None
    avals = iter(call.avals)
    arguments: dict[str, Any] = {}
    tensors = [p for p in spec.op_parameters if p.kind.is_tensor]
    for parameter, slot in zip(tensors, call.layout.slots, strict=True):
        if isinstance(slot, tuple):
            arguments[parameter.name] = [_text(next(avals)) if one else None for one in slot]
        else:
            arguments[parameter.name] = _text(next(avals)) if slot else None
    left_out = {p.name for p in spec.op_parameters if p.tunable}
    static = {}
    for name, value in statics.items():
        if name in left_out:
            continue
        try:
            static[name] = encode(value, where=name)
        except ArgumentError:
            return None  # a value without a stable spelling: such calls cannot be tuned
    return WorkloadCall(spec.name, arguments, static)


def _text(aval: Any) -> str:
    import numpy as np

    from tpu_kernels.dsl import dtypes

    dtype = dtypes.to_torch(np.dtype(aval.dtype))
    sizes = dtypes.tensor_shape(tuple(aval.shape), dtype)
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, sizes))}]"


def _tensors(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    return _tensor(value)


def _tensor(text: Any) -> torch.Tensor:
    import torch

    found = _ARRAY.fullmatch(text) if isinstance(text, str) else None
    dtype = getattr(torch, found[1], None) if found is not None else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{text!r} is not a tensor", hint='such as "bfloat16[64,4096]"')
    sizes = [int(size) for size in found[2].split(",") if size.strip()]
    return torch.empty(sizes, dtype=dtype, device="meta")


def _static(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"$dtype"}:
        import torch

        dtype = getattr(torch, str(value["$dtype"]), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    if isinstance(value, Mapping) and set(value) & {"$dtype", "$enum"}:
        raise ArgumentError(
            f"argument {name!r}: {value} cannot be made from a file",
            hint="tune such calls from Python, by autotune",
        )
    return frozen(decode(value))


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_word, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
