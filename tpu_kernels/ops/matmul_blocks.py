"""The blocks of a matrix product, chosen for a chip by a model of its pipeline.

The blocks in force are, in this order: those of the call, those that were tuned, and those of
`heuristic_blocks` where neither says anything (a block of None).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_kernels.compiler.chips import Chip, resolve
from tpu_kernels.errors import ConfigError
from tpu_kernels.ops.matmul_plan import Blocks, Operands, Plan, abstract
from tpu_kernels.ops.tiles import (
    DEFAULT_VMEM,
    LANES,
    MIB,
    even_block,
    padded_bytes,
    round_up,
    vmem_limit,
)

# What the autotuner tries. Multiples of 256 fill the MXU of every generation (256 x 256 from v6e
# on).
CONFIGS = {
    "block_m": [128, 256, 512, 1024, 2048],
    "block_n": [256, 512, 1024, 2048],
    "block_k": [256, 512, 1024, 2048],
}
# More than v5p and tpu7x have (64 MiB); what does not compile there is a row of the report.
VMEM_BUDGET = 72 * MIB

# Cycles of the MXU that are written out in one piece. Between pieces it drains and fills, which
# costs 150 to 250 cycles; the compiler takes a minute for pieces of this length.
_PIECE = 8192
_BETWEEN_PIECES = 200
_STEP = 120  # cycles that a grid step costs by itself
# Rows of a product, in widths of the MXU, below which it takes no less time: its weights have to be
# loaded.
_FEWEST_ROWS = 0.7
_HBM_USABLE = 0.85
_LATENCY = 1300  # cycles until a copy from HBM begins to arrive
_COMMON = "v5e"  # whose figures serve where the chip is unknown

_SIZES_M = (128, 256, 512, 1024, 2048)
_SIZES_N = (128, 256, 512, 1024, 2048)
_SIZES_K = (256, 512, 1024, 2048, 4096)


class Machine(NamedTuple):
    """What of a chip decides about blocks.

    Attributes:
        macs: bfloat16 multiplications that a core makes in a cycle.
        bytes: Bytes that it gets from HBM in a cycle.
        width: Rows and columns of a matrix unit.
        vmem: Bytes of VMEM that blocks may take.
        vmem_all: Bytes of VMEM that there are, 0 if that is unknown.
        cores: Cores that share the grid.
    """

    macs: float
    bytes: float
    width: int
    vmem: int
    vmem_all: int
    cores: int


def machine() -> Machine:
    """The chip that a program is traced for, or a common denominator where that is unknown.

    The abstract device tells, and nobody else is asked: asking JAX for devices starts its backends.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return _machine(None if device is None else device.device_kind)


@functools.cache
def _machine(device_kind: str | None) -> Machine:
    chip: Chip = resolve(device_kind or _COMMON).chip
    share = chip.vmem_bytes * 7 // 10
    return Machine(
        macs=chip.peak_ops_per_s["bf16"] / 2 / chip.clock_hz,
        bytes=_HBM_USABLE * chip.hbm_bytes_per_s / chip.clock_hz,
        width=chip.mxu_size,
        vmem=DEFAULT_VMEM if device_kind is None else max(DEFAULT_VMEM, share),
        vmem_all=0 if device_kind is None else chip.vmem_bytes,
        cores=1 if device_kind is None else chip.cores_per_device,
    )


def heuristic_blocks(operands: Operands, plan: Plan, chip: Machine | None = None) -> Blocks:
    """The blocks that a model of the pipeline finds the fastest.

    Args:
        operands: Anything with shapes and dtypes.
        plan: The product's orientation, dtypes and precision.
        chip: What it runs on; by default, what it is traced for.

    Returns:
        Whole tiles that fit the VMEM of the chip, or of every chip where it is unknown.
    """
    chip = chip or machine()
    m, n, k = plan.sizes(operands.x, operands.y)
    multiple = plan.multiples(operands.x, operands.y)
    candidates = {
        Blocks(_cut(m, rows, multiple.m), _cut(n, columns, multiple.n), _cut(k, depth, multiple.k))
        for rows, columns, depth in itertools.product(_SIZES_M, _SIZES_N, _SIZES_K)
    }
    fitting = [b for b in candidates if vmem_need(operands, plan, b) <= chip.vmem]
    if not fitting:
        fitting = [min(candidates, key=lambda b: (vmem_need(operands, plan, b), b))]
    return min(fitting, key=lambda b: (_cycles(operands, plan, b, chip), b))


def _cut(size: int, limit: int, multiple: int) -> int:
    """Even blocks, of halves and quarters that are whole tiles, too, if they are long."""
    return even_block(size, limit, max(multiple, 256) if limit >= 512 else multiple)


def _cycles(operands: Operands, plan: Plan, blocks: Blocks, chip: Machine) -> float:
    """Cycles of the whole product: in each step the longer of the product and the next copies."""
    m, n, k = plan.sizes(operands.x, operands.y)
    batch = _batch(operands.x)
    rows, columns, steps = -(-m // blocks.m), -(-n // blocks.n), -(-k // blocks.k)
    products = 1 if operands.up is None else 2
    work = max(blocks.m, _FEWEST_ROWS * chip.width) * products * plan.passes(operands)
    work *= round_up(blocks.n, chip.width) * round_up(blocks.k, chip.width)
    # Pieces of split operands split them again.
    between = _BETWEEN_PIECES * plan.passes(operands)
    step = work / chip.macs + _STEP + between * max(1.0, work / chip.macs / _PIECE)
    x = blocks.m * blocks.k * operands.x.dtype.itemsize / chip.bytes
    y = blocks.n * blocks.k * operands.y.dtype.itemsize * products / chip.bytes
    results = blocks.m * blocks.n * jnp.dtype(plan.out_dtype).itemsize
    stored = results * (1 if operands.residual is None else 2) / chip.bytes

    def longest(copies: float) -> float:
        # The copies of two steps are under way at a time.
        return max(step, copies + _STEP, (copies + _LATENCY) / 2)

    if steps > 1:
        line = columns * ((steps - 1) * longest(x + y) + longest(x + y + stored))
    else:  # with K in one piece, a block of x stays while the columns pass by
        line = (columns - 1) * longest(y + stored) + longest(x + y + stored)
    return float(-(-batch * rows // chip.cores) * line + _LATENCY + x + y + stored)


def _batch(x: Any) -> int:
    count = 1
    for size in x.shape[:-2]:
        count *= size
    return count


def pieces(operands: Operands, plan: Plan, blocks: Blocks, chip: Machine | None = None) -> Blocks:
    """How much of a block is written out at a time, while a loop walks over the rest.

    Args:
        operands: Anything with shapes and dtypes.
        plan: The product's orientation, dtypes and precision.
        blocks: The blocks in force.
        chip: What it runs on; by default, what it is traced for.

    Returns:
        Divisors of `m` and `n` of the blocks, in whole tiles, with all of `k`.
    """
    chip = chip or machine()
    multiple = plan.multiples(operands.x, operands.y)
    each = plan.passes(operands) * (1 if operands.up is None else 2)
    m, n = blocks.m, blocks.n
    while m * n * blocks.k * each > _PIECE * chip.macs:
        halves = [
            (size, name)
            for size, name, tile in ((m, "m", multiple.m), (n, "n", multiple.n))
            if size % (2 * tile) == 0
        ]
        if not halves:
            break
        if max(halves)[1] == "m":
            m //= 2
        else:
            n //= 2
    return Blocks(m, n, blocks.k)


def choose_blocks(operands: Operands, plan: Plan) -> Blocks:
    """The blocks in force: those asked for, cut to the array, or else the heuristic's.

    Args:
        operands: Anything with shapes and dtypes.
        plan: The product's orientation, dtypes and the blocks asked for.

    Returns:
        Legal blocks, none longer than its dimension.

    Raises:
        ConfigError: A block is not positive, or neither covers its dimension nor is whole tiles.
    """
    sizes, multiples = plan.sizes(operands.x, operands.y), plan.multiples(operands.x, operands.y)
    blocks = []
    open_ = None in plan.blocks
    defaults = heuristic_blocks(operands, plan) if open_ else Blocks(*sizes)
    for name, asked, default, size, multiple in zip(
        "mnk", plan.blocks, defaults, sizes, multiples, strict=True
    ):
        block = default if asked is None else min(asked, size)
        if block <= 0 or (block < size and block % multiple):
            raise ConfigError(
                f"kernel {plan.kernel!r}: block_{name}={asked} does not cut {size} elements "
                "into whole tiles",
                hint=f"use a positive multiple of {multiple}, or at least {size} for one block",
            )
        blocks.append(block)
    return Blocks(*blocks)


def vmem_need(operands: Operands, plan: Plan, blocks: Blocks) -> int:
    """Bytes of VMEM that blocks take: two buffers per operand and output, and the sums.

    Args:
        operands: Anything with shapes and dtypes.
        plan: The product's orientation and dtypes.
        blocks: Legal blocks.

    Returns:
        An estimate in bytes, without the compiler's own spills.
    """
    m, n, k = blocks
    x_block = (k, m) if plan.transpose_x else (m, k)
    y_block = (n, k) if plan.transpose_y else (k, n)
    products = 1 if operands.up is None else 2
    total = padded_bytes((m, n), jnp.float32)
    buffered = padded_bytes(x_block, operands.x.dtype)
    buffered += products * padded_bytes(y_block, operands.y.dtype)
    buffered += padded_bytes((m, n), plan.out_dtype)
    for added in (operands.bias, operands.residual):
        if added is not None:
            block = [
                min(size, b) for size, b in zip((1, 1, *added.shape)[-2:], (m, n), strict=True)
            ]
            buffered += padded_bytes(block, jnp.float32)
    # The halves of operands that are split, and the sum of the mixed products.
    extra = (
        total + padded_bytes(x_block, jnp.float32) + products * padded_bytes(y_block, jnp.float32)
        if plan.passes(operands) > 1
        else 0
    )
    return 2 * buffered + products * total + extra


def limit(
    operands: Operands, plan: Plan, blocks: Blocks, chip: Machine | None = None
) -> int | None:
    """The `vmem_limit_bytes` to ask of the compiler.

    Args:
        operands: Anything with shapes and dtypes.
        plan: The product's orientation and dtypes.
        blocks: Legal blocks.
        chip: What it runs on; by default, what it is traced for.

    Returns:
        Bytes, or None where the default limit suffices or is all there is.
    """
    chip = chip or machine()
    need = vmem_need(operands, plan, blocks)
    if not chip.vmem_all:
        return vmem_limit(need)
    m, n, _ = pieces(operands, plan, blocks, chip)
    # Partial sums of a piece are spilled where the block is deeper than the matrix unit.
    asked = vmem_limit(need + padded_bytes((m, n), jnp.float32))
    most = chip.vmem_all * 15 // 16
    return None if asked is None or most <= 16 * MIB else min(asked, most)


def fits(
    x: Any,
    y: Any,
    block_m: int | None,
    block_n: int | None,
    block_k: int | None,
    transpose_x: bool = False,
    transpose_y: bool = False,
    up: Any = None,
) -> bool | str:
    """Whether the autotuner should try a config on these operands.

    Args:
        x: Left operand: anything with shape and a NumPy dtype, or a torch tensor.
        y: Right operand.
        block_m: The candidate's block, None for the heuristic's.
        block_n: As `block_m`.
        block_k: As `block_m`.
        transpose_x: `x` is stored transposed.
        transpose_y: `y` is stored transposed.
        up: Second right operand of a gated product.

    Returns:
        True, or why not in one line.
    """
    operands = Operands(abstract(x), abstract(y), abstract(up))
    dtype = jnp.promote_types(operands.x.dtype, operands.y.dtype)
    asked = (block_m, block_n, block_k)
    plan = Plan("tpu::matmul", transpose_x, transpose_y, dtype, blocks=asked)
    try:
        blocks = choose_blocks(operands, plan)
    except ConfigError as error:
        return error.problem.removeprefix(f"kernel {plan.kernel!r}: ")
    sizes = plan.sizes(operands.x, operands.y)
    for name, block, wanted, size in zip("mnk", blocks, asked, sizes, strict=True):
        if wanted is not None and wanted >= 2 * round_up(size, LANES):
            return f"block_{name}={wanted} is the same as {block} here, and smaller ones are tried"
    need = vmem_need(operands, plan, blocks)
    if need > VMEM_BUDGET:
        return f"needs {need / MIB:.0f} MiB of VMEM, more than {VMEM_BUDGET // MIB} MiB"
    return True


def bucket(x: Any, y: Any, *_: Any) -> tuple[int, ...]:
    """The sizes whose tuned blocks serve these operands, too.

    Args:
        x: Left operand: anything with a shape.
        y: Right operand.

    Returns:
        Every size rounded up to a power of two, to 128 at least.

    Example:
        >>> bucket(jnp.ones((3, 1000)), jnp.ones((1000, 1024)))
        (128, 1024, 1024, 1024)
    """
    return tuple(max(LANES, 1 << (size - 1).bit_length()) for size in (*x.shape, *y.shape))
