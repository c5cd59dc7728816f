"""What is known of each TPU generation, and how a user names one.

The facts stand in ``chips.json`` next to this module, each with its source; all figures are per
TensorCore, as `pltpu.get_tpu_info` reports them, so that a kernel on a two-core chip sees one
core's share.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from tpu_kernels.errors import ConfigError

_TOPOLOGY = re.compile(r"\d+(x\d+){1,2}")


@dataclass(frozen=True)
class Chip:
    """Facts of one TPU generation; figures are per TensorCore.

    Attributes:
        name: Short name, such as ``"v6e"``.
        aliases: Other names that `resolve` takes, in lower case.
        generation: Number of the generation.
        device_kind: What JAX calls a device of it.
        topology: Smallest topology that the compiler takes, used where the user names none.
        tensor_cores: TensorCores on one chip.
        cores_per_device: TensorCores that form one JAX device.
        clock_hz: Clock of the core, derived from its bf16 peak.
        mxu_count: Matrix units.
        mxu_size: Rows and columns of one matrix unit.
        cycles_per_vmatmul: Cycles that one matrix instruction occupies its unit, by operand class
            (``"bf16"``, ``"f32"``, ``"8bit"``).
        issue_per_cycle: Instructions that each kind of unit takes in one cycle, by unit
            (``"valu"``, ``"eup"``, ``"vld"``, ``"vst"``, ``"salu"``, ``"xlu"``).
        branch_delay_slots: Bundles after a branch that are executed before it takes effect, at
            least.
        most_delay_slots: The same at most; where that is more, those of the branch's own region.
        dma_granule_bytes: Unit in which copies are sized.
        peak_ops_per_s: Peak multiply and add operations per second by dtype; a dtype that is absent
            has no native matrix instruction.
        vmem_bytes: Vector memory.
        vmem_default_limit_bytes: What one kernel may use of it unless it sets ``vmem_limit_bytes``.
        smem_bytes: Scalar memory.
        hbm_bytes: High-bandwidth memory.
        hbm_bytes_per_s: Its nominal bandwidth.
    """

    name: str
    aliases: tuple[str, ...]
    generation: int
    device_kind: str
    topology: str
    tensor_cores: int
    cores_per_device: int
    clock_hz: float
    mxu_count: int
    mxu_size: int
    cycles_per_vmatmul: Mapping[str, int]
    issue_per_cycle: Mapping[str, float]
    branch_delay_slots: int
    most_delay_slots: int
    dma_granule_bytes: int
    peak_ops_per_s: Mapping[str, float]
    vmem_bytes: int
    vmem_default_limit_bytes: int
    smem_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float


@dataclass(frozen=True)
class Target:
    """A chip and the topology that a program is compiled for.

    Attributes:
        chip: The TPU generation.
        topology: Chips along each axis, such as ``"2x2"``.
    """

    chip: Chip
    topology: str

    @property
    def name(self) -> str:
        """The name to show: the chip's, with the topology only where it is not the default one."""
        if self.topology == self.chip.topology:
            return self.chip.name
        return f"{self.chip.name}:{self.topology}"

    @property
    def topology_name(self) -> str:
        """The name that the TPU compiler knows this topology by, such as ``"v6e:2x2"``."""
        return f"{self.chip.name}:{self.topology}"

    def __str__(self) -> str:
        return self.name


@functools.cache
def _table() -> Mapping[str, object]:
    text = resources.files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    table: dict[str, object] = json.loads(text)
    return MappingProxyType(table)


@functools.cache
def chips() -> Mapping[str, Chip]:
    """Return all known chips by name, oldest first.

    Returns:
        A read-only mapping from short name to `Chip`.

    Example:
        >>> list(chips())
        ['v4', 'v5e', 'v5p', 'v6e', 'tpu7x']
        >>> chips()["v6e"].vmem_bytes >> 20
        128
    """
    rows = _table()["chips"]
    if not isinstance(rows, dict):
        raise TypeError("chips.json: 'chips' must be an object")
    known = {}
    for name, row in rows.items():
        fields = dict(row, name=name, aliases=tuple(row["aliases"]))
        for field in ("cycles_per_vmatmul", "issue_per_cycle", "peak_ops_per_s"):
            fields[field] = MappingProxyType(fields[field])
        known[name] = Chip(**fields)
    return MappingProxyType(known)


def field_source(field: str) -> str:
    """Tell where the figures of one field of `Chip` come from.

    Args:
        field: Name of a field, such as ``"hbm_bytes_per_s"``.

    Returns:
        The source, in one line.

    Raises:
        KeyError: If `Chip` has no such field in its table.

    Example:
        >>> field_source("vmem_bytes").startswith("jax")
        True
    """
    sources, fields = _table()["sources"], _table()["field_sources"]
    if not isinstance(sources, dict) or not isinstance(fields, dict):
        raise TypeError("chips.json: 'sources' and 'field_sources' must be objects")
    return str(sources[fields[field]])


def resolve(target: str | Target) -> Target:
    """Find the target that a user names.

    Args:
        target: A chip (``"v6e"``, also ``"trillium"`` or ``"TPU v6 lite"``), a chip and a topology
            (``"v6e:2x2"``), or a `Target`, which is returned as it is.

    Returns:
        The chip's facts with the topology.

    Raises:
        ConfigError: If no such chip is known, or the topology is not of the form ``2x2`` or
            ``2x2x1``.

    Example:
        >>> resolve("trillium").name
        'v6e'
        >>> resolve("v5p:4x4x4").topology_name
        'v5p:4x4x4'
    """
    if isinstance(target, Target):
        return target
    name, _, topology = str(target).strip().lower().partition(":")
    chip = _by_name().get(name)
    if chip is None:
        raise ConfigError(
            f"unknown target {target!r}",
            hint=f"use one of {', '.join(chips())}, or CHIP:TOPOLOGY such as 'v6e:2x2'",
        )
    if not topology:
        return Target(chip, chip.topology)
    axes = len(chip.topology.split("x"))
    if not _TOPOLOGY.fullmatch(topology) or len(topology.split("x")) != axes:
        raise ConfigError(
            f"target {target!r}: topology {topology!r} does not fit {chip.name}",
            hint=f"{chip.name} takes {axes} axes, such as '{chip.name}:{chip.topology}'",
        )
    return Target(chip, topology)


@functools.cache
def _by_name() -> Mapping[str, Chip]:
    names = {}
    for chip in chips().values():
        for name in (chip.name, *chip.aliases):
            names[name] = chip
    return MappingProxyType(names)
