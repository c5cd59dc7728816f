"""What the Pallas calls of a traced program ask of a TPU, worked out from their grids and blocks.

This is arithmetic on the jaxpr, before any compiler runs: how many bytes of VMEM the pipelined
windows and the scratch take at the very least, how many bytes move between HBM and VMEM, and how
many grid steps and matrix operations there are. The VMEM figure is a lower bound (the compiler's
temporaries and spills come on top), so what does not fit here cannot fit; the compiler takes
minutes to find that out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kernels import _compat_jax
from tpu_kernels.compiler.chips import Chip
from tpu_kernels.compiler.diagnose import operand_name
from tpu_kernels.compiler.report import mib

_LANES = 128
# Cycles that a grid step costs besides its work: the pipeline's control flow and a DMA start per
# window.
_STEP_CYCLES = 100.0
_F32_PASSES = 3  # bf16 passes of a float32 product, between the fast and the exact setting
_MATRIX_KINDS = {"float32": "f32", "int8": "int8", "uint8": "int8", "float8": "fp8", "int4": "int4"}


@dataclass(frozen=True)
class Window:
    """One block of an operand that the pipeline keeps in VMEM.

    Attributes:
        origin: The operand, as Pallas names it (``"args[0]"``).
        shape: Block shape without squeezed dimensions.
        dtype: Name of the dtype.
        bytes: Size of one buffer, at least.
        buffers: How many buffers the pipeline allocates.
        fetches: How often the block changes over the whole grid: the number of copies from or to
            HBM.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    buffers: int
    fetches: int

    @property
    def padded(self) -> tuple[int, ...]:
        """The block's shape as it lies in VMEM: rows fill whole lanes."""
        if len(self.shape) < 2:
            return self.shape
        return (*self.shape[:-1], -(-self.shape[-1] // _LANES) * _LANES)


@dataclass(frozen=True)
class PallasModel:
    """The demands of one `pallas_call`.

    Attributes:
        name: The kernel's name.
        where: The author's line that calls it, ``file:line``, empty if unknown.
        steps: Number of grid steps; dynamic grid bounds count as 1.
        windows: The pipelined blocks in VMEM.
        scratch_bytes: VMEM scratch.
        smem_bytes: Scalar memory: prefetched operands, blocks and scratch there.
        vmem_limit: The kernel's own ``vmem_limit_bytes``, None for the chip's default.
        flops: Matrix multiply and add operations of the whole call, by dtype of the operands.
        calls: How often the program runs it (the trip counts of enclosing scans).
    """

    name: str
    where: str
    steps: int
    windows: tuple[Window, ...]
    scratch_bytes: int
    vmem_limit: int | None
    flops: Mapping[str, float]
    calls: int = 1
    smem_bytes: int = 0

    @property
    def vmem_bytes(self) -> int:
        """VMEM that the call needs at least, in bytes."""
        return self.scratch_bytes + sum(w.bytes * w.buffers for w in self.windows)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that the pipeline moves between HBM and VMEM."""
        return sum(w.bytes * w.fetches for w in self.windows)

    def cycles(self, chip: Chip) -> float:
        """Roofline of the call, in cycles of a chip: matrix or memory time, plus the steps'.

        It knows nothing of how well the compiler schedules a step: good for an order of magnitude.
        """
        matrix_s = sum(flops / _peak(chip, dtype) for dtype, flops in self.flops.items())
        memory_s = self.hbm_bytes / chip.hbm_bytes_per_s
        return self.calls * (max(matrix_s, memory_s) * chip.clock_hz + self.steps * _STEP_CYCLES)

    def floor_s(self, chip: Chip) -> float:
        """Seconds that no schedule can beat: everything at the device's peak, steps for nothing."""
        peak = chip.peak_ops_per_s
        matrix_s = sum(
            flops / max(peak["bf16"], _peak(chip, dtype)) for dtype, flops in self.flops.items()
        )
        one_core_s = max(matrix_s, self.hbm_bytes / chip.hbm_bytes_per_s)
        # Peaks are those of one core; where two form a device, a parallel grid runs on both.
        return self.calls * one_core_s / chip.cores_per_device

    def buffers(self) -> list[str]:
        """What occupies VMEM, the largest first, one line each.

        Example:
            >>> window = Window("args[0]", (512, 100), "float32", 512 * 128 * 4, 2, 8)
            >>> print(*PallasModel("k", "", 8, (window,), 4096, None, {}).buffers(), sep="\\n")
            input 0 of pallas_call: 2 buffers of float32[512, 100], padded to [512, 128]: 0.5 MiB
            scratch: 4.0 KiB
        """
        lines = []
        for window in sorted(self.windows, key=lambda w: -w.bytes * w.buffers):
            buffers = "1 buffer" if window.buffers == 1 else f"{window.buffers} buffers"
            text = f"{operand_name(window.origin)}: {buffers} of {window.dtype}{list(window.shape)}"
            if window.padded != window.shape:
                text += f", padded to {list(window.padded)}"
            lines.append(f"{text}: {mib(window.bytes * window.buffers)}")
        if self.scratch_bytes:
            lines.append(f"scratch: {mib(self.scratch_bytes)}")
        return lines

    def overflow(self, chip: Chip) -> str | None:
        """Say why the call cannot fit into a chip's VMEM, or None if it may.

        Args:
            chip: The TPU generation.

        Returns:
            One line with the figures, the largest windows, and the author's line.
        """
        limit = chip.vmem_bytes
        which = f"{chip.name} has"
        if self.vmem_limit is None:
            limit = chip.vmem_default_limit_bytes
            which = f"the default limit of {chip.name} is"
        elif self.vmem_limit < limit:
            limit, which = self.vmem_limit, "its vmem_limit_bytes is"
        if self.vmem_bytes <= limit:
            return None
        largest = sorted(self.windows, key=lambda w: -w.bytes * w.buffers)[:3]
        parts = [f"{w.buffers} x {w.dtype}{list(w.shape)}" for w in largest]
        if self.scratch_bytes:
            parts.append(f"scratch {mib(self.scratch_bytes)}")
        place = f" at {self.where}" if self.where else ""
        return (
            f"kernel {self.name!r} needs at least {mib(self.vmem_bytes)} of VMEM "
            f"({', '.join(parts)}), {which} {mib(limit)}{place}"
        )


def pallas_models(jaxpr: Any) -> list[PallasModel]:
    """Work out the demands of every Pallas call in a traced program.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr` returns.

    Returns:
        One model per call, in order of appearance.

    Example:
        >>> import jax
        >>> from jax.experimental import pallas as pl
        >>> def double(x_ref, o_ref):
        ...     o_ref[...] = 2 * x_ref[...]
        >>> def f(x):
        ...     spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        ...     call = pl.pallas_call(double, x, grid=(4,), in_specs=[spec], out_specs=spec)
        ...     return call(x)
        >>> (model,) = pallas_models(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((32, 128), "float32")))
        >>> model.steps, model.vmem_bytes, model.hbm_bytes
        (4, 16384, 32768)
    """
    return [_model(call) for call in _compat_jax.pallas_calls(jaxpr)]


def _model(call: _compat_jax.PallasCall) -> PallasModel:
    grid = tuple(size if isinstance(size, int) else 1 for size in call.grid)
    flops = {dtype: ops * math.prod(grid) for dtype, ops in call.flops_per_step.items()}
    return PallasModel(
        name=call.name,
        where=call.where,
        steps=math.prod(grid),
        windows=tuple(_window(block, grid) for block in call.blocks),
        scratch_bytes=sum(_buffer_bytes(shape, bits) for shape, bits in call.scratch),
        vmem_limit=call.vmem_limit,
        flops=flops,
        calls=call.calls,
        smem_bytes=sum(math.prod(shape) * bits // 8 for shape, bits in call.scalars),
    )


def _window(block: _compat_jax.PallasBlock, grid: tuple[int, ...]) -> Window:
    moving = [axis for axis in block.depends_on if grid[axis] > 1]
    # In row-major order of the grid the block changes whenever the innermost axis that it follows
    # moves.
    fetches = math.prod(grid[: max(moving) + 1]) if moving else 1
    buffers = block.buffers if block.buffers is not None else (2 if moving else 1)
    size = _buffer_bytes(block.shape, block.bits)
    return Window(block.origin, block.shape, block.dtype, size, buffers, fetches)


def _buffer_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a VMEM buffer at least: rows fill whole lanes, other padding depends on tiling."""
    if len(shape) < 2:
        return math.prod(shape) * bits // 8
    *outer, columns = shape
    return math.prod(outer) * (-(-columns // _LANES) * _LANES) * bits // 8


def _peak(chip: Chip, dtype: str) -> float:
    kind = next((k for word, k in _MATRIX_KINDS.items() if dtype.startswith(word)), "bf16")
    bf16 = chip.peak_ops_per_s["bf16"]
    if kind == "f32":
        return bf16 / _F32_PASSES
    return chip.peak_ops_per_s.get(kind, bf16)
