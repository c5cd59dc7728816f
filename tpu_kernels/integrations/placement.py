"""From a sharding rule and the placements of a call's DTensors to what each device computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpu_kernels.registry.sharding import Choice, Spot

Placements = tuple[Placement, ...]
_UNKNOWN_SIZE = 4096  # stands for a symbolic size when costs are compared


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A DTensor argument, as far as the plan depends on it.

    Attributes:
        shape: Global shape.
        itemsize: Bytes per element.
        placements: Where its parts are, one entry per mesh dimension.
        written: Whether the kernel writes to it, so that it must stay where it is.
    """

    shape: tuple[Any, ...]
    itemsize: int
    placements: Placements
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call runs on a mesh.

    Attributes:
        inputs: Placements that each tensor argument is redistributed to.
        gradients: Placements in which the local gradient of each argument arises.
        outputs: Placements of each result.
    """

    inputs: tuple[Placements, ...]
    gradients: tuple[Placements, ...]
    outputs: tuple[Placements, ...]


def make_plan(
    mesh: DeviceMesh, choices: Sequence[Choice], tensors: Sequence[Tensor], *, differentiate: bool
) -> Plan | None:
    """Choose for each mesh dimension the way to split the work that moves the fewest bytes.

    Args:
        mesh: The devices.
        choices: The ways to split the call over one mesh dimension.
        tensors: The tensor arguments.
        differentiate: Whether gradients will be asked for: results that combine by max or min have
            no gradient that could be computed shard by shard.

    Returns:
        The plan, or None where no choice leaves the written arguments in place.
    """
    chosen: list[Choice] = []
    for dim in range(mesh.ndim):
        best = min(
            (c for c in choices if _possible(mesh, chosen, c, tensors, differentiate)),
            key=lambda choice: _cost(mesh.size(dim), dim, choice, tensors),
            default=None,
        )
        if best is None:
            return None
        chosen.append(best)
    return Plan(
        inputs=tuple(tuple(placement_of(c.inputs[i]) for c in chosen) for i in range(len(tensors))),
        gradients=tuple(
            tuple(_gradient(c, c.inputs[i]) for c in chosen) for i in range(len(tensors))
        ),
        outputs=tuple(
            tuple(placement_of(c.outputs[i]) for c in chosen)
            for i in range(len(choices[-1].outputs))
        ),
    )


def placement_of(spot: Spot) -> Placement:
    """The DTensor placement of a spot.

    Example:
        >>> placement_of(1), placement_of("sum"), placement_of(None)
        (Shard(dim=1), Partial(sum), Replicate())
    """
    if spot is None:
        return Replicate()
    return Partial(spot) if isinstance(spot, str) else Shard(spot)


def spot_of(placement: Placement, ndim: int) -> Spot:
    """The spot of a DTensor placement (the inverse of `placement_of`).

    Args:
        placement: `Shard`, `Partial` or `Replicate`.
        ndim: Number of axes of the tensor; ``Shard(-1)`` counts from its end.

    Raises:
        ValueError: It is another kind of placement, or shards an axis that does not exist.
    """
    if type(placement) is Replicate:
        return None
    if type(placement) is Partial:
        return placement.reduce_op
    if type(placement) is Shard and -ndim <= placement.dim < ndim:
        return placement.dim % ndim
    raise ValueError(f"{placement} of a tensor with {ndim} dimensions")


def _gradient(choice: Choice, spot: Spot) -> Placement:
    # Each device differentiates what it computed itself: an argument that was cut has the gradient
    # of its part; one that devices share, where each computed something else, the sum over them.
    # An argument of partial sums enters every device's part linearly, with the same coefficient.
    if isinstance(spot, int):
        return Shard(spot)
    return Partial("sum") if spot is None and choice.splits_work else Replicate()


def _possible(
    mesh: DeviceMesh,
    chosen: Sequence[Choice],
    choice: Choice,
    tensors: Sequence[Tensor],
    differentiate: bool,
) -> bool:
    dim = len(chosen)
    if differentiate and any(isinstance(s, str) and s != "sum" for s in choice.outputs):
        return False
    for i, (spot, tensor) in enumerate(zip(choice.inputs, tensors, strict=True)):
        current = tensor.placements[dim]
        wanted = placement_of(spot)
        if (tensor.written or isinstance(spot, str)) and not _same(current, wanted):
            return False  # nothing can be redistributed to partial sums
        if isinstance(spot, int):
            parts = [mesh.size(d) for d, c in enumerate(chosen) if c.inputs[i] == spot]
            if not _fills(tensor.shape[spot], [*parts, mesh.size(dim)]):
                return False
    return True


def _fills(size: Any, parts: Sequence[int]) -> bool:
    """Whether every device gets something of an axis: kernels need not reduce nothing."""
    if not isinstance(size, int):
        return True
    if size == 0:
        return False
    if not parts:
        return True
    chunk = -(-size // parts[0])
    last = size - chunk * (parts[0] - 1)
    return last > 0 and _fills(chunk, parts[1:]) and _fills(last, parts[1:])


def _same(a: Placement, b: Placement) -> bool:
    return type(a) is type(b) and a == b


def _cost(
    devices: int, dim: int, choice: Choice, tensors: Sequence[Tensor]
) -> tuple[float, int, bool]:
    """Bytes that a device receives; then number of arguments touched; then prefer to split work."""
    moved = 0.0
    touched = 0
    for spot, tensor in zip(choice.inputs, tensors, strict=True):
        current, wanted = tensor.placements[dim], placement_of(spot)
        if not _same(current, wanted):
            touched += 1
            moved += _traffic(current, wanted, devices) * _size(tensor)
    return moved, touched, not choice.splits_work


def _traffic(current: Placement, wanted: Placement, devices: int) -> float:
    """The share of a tensor's bytes that a device receives in a redistribution."""
    share = (devices - 1) / devices
    if current.is_replicate():
        return 0.0  # each device keeps its part
    if current.is_partial():
        return share if isinstance(wanted, Shard) else 2 * share  # reduce-scatter, all-reduce
    return share / devices if isinstance(wanted, Shard) else share  # all-to-all, all-gather


def _size(tensor: Tensor) -> float:
    return tensor.itemsize * math.prod(
        size if isinstance(size, int) else _UNKNOWN_SIZE for size in tensor.shape
    )


def local_shape(shape: Sequence[Any], placements: Placements, mesh: DeviceMesh) -> tuple[Any, ...]:
    """The shape of this device's part of a tensor."""
    sizes = list(shape)
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes[placement.dim] = _part(sizes[placement.dim], mesh.size(dim), coordinate[dim])
    return tuple(sizes)


def _part(size: Any, parts: int, index: int) -> Any:
    chunk = -(-size // parts)
    return max(0, min(chunk, size - chunk * index))


def row_major_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Strides, in elements, of a contiguous tensor.

    Example:
        >>> row_major_strides((2, 3, 4))
        (12, 4, 1)
    """

    def strides() -> Iterator[Any]:
        stride: Any = 1
        for size in reversed(shape):
            yield stride
            stride *= max(size, 1) if isinstance(size, int) else size

    return tuple(reversed(tuple(strides())))
