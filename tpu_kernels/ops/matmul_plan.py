"""A matrix product but for its arrays: orientation, dtypes, and blocks and how they are chosen.

The blocks in force are, in this order: those of the call, those that were tuned, and those of
`heuristic_blocks` where neither says anything (a block of None).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_kernels.errors import ArgumentError, ConfigError, DTypeError
from tpu_kernels.ops.precision import check_precision
from tpu_kernels.ops.tiles import LANES, MIB, even_block, padded_bytes, round_up, sublanes

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# What the autotuner tries. Multiples of 256 fill the MXU of every generation (256 x 256 from v6e
# on); with more than 2048 the compiler unrolls so much that one compilation takes minutes.
CONFIGS = {
    "block_m": [128, 256, 512, 1024],
    "block_n": [256, 512, 1024, 2048],
    "block_k": [256, 512, 1024, 2048],
}
# What a raised limit reaches on v5p and tpu7x (64 MiB), less the compiler's share.
VMEM_BUDGET = 48 * MIB


class Blocks(NamedTuple):
    """Elements of each dimension that one grid step handles."""

    m: int
    n: int
    k: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one product is computed: everything about it that is not an array.

    Attributes:
        kernel: Name of the operator, for messages.
        transpose_x: `x` is stored as [..., K, M].
        transpose_y: `y` is stored as [..., N, K].
        out_dtype: Dtype of the result.
        precision: None, "default", "high" or "highest".
        blocks: What the caller asked for; None in a place means the heuristic's choice.
        interpret: Pallas' `interpret`: False, True or `pltpu.InterpretParams`.
    """

    kernel: str
    transpose_x: bool
    transpose_y: bool
    out_dtype: Any
    precision: str | None = None
    blocks: tuple[int | None, int | None, int | None] = (None, None, None)
    interpret: Any = False

    def sizes(self, x: Any, y: Any) -> tuple[int, int, int]:
        """M, N and K of the product of `x` and `y`."""
        k, m = x.shape[-2:] if self.transpose_x else x.shape[-2:][::-1]
        n = y.shape[-2] if self.transpose_y else y.shape[-1]
        return m, n, k

    def multiples(self, x: Any, y: Any) -> Blocks:
        """What a block shorter than its dimension is a multiple of: whole tiles of all it cuts."""
        rows = max(sublanes(x.dtype), sublanes(y.dtype))
        return Blocks(
            m=LANES if self.transpose_x else max(rows, sublanes(self.out_dtype)),
            n=LANES,  # the output's lanes
            k=rows if self.transpose_x and not self.transpose_y else LANES,
        )


def make_plan(
    kernel: str,
    rank: int,
    x: Any,
    y: Any,
    *,
    transposed: tuple[bool, bool],
    precision: str | None,
    blocks: tuple[int | None, int | None, int | None],
    interpret: Any,
) -> Plan:
    """Check the arguments of an operator and put together those that are not arrays.

    Args:
        kernel: Name of the operator, for messages.
        rank: Number of dimensions that both operands must have.
        x: Left operand: anything with shape and dtype.
        y: Right operand.
        transposed: Whether `x` and `y` are stored transposed.
        precision: None, "default", "high" or "highest".
        blocks: block_m, block_n, block_k; None for the heuristic's choice.
        interpret: Pallas' `interpret`.

    Returns:
        The plan.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` is unknown.
        DTypeError: An operand is not of a floating point type that this kernel multiplies.
    """
    check_precision(precision, kernel)
    for name, operand in (("x", x), ("y", y)):
        if operand.ndim != rank:
            raise ArgumentError(
                f"kernel {kernel!r}: argument {name!r} has {operand.ndim} dimensions, not {rank}"
            )
        if operand.dtype not in DTYPES:
            raise DTypeError(
                f"kernel {kernel!r}: argument {name!r} is {operand.dtype}",
                hint="convert it to bfloat16, float16 or float32",
            )
    dtype = jnp.promote_types(x.dtype, y.dtype)
    plan = Plan(kernel, *transposed, dtype, precision, blocks, interpret)
    contracted = y.shape[-1] if plan.transpose_y else y.shape[-2]
    if plan.sizes(x, y)[2] != contracted or x.shape[:-2] != y.shape[:-2]:
        flags = f"transpose_x={plan.transpose_x}, transpose_y={plan.transpose_y}"
        raise ArgumentError(
            f"kernel {kernel!r}: x {list(x.shape)} and y {list(y.shape)} do not fit ({flags})",
            hint="the batch and the contracted dimension of both must be equal",
        )
    return plan


def heuristic_blocks(x: Any, y: Any, plan: Plan) -> Blocks:
    """Blocks that every chip compiles, and that re-read the operands as little as VMEM allows.

    A block of the output needs `block_m + block_n` operand elements for each step in K and does
    `block_m x block_n` multiplications with them, so large and about square is what saves HBM
    traffic; the depth in K only has to hide the cost of a step.

    Args:
        x: Left operand: anything with shape and dtype.
        y: Right operand.
        plan: The product's orientation and dtypes.

    Returns:
        Whole tiles that need at most 12 MiB of VMEM, which even v4 has (16 MiB in all).
    """
    m, n, k = plan.sizes(x, y)
    multiple = plan.multiples(x, y)
    wide = max(x.dtype.itemsize, y.dtype.itemsize)
    if m <= LANES:  # decoding: the time goes into reading y, so move it in few, large pieces
        rows, depth = LANES, 4096 // wide
    else:
        # More than one pass spills more than one partial product: half the depth leaves them room.
        one_pass = wide == 2 or plan.precision in (None, "default")
        rows, depth = 2048 // wide, 512 if one_pass else 256
    return Blocks(
        even_block(m, rows, multiple.m),
        even_block(n, 1024, multiple.n),
        even_block(k, depth, multiple.k),
    )


def choose_blocks(x: Any, y: Any, plan: Plan) -> Blocks:
    """The blocks in force: those asked for, cut to the array, or else the heuristic's.

    Args:
        x: Left operand: anything with shape and dtype.
        y: Right operand.
        plan: The product's orientation, dtypes and the blocks asked for.

    Returns:
        Legal blocks, none longer than its dimension.

    Raises:
        ConfigError: A block is not positive, or neither covers its dimension nor is whole tiles.
    """
    sizes, multiples = plan.sizes(x, y), plan.multiples(x, y)
    blocks = []
    for name, asked, default, size, multiple in zip(
        "mnk", plan.blocks, heuristic_blocks(x, y, plan), sizes, multiples, strict=True
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


def vmem_need(x: Any, y: Any, plan: Plan, blocks: Blocks) -> int:
    """Bytes of VMEM that blocks take: two buffers per operand and output, and the sum.

    Args:
        x: Left operand: anything with shape and dtype.
        y: Right operand.
        plan: The product's orientation and dtypes.
        blocks: Legal blocks.

    Returns:
        An estimate in bytes, without the compiler's own spills.
    """
    m, n, k = blocks
    x_block = (k, m) if plan.transpose_x else (m, k)
    y_block = (n, k) if plan.transpose_y else (k, n)
    buffered = padded_bytes(x_block, x.dtype) + padded_bytes(y_block, y.dtype)
    buffered += padded_bytes((m, n), plan.out_dtype)
    return 2 * buffered + padded_bytes((m, n), jnp.float32)


def fits(
    x: Any,
    y: Any,
    block_m: int | None,
    block_n: int | None,
    block_k: int | None,
    transpose_x: bool = False,
    transpose_y: bool = False,
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

    Returns:
        True, or why not in one line.
    """
    x, y = _abstract(x), _abstract(y)
    dtype = jnp.promote_types(x.dtype, y.dtype)
    asked = (block_m, block_n, block_k)
    plan = Plan("tpu::matmul", transpose_x, transpose_y, dtype, blocks=asked)
    try:
        blocks = choose_blocks(x, y, plan)
    except ConfigError as error:
        return error.problem.removeprefix(f"kernel {plan.kernel!r}: ")
    for name, block, wanted, size in zip("mnk", blocks, asked, plan.sizes(x, y), strict=True):
        if wanted is not None and wanted >= 2 * round_up(size, LANES):
            return f"block_{name}={wanted} is the same as {block} here, and smaller ones are tried"
    need = vmem_need(x, y, plan, blocks)
    if need > VMEM_BUDGET:
        return f"needs {need / MIB:.0f} MiB of VMEM, more than {VMEM_BUDGET // MIB} MiB"
    return True


def bucket(x: Any, y: Any) -> tuple[int, ...]:
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


def _abstract(operand: Any) -> Any:
    """Shape and NumPy dtype of an operand, which may be a torch tensor."""
    name = str(operand.dtype).removeprefix("torch.")
    return jax.ShapeDtypeStruct(tuple(operand.shape), jnp.dtype(name))
