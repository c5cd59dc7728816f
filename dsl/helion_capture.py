"""What a Helion kernel does on the host and what it launches, captured without computing.

Helion generates a host function that prepares tensors and launches Pallas kernels. It runs here
once for a call's shapes, on fake tensors, with a launcher that only notes what it is given: the
host code becomes a graph of ATen operators, and each launch a node of it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_kernels import _compat_helion, _compat_torch
from tpu_kernels.dsl import generated_code
from tpu_kernels.errors import SignatureError, TraceError

_library = torch.library.Library("tpu_kernels_internal", "FRAGMENT")
_library.define("helion_launch(Tensor[] inputs, int launch) -> Tensor[]")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a generated kernel.

    Attributes:
        kernel: The device function.
        grid: Its grid.
        args: Its arguments; the tensors among them have no values.
        options: What else the generated code told the launcher.
        inputs: Positions of the tensors that the launch reads.
        outputs: Shape and dtype of what it writes, in the order of the launcher's results.
    """

    kernel: Callable[..., Any]
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]


_launches: list[Launch] = []
"""Every launch that was captured; a node of a graph holds an index into it."""


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "tpu_kernels_internal::helion_launch", lib=_library
)
def _fake_launch(inputs: Sequence[torch.Tensor], launch: int) -> list[torch.Tensor]:
    device = inputs[0].device if inputs else torch.device("cpu")
    return [torch.empty(s, dtype=d, device=device) for s, d in _launches[launch].outputs]


def launch_operator() -> Any:
    """The operator that stands for a launch in a captured graph."""
    return torch.ops.tpu_kernels_internal.helion_launch.default


def launch_of(index: int) -> Launch:
    """The launch that a node of a captured graph refers to."""
    return _launches[index]


@dataclasses.dataclass(frozen=True)
class Capture:
    """One call of a Helion kernel.

    Attributes:
        graph: Graph of its host code; placeholders are the tensors in order, the output is the
            pair of the kernel's result and the new values of the arguments that it writes to.
        config: The `helion.Config` in force, normalised.
        code: The generated source.
    """

    graph: torch.fx.GraphModule
    config: Any
    code: str


def capture(
    kernel: Any,
    arguments: Sequence[Any],
    *,
    config: Any,
    interpret: bool,
    vmem_bytes: int,
    mutates: Sequence[str],
    where: str,
) -> Capture:
    """Capture a call.

    Args:
        kernel: The `helion.Kernel`, retargeted to Pallas.
        arguments: One for each parameter; meta tensors for tensors.
        config: A `helion.Config`, or None for the kernel's own or default one.
        interpret: Whether the code is for Pallas's plain interpreter.
        vmem_bytes: The VMEM that Helion may count with.
        mutates: Names of the arguments that the kernel may write to.
        where: ``file:line`` of the kernel.

    Returns:
        The `Capture`.

    Raises:
        Exception: What Helion raises for a kernel that it cannot compile.
        SignatureError: The kernel writes to an argument that is not among ``mutates``.
    """

    def work() -> Capture:
        with _compat_helion.vmem_limit(vmem_bytes), _compat_helion.without_log():
            bound = kernel.bind(for_helion(arguments))
            chosen = config if config is not None else _own_config(kernel, bound)
            chosen = _compat_helion.normalized(bound, chosen)
            wrapper = bound.compile_config(chosen)
            code = bound.to_code(chosen)
        generated_code.remember(wrapper.__code__.co_filename, kernel.fn.__code__.co_filename)
        _compat_helion.forget_outputs(wrapper)
        names = list(kernel.signature.parameters)
        graph = _trace(wrapper, names, arguments, mutates, where)
        return Capture(graph, chosen, code)

    lock = _compat_helion.compile_lock()
    with lock:
        capture: Capture = in_fresh_thread(lock.lent(work))
    return capture


def _own_config(kernel: Any, bound: Any) -> Any:
    """The config of a kernel that nobody gave one: never a search."""
    return kernel.configs[0] if kernel.configs else bound.config_spec.default_config()


def for_helion(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments as `bind` takes them: numbers as constants, else each becomes a tensor per call."""
    import helion.language as hl

    return tuple(
        hl.constexpr(a) if isinstance(a, (bool, int, float, str)) else a for a in arguments
    )


def _trace(
    wrapper: Callable[..., Any],
    names: Sequence[str],
    arguments: Sequence[Any],
    mutates: Sequence[str],
    where: str,
) -> torch.fx.GraphModule:
    flat, spec = tree_flatten(tuple(arguments))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    mode = _compat_torch.fake_mode()
    with mode:
        fakes = [torch.empty(flat[i].shape, dtype=flat[i].dtype, device="cpu") for i in places]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor.clone()  # so that writes can be told from reads
        own = tree_unflatten(filled, spec)
        before = {name: _versions(value) for name, value in zip(names, own, strict=True)}
        result = wrapper(*own, _launcher=_note)
        written = dict(zip(names, own, strict=True))
        _refuse_hidden_writes(written, before, mutates, where)
        return result, {name: written[name] for name in mutates}

    with mode, torch.no_grad():
        return _compat_torch.functional_graph(run, fakes, {}, keep_meta=True)


def _versions(value: Any) -> list[int]:
    return [t._version for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def _refuse_hidden_writes(
    values: Mapping[str, Any],
    before: Mapping[str, list[int]],
    mutates: Sequence[str],
    where: str,
) -> None:
    for name, value in values.items():
        if _versions(value) != before[name] and name not in mutates:
            raise SignatureError(
                f"the Helion kernel writes to its argument {name!r}",
                where=where,
                hint=f"declare it: tpu_kernel(mutates_args=({name!r},))",
            )


def _note(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """The launcher: notes a launch, and stands for its results with tensors without values."""
    if options.get("_compact_ordered_aligned_arg_indices"):
        raise TraceError(
            "the config keeps ranges of a jagged tensor resident, whose length would have to be "
            "checked on every call",
            hint="choose a config without pallas_worklist_grouping",
        )
    outputs = options.get("_output_indices") or []
    in_place = set(options.get("_inplace_indices") or [])
    only_written = set(outputs) - in_place
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    inputs = tuple(i for i in tensors if i not in only_written)
    shapeless = tuple(
        torch.empty(tuple(a.shape), dtype=a.dtype, device="meta")
        if isinstance(a, torch.Tensor)
        else a
        for a in args
    )
    metas = tuple((tuple(int(n) for n in args[i].shape), args[i].dtype) for i in outputs)
    _launches.append(Launch(kernel, tuple(grid), shapeless, options, inputs, metas))
    results = launch_operator()([args[i] for i in inputs], len(_launches) - 1)
    returned = []
    for i, result in zip(outputs, results, strict=True):
        if i in in_place:
            args[i].copy_(result)
        else:
            returned.append(result)
    return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)


def in_fresh_thread(work: Callable[[], Any]) -> Any:
    """Run a function where no mode of torch's is active.

    A fake kernel may be asked inside Dynamo, functorch or AOTAutograd; their modes belong to the
    calling thread, and tracing inside them would mix two graphs.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="tpu_kernels-helion")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
