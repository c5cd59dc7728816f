"""What a mod needs of captured tensors, as operands that a kernel reads block by block.

A kernel computes what depends on the score, and what depends on a query and a key at once and is
elementwise. Everything else is computed before it, by XLA: what depends on the query alone becomes
a row, on the key alone a column, on neither a number, each for as many batches and heads as it
depends on. What depends on both but is no elementwise function (a gather from a table of
distances) becomes a matrix.

A captured tensor that the indices themselves index (``bias[h, q, kv]``) is transposed and cut into
blocks; any other index is a gather.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.errors import TraceError
from tpu_kernels.ops.attention_operands import pad_to
from tpu_kernels.ops.attention_plan import Blocks, Shape
from tpu_kernels.ops.flex_program import INDICES, Program, evaluate
from tpu_kernels.ops.tiles import padded_bytes

# Operators that cost a kernel no more than reading their result would.
_CHEAP = frozenset(
    {
        "aten::_to_copy", "aten::add", "aten::sub", "aten::mul", "aten::neg", "aten::abs",
        "aten::minimum", "aten::maximum", "aten::eq", "aten::ne", "aten::lt", "aten::le",
        "aten::gt", "aten::ge", "aten::where", "aten::alias", "aten::clone", "aten::logical_and",
        "aten::logical_or", "aten::logical_not", "aten::bitwise_and", "aten::bitwise_or",
        "aten::bitwise_not", "aten::full", "aten::scalar_tensor",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A value of a program that is computed before the kernel.

    Attributes:
        number: The value.
        symbols: Which of "b", "h", "q", "k" it depends on.
    """

    number: int
    symbols: frozenset[str]

    @property
    def kind(self) -> str:
        """ "matrix", "row", "column" or "number"."""
        if {"q", "k"} <= self.symbols:
            return "matrix"
        if "q" in self.symbols:
            return "row"
        return "column" if "k" in self.symbols else "number"


@functools.lru_cache(maxsize=256)
def hoist(program: Program) -> tuple[Hoisted, ...]:
    """The values of a program that its kernel reads.

    Args:
        program: The program.

    Returns:
        The values, by number.

    Raises:
        TraceError: What depends on the score is no elementwise function of it.
    """
    found: dict[int, Hoisted] = {}
    seen: set[int] = set()

    def visit(number: int) -> None:
        if number in seen:
            return
        seen.add(number)
        step, symbols = program.step_of(number), program.depends[number]
        if step is None:
            if "t" in symbols:
                found[number] = Hoisted(number, frozenset())
            return
        inside = (
            step.rank == 0
            and step.pointwise
            and all(program.rank(operand) == 0 for operand in step.operands)
        )
        if "s" in symbols:
            if not inside:
                raise TraceError(f"the score_mod computes {step.op} of the score")
        elif not inside or not _stays(program, number):
            if step.rank:
                raise TraceError(f"the mod returns a tensor, from {step.op}")
            found[number] = Hoisted(number, symbols - {"t"})
            return
        for operand in step.operands:
            visit(operand)

    visit(program.result)
    return tuple(found[number] for number in sorted(found))


def _stays(program: Program, number: int) -> bool:
    """Whether a kernel computes an elementwise value that does not depend on the score."""
    symbols = program.depends[number]
    if {"q", "k"} <= symbols or not symbols:
        return True
    step = program.step_of(number)
    if step is None:
        return not symbols & {"t"}
    one_sided = symbols & {"q", "k"} and "t" not in symbols
    return bool(
        one_sided and step.name in _CHEAP and all(_stays(program, n) for n in step.operands)
    )


def values(
    program: Program, hoisted: Hoisted, buffers: Sequence[jax.Array], shape: Shape
) -> jax.Array:
    """A hoisted value for all the indices that it depends on.

    Args:
        program: The program.
        hoisted: Which value.
        buffers: The captured tensors.
        shape: The problem's sizes.

    Returns:
        [batch or 1, heads or 1, keys or 1, queries or 1].
    """
    counts = dict(zip(INDICES, (shape.batch, shape.heads, shape.queries, shape.keys), strict=True))
    order = ("b", "h", "k", "q")
    found = _sliced(program, hoisted, buffers, counts, order)
    if found is None:
        names = [name for name in order if name in hoisted.symbols]

        def one(*indices: jax.Array) -> jax.Array:
            known = dict(zip(names, indices, strict=True))
            inputs = [known.get(symbol) for symbol in program.symbols]
            result: jax.Array = evaluate(program, hoisted.number, [*inputs, *buffers])
            return result

        function = one
        for axis in range(len(names) - 1, -1, -1):
            axes = tuple(0 if n == axis else None for n in range(len(names)))
            function = jax.vmap(function, in_axes=axes)
        found = function(*(jnp.arange(counts[name], dtype=jnp.int32) for name in names))
    sizes = [counts[name] if name in hoisted.symbols else 1 for name in order]
    return jnp.reshape(found, sizes)


def _sliced(
    program: Program,
    hoisted: Hoisted,
    buffers: Sequence[jax.Array],
    counts: dict[str, int],
    order: Sequence[str],
) -> jax.Array | None:
    """The value without a gather, if it is a captured tensor that indices themselves index."""
    step = program.step_of(hoisted.number)
    if step is None or step.name != "aten::index" or step.kwargs:
        return None
    base, indices = step.args
    place = base.number - program.first_buffer
    if not 0 <= place < len(program.ranks) or len(indices) != program.ranks[place]:
        return None
    if any(index is None for index in indices):
        return None
    symbols = []
    for index in indices:
        source = program.source(index.number)
        if source >= program.first_buffer:
            return None
        symbols.append(program.symbols[source])
    buffer = buffers[place]
    if len(set(symbols)) < len(symbols):
        return None
    if any(buffer.shape[n] < counts[symbol] for n, symbol in enumerate(symbols)):
        return None  # torch would fail; the gather reads the nearest element
    buffer = buffer[tuple(slice(counts[symbol]) for symbol in symbols)]
    axes = sorted(range(len(symbols)), key=lambda n: order.index(symbols[n]))
    return jnp.transpose(buffer, axes)


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a kernel reads one operand.

    Attributes:
        hoisted: The value.
        dtype: What the kernel computes it in: floats as float32, whatever they are in memory.
        batched: Whether it depends on the batch.
        headed: Whether it depends on the head.
    """

    hoisted: Hoisted
    dtype: Any
    batched: bool
    headed: bool

    def read(self, ref: Any, rows: slice, columns: slice, batch: Any, head: Any, heads: int) -> Any:
        """The operand for some keys and queries, which broadcasts to [keys, queries]."""
        kind = self.hoisted.kind
        if kind == "number":
            at = (batch if self.batched else 0) * (heads if self.headed else 1)
            value = ref[at + (head if self.headed else 0)]
        elif kind == "row":
            value = ref[:, columns]
        elif kind == "column":
            value = ref[rows, :]
        else:
            value = ref[rows, columns]
        if self.dtype == jnp.bool_:
            return value.astype(jnp.int32) != 0 if value.ndim else value != 0
        return value if value.dtype == self.dtype else value.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of one mod, as a kernel takes them.

    Attributes:
        readers: How to read each.
        arrays: [batch or 1, heads or 1, keys or 1, queries or 1], whole blocks; numbers are flat.
        specs: Their block specs.
    """

    readers: tuple[Reader, ...]
    arrays: tuple[jax.Array, ...]
    specs: tuple[pl.BlockSpec, ...]

    def vmem(self, blocks: Blocks) -> int:
        """Bytes of VMEM that the blocks of the operands take, two buffers each."""
        sizes = {"row": (1, blocks.q), "column": (blocks.kv, 1), "matrix": (blocks.kv, blocks.q)}
        return sum(
            2 * padded_bytes(sizes[reader.hoisted.kind], array.dtype)
            for reader, array in zip(self.readers, self.arrays, strict=True)
            if reader.hoisted.kind != "number"
        )


def operands(
    program: Program, found: Sequence[jax.Array], shape: Shape, blocks: Blocks, at: Any
) -> Operands:
    """Lay hoisted values out for a kernel.

    Args:
        program: The program.
        found: `values` of each hoisted value.
        shape: The problem's sizes.
        blocks: The blocks in force.
        at: Makes an index map of ``place(batch, head, block of queries, block of keys)``.

    Returns:
        The operands.
    """
    readers, arrays, specs = [], [], []
    for hoisted, array in zip(hoist(program), found, strict=True):
        dtype = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype
        reader = Reader(hoisted, dtype, "b" in hoisted.symbols, "h" in hoisted.symbols)
        kind = hoisted.kind
        array = array.astype(_carrier(array.dtype, kind))
        if kind == "number":
            arrays.append(array.reshape(-1))
            specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        else:
            if kind != "column":
                array = pad_to(array, 3, blocks.q)
            if kind != "row":
                array = pad_to(array, 2, blocks.kv)
            arrays.append(array)
            specs.append(_spec(reader, blocks, at))
        readers.append(reader)
    return Operands(tuple(readers), tuple(arrays), tuple(specs))


def _spec(reader: Reader, blocks: Blocks, at: Any) -> pl.BlockSpec:
    kind = reader.hoisted.kind

    def place(b: Any, h: Any, i: Any, j: Any) -> Any:
        first = (b if reader.batched else 0, h if reader.headed else 0)
        return (*first, 0 if kind == "row" else j, 0 if kind == "column" else i)

    size = (1 if kind == "row" else blocks.kv, 1 if kind == "column" else blocks.q)
    return pl.BlockSpec((None, None, *size), at(place))


def _carrier(dtype: Any, kind: str) -> Any:
    """A dtype that the kernel loads: registers hold 32 bits, matrices may be narrower in memory."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if kind == "matrix" and dtype == jnp.bfloat16 else jnp.float32
    if dtype == jnp.bool_ and kind == "matrix":
        return jnp.int8
    return jnp.int32


def narrowed(buffers: Sequence[jax.Array]) -> list[jax.Array]:
    """Captured tensors as the programs see them: 64-bit integers as 32-bit ones."""
    return [
        x.astype(jnp.int32) if x.dtype == jnp.int64 else x  # indices fit
        for x in buffers
    ]
