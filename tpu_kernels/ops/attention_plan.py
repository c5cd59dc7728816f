"""Attention but for its arrays: masks, scale, blocks and how they are chosen.

The blocks in force are, in this order: those of the call, those that were tuned, and those of
`heuristic_blocks` where neither says anything (a block of None).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_kernels.errors import ArgumentError, ConfigError, DTypeError
from tpu_kernels.ops.attention_blocks import Band
from tpu_kernels.ops.precision import check_precision
from tpu_kernels.ops.tiles import LANES, MIB, even_block, padded_bytes, round_up

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# A part of 512 queries keeps both 256-wide MXUs busy. The more keys in it, the rarer the
# accumulator is rescaled; the backward, which rescales nothing, spills less with half as many.
PART = 512

# What the autotuner tries.
CONFIGS = {
    "block_q": [512, 1024, 2048],
    "block_kv": [512, 1024, 2048],
    "part_q": [256, 512],
    "part_kv": [128, 256, 512],
    "split_scale": [False, True],
}
# What a raised limit reaches on v5p and tpu7x (64 MiB), less the compiler's share.
VMEM_BUDGET = 48 * MIB


class Blocks(NamedTuple):
    """Queries and keys per grid step, and per part of it that is computed at a time."""

    q: int
    kv: int
    part_q: int
    part_kv: int

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys per grid step."""
        return self.q, self.kv

    @property
    def part(self) -> tuple[int, int]:
        """Queries and keys per part."""
        return self.part_q, self.part_kv


@dataclasses.dataclass(frozen=True)
class Plan:
    """How attention is computed: everything about it that is not an array.

    Attributes:
        kernel: Name of the operator, for messages.
        band: The static mask.
        scale: Factor on the products of queries and keys.
        softcap: Scores are ``softcap * tanh(score / softcap)``; 0 for none.
        dropout: Probability to drop a weight.
        precision: None, "default", "high" or "highest", for float32.
        blocks: What the caller asked for (block_q, block_kv, part_q, part_kv); None in a place
            means the heuristic's choice.
        backward_blocks: The same for the backward.
        split_scale: Whether the scale goes into the queries, as two bfloat16 numbers each, or onto
            the scores.
        interpret: Pallas' `interpret`: False, True or `pltpu.InterpretParams`.
    """

    kernel: str
    band: Band
    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    precision: str | None = None
    blocks: tuple[int | None, ...] = (None, None, None, None)
    backward_blocks: tuple[int | None, ...] = (None, None, None, None)
    split_scale: bool | None = None
    interpret: Any = False


class Shape(NamedTuple):
    """Sizes of an attention problem."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    depth: int
    depth_v: int

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


def shape_of(q: Any, k: Any, v: Any) -> Shape:
    """The sizes of a problem.

    Args:
        q: [batch, heads, q_len, head_dim]; anything with a shape.
        k: [batch, kv_heads, kv_len, head_dim].
        v: [batch, kv_heads, kv_len, v_dim].

    Returns:
        The sizes.
    """
    batch, heads, queries, depth = q.shape
    return Shape(batch, heads, k.shape[1], queries, k.shape[2], depth, v.shape[3])


def check_arrays(kernel: str, q: Any, k: Any, v: Any, others: dict[str, tuple[Any, Any]]) -> None:
    """Refuse arrays that do not belong together.

    Args:
        kernel: Name of the operator, for messages.
        q: Queries: anything with shape and dtype.
        k: Keys.
        v: Values.
        others: By name, an optional argument and the shape that it must broadcast to (a list) or
            have (a tuple).

    Raises:
        ArgumentError: Shapes do not fit.
        DTypeError: An argument is not of a type that the kernel takes.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ArgumentError(
                f"kernel {kernel!r}: argument {name!r} has {x.ndim} dimensions, not 4",
                hint="the layout is [batch, heads, length, head_dim]",
            )
        if x.dtype not in DTYPES:
            raise DTypeError(
                f"kernel {kernel!r}: argument {name!r} is {x.dtype}",
                hint="convert it to bfloat16, float16 or float32",
            )
        if x.dtype != q.dtype:
            raise DTypeError(
                f"kernel {kernel!r}: 'q' is {q.dtype}, {name!r} is {x.dtype}",
                hint="convert them to one type",
            )
    s = shape_of(q, k, v)
    if k.shape[0] != s.batch or k.shape[3] != s.depth or v.shape[:3] != k.shape[:3]:
        raise ArgumentError(
            f"kernel {kernel!r}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} "
            "do not fit",
            hint="k is [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, v_dim]",
        )
    if s.kv_heads == 0 or s.heads % s.kv_heads:
        raise ArgumentError(
            f"kernel {kernel!r}: {s.heads} query heads are no multiple of {s.kv_heads} key heads"
        )
    for name, (x, wanted) in others.items():
        if x is None:
            continue
        fits = len(x.shape) == len(wanted) and all(
            have == want or (have == 1 and isinstance(wanted, list))
            for have, want in zip(x.shape, wanted, strict=True)
        )
        if not fits:
            how = "that broadcasts to" if isinstance(wanted, list) else "of"
            raise ArgumentError(
                f"kernel {kernel!r}: argument {name!r} is {list(x.shape)}",
                hint=f"pass one {how} {list(wanted)}",
            )


def make_plan(
    kernel: str,
    q: Any,
    *,
    causal: bool,
    window: tuple[int, int],
    q_offset: int,
    scale: float | None,
    softcap: float,
    dropout: float,
    precision: str | None,
    blocks: tuple[int | None, ...],
    backward_blocks: tuple[int | None, ...],
    split_scale: bool | None,
    interpret: Any,
) -> Plan:
    """Check the options of an operator and put them together.

    Args:
        kernel: Name of the operator, for messages.
        q: Queries: anything with a shape.
        causal: No query sees a later key.
        window: How many keys back and ahead a query sees; -1 for any number.
        q_offset: Position of the first query among the keys.
        scale: Factor on the scores; None for ``1 / sqrt(head_dim)``.
        softcap: Bound on the scores; 0 for none.
        dropout: Probability to drop a weight.
        precision: None, "default", "high" or "highest".
        blocks: block_q, block_kv, part_q, part_kv; None for the heuristic's choice.
        backward_blocks: The same for the backward.
        split_scale: See `Plan`; None for the heuristic's choice.
        interpret: Pallas' `interpret`.

    Returns:
        The plan.

    Raises:
        ArgumentError: An option has no meaning.
    """
    check_precision(precision, kernel)
    if len(window) != 2 or min(window) < -1:
        raise ArgumentError(
            f"kernel {kernel!r}: argument 'window' is {window}",
            hint="pass (keys back, keys ahead), -1 for any number",
        )
    if not 0 <= dropout < 1:
        raise ArgumentError(
            f"kernel {kernel!r}: argument 'dropout' is {dropout}",
            hint="pass a probability below 1",
        )
    if softcap < 0:
        raise ArgumentError(
            f"kernel {kernel!r}: argument 'softcap' is {softcap}",
            hint="pass a positive bound, or 0 for none",
        )
    left, right = (None if size < 0 else size for size in window)
    if causal:
        right = 0
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    return Plan(
        kernel,
        Band(left, right, q_offset),
        float(scale),
        float(softcap),
        float(dropout),
        precision,
        blocks,
        backward_blocks,
        split_scale,
        interpret,
    )


def heuristic_blocks(shape: Shape, itemsize: int, *, backward: bool = False) -> Blocks:
    """Blocks that every chip compiles.

    Args:
        shape: The problem's sizes.
        itemsize: Bytes of an element.
        backward: For the gradients, which keep more in VMEM.

    Returns:
        Whole tiles: queries in multiples of 128 (they lie along lanes), keys of 128, too.
    """
    wide = itemsize > 2 or max(shape.depth, shape.depth_v) > 256
    limit = 512 if wide else 1024
    q = even_block(round_up(shape.queries, LANES), limit, LANES)
    kv = even_block(round_up(shape.keys, LANES), limit, LANES)
    return Blocks(q, kv, _divisor(q, PART), _divisor(kv, PART // 2 if backward else PART))


def _divisor(block: int, limit: int) -> int:
    """The largest multiple of 128 up to `limit` that divides `block`."""
    return max(part for part in range(LANES, min(block, limit) + 1, LANES) if block % part == 0)


def choose_blocks(
    shape: Shape,
    itemsize: int,
    asked: tuple[int | None, ...],
    kernel: str,
    *,
    backward: bool = False,
) -> Blocks:
    """The blocks in force: those asked for, cut to the arrays, or else the heuristic's.

    Args:
        shape: The problem's sizes.
        itemsize: Bytes of an element.
        asked: block_q, block_kv, part_q, part_kv; None for the heuristic's choice.
        kernel: Name of the operator, for messages.
        backward: For the gradients.

    Returns:
        Legal blocks, none longer than the padded length.

    Raises:
        ConfigError: A block is no positive multiple of 128, or a part does not divide its block.
    """
    default = heuristic_blocks(shape, itemsize, backward=backward)
    chosen = []
    for name, block, fallback, size in (
        ("block_q", asked[0], default.q, shape.queries),
        ("block_kv", asked[1], default.kv, shape.keys),
    ):
        if block is not None and (block <= 0 or block % LANES):
            raise ConfigError(
                f"kernel {kernel!r}: {name}={block} is no positive multiple of {LANES}",
            )
        chosen.append(fallback if block is None else min(block, round_up(size, LANES)))
    for name, part, block, limit in (
        ("part_q", asked[2], chosen[0], PART),
        ("part_kv", asked[3], chosen[1], PART // 2 if backward else PART),
    ):
        if part is None:
            chosen.append(_divisor(block, limit))
            continue
        part = min(part, block)
        if part <= 0 or part % LANES or block % part:
            raise ConfigError(
                f"kernel {kernel!r}: {name}={part} does not divide the block of {block}",
                hint=f"use a multiple of {LANES} that does",
            )
        chosen.append(part)
    return Blocks(*chosen)


def vmem_need(shape: Shape, dtype: Any, blocks: Blocks) -> int:
    """Bytes of VMEM that the forward's blocks take, masks not counted.

    Args:
        shape: The problem's sizes.
        dtype: Element type.
        blocks: Legal blocks.

    Returns:
        An estimate in bytes, without the compiler's own spills.
    """
    q, kv = blocks.block
    buffered = padded_bytes((q, shape.depth), dtype) + padded_bytes((kv, shape.depth), dtype)
    buffered += padded_bytes((shape.depth_v, kv), dtype) + padded_bytes((q, shape.depth_v), dtype)
    scratch = padded_bytes((2 * shape.depth, q), dtype)
    scratch += padded_bytes((shape.depth_v + 16, q), jnp.float32)
    scratch += 2 * padded_bytes((blocks.part_kv, blocks.part_q), jnp.float32)
    return 2 * buffered + scratch


def fits(
    q: Any,
    k: Any,
    v: Any,
    block_q: int | None,
    block_kv: int | None,
    part_q: int | None,
    part_kv: int | None,
) -> bool | str:
    """Whether the autotuner should try a config on these arrays.

    Args:
        q: Queries: anything with shape and dtype.
        k: Keys.
        v: Values.
        block_q: The candidate's block, None for the heuristic's.
        block_kv: As `block_q`.
        part_q: As `block_q`.
        part_kv: As `block_q`.

    Returns:
        True, or why not in one line.
    """
    shape = shape_of(q, k, v)
    dtype = jnp.dtype(str(q.dtype).removeprefix("torch."))
    asked = (block_q, block_kv, part_q, part_kv)
    try:
        blocks = choose_blocks(shape, dtype.itemsize, asked, "tpu::attention")
    except ConfigError as error:
        return error.problem.removeprefix("kernel 'tpu::attention': ")
    for name, block, size in (
        ("block_q", block_q, shape.queries),
        ("block_kv", block_kv, shape.keys),
    ):
        if block is not None and block >= 2 * round_up(size, LANES):
            return f"{name}={block} is the same as a smaller one here"
    need = vmem_need(shape, dtype, blocks)
    if need > VMEM_BUDGET:
        return f"needs {need / MIB:.0f} MiB of VMEM, more than {VMEM_BUDGET // MIB} MiB"
    return True


def bucket(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    """The sizes whose tuned blocks serve these arrays, too: batch and heads do not matter.

    Args:
        q: Queries: anything with a shape.
        k: Keys.
        v: Values.

    Returns:
        Lengths rounded up to a power of two, 128 at least, and the head dimensions.

    Example:
        >>> x = jnp.ones((1, 2, 1000, 64))
        >>> bucket(x, x, x)
        (1024, 1024, 64, 64)
    """
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        return (*q.shape, *k.shape, *v.shape)  # the call itself says what is wrong
    shape = shape_of(q, k, v)
    lengths = (max(LANES, 1 << (size - 1).bit_length()) for size in (shape.queries, shape.keys))
    return (*lengths, shape.depth, shape.depth_v)


def known(*arrays: jax.Array | None) -> bool:
    """Whether all sizes are numbers; symbols occur while the registry derives shapes."""
    return all(isinstance(n, int) for x in arrays if x is not None for n in x.shape)
