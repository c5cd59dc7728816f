"""A matrix product but for its arrays: orientation, dtypes, precision and what is fused to it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_kernels.errors import ArgumentError, DTypeError
from tpu_kernels.ops.epilogue import broadcasts, check_activation
from tpu_kernels.ops.precision import check_precision
from tpu_kernels.ops.tiles import LANES, sublanes

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class Blocks(NamedTuple):
    """Elements of each dimension that one grid step handles."""

    m: int
    n: int
    k: int


class Operands(NamedTuple):
    """The arrays of one product.

    Attributes:
        x: Left operand.
        y: Right operand.
        up: Second right operand of a gated product, stored like `y`.
        bias: Added before the activation; broadcasts to the result.
        residual: Added after it; broadcasts to the result.
    """

    x: Any
    y: Any
    up: Any = None
    bias: Any = None
    residual: Any = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the wider operand, which is what is multiplied."""
        return max(int(self.x.dtype.itemsize), int(self.y.dtype.itemsize))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one product is computed: everything about it that is not an array.

    The result is ``activation(alpha * x @ y + beta * bias) + residual``, or, gated,
    ``activation(x @ y) * (x @ up) + residual``.

    Attributes:
        kernel: Name of the operator, for messages.
        transpose_x: `x` is stored as [..., K, M].
        transpose_y: `y` is stored as [..., N, K].
        out_dtype: Dtype of the result.
        precision: None, "default", "high" or "highest".
        blocks: What the caller asked for; None in a place means the heuristic's choice.
        activation: None, or one of `epilogue.ACTIVATIONS`.
        alpha: Factor on the product.
        beta: Factor on the bias.
        interpret: Pallas' `interpret`: False, True or `pltpu.InterpretParams`.
    """

    kernel: str
    transpose_x: bool
    transpose_y: bool
    out_dtype: Any
    precision: str | None = None
    blocks: tuple[int | None, int | None, int | None] = (None, None, None)
    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
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
            # An operand that is added may be of another dtype: 16 rows are whole tiles of any.
            m=LANES if self.transpose_x else max(rows, sublanes(self.out_dtype), 16),
            n=LANES,  # the output's lanes
            k=rows if self.transpose_x and not self.transpose_y else LANES,
        )

    def passes(self, operands: Operands) -> int:
        """How often the matrix unit multiplies an element."""
        return (
            {"high": 3, "highest": 6}.get(self.precision or "", 1)
            if (operands.itemsize == 4)
            else 1
        )


def make_plan(
    kernel: str,
    rank: int,
    operands: Operands,
    *,
    transposed: tuple[bool, bool],
    precision: str | None,
    blocks: tuple[int | None, int | None, int | None],
    activation: str | None,
    interpret: Any,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Plan:
    """Check the arguments of an operator and put together those that are not arrays.

    Args:
        kernel: Name of the operator, for messages.
        rank: Number of dimensions that both operands must have.
        operands: Anything with shapes and dtypes.
        transposed: Whether `x` and `y` are stored transposed.
        precision: None, "default", "high" or "highest".
        blocks: block_m, block_n, block_k; None for the heuristic's choice.
        activation: None, or one of `epilogue.ACTIVATIONS`.
        interpret: Pallas' `interpret`.
        alpha: Factor on the product.
        beta: Factor on the bias.

    Returns:
        The plan.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` or `activation` is unknown.
        DTypeError: An operand is not of a floating point type that this kernel takes.
    """
    check_precision(precision, kernel)
    check_activation(activation, kernel)
    x, y, up = operands.x, operands.y, operands.up
    for name, operand in zip(Operands._fields, operands, strict=True):
        if operand is None:
            continue
        if name in ("x", "y", "up") and operand.ndim != rank:
            raise ArgumentError(
                f"kernel {kernel!r}: argument {name!r} has {operand.ndim} dimensions, not {rank}"
            )
        if operand.dtype not in DTYPES:
            raise DTypeError(
                f"kernel {kernel!r}: argument {name!r} is {operand.dtype}",
                hint="convert it to bfloat16, float16 or float32",
            )
    dtype = jnp.promote_types(x.dtype, y.dtype)
    plan = Plan(kernel, *transposed, dtype, precision, blocks, activation, alpha, beta, interpret)
    contracted = y.shape[-1] if plan.transpose_y else y.shape[-2]
    if plan.sizes(x, y)[2] != contracted or x.shape[:-2] != y.shape[:-2]:
        flags = f"transpose_x={plan.transpose_x}, transpose_y={plan.transpose_y}"
        raise ArgumentError(
            f"kernel {kernel!r}: x {list(x.shape)} and y {list(y.shape)} do not fit ({flags})",
            hint="the batch and the contracted dimension of both must be equal",
        )
    if up is not None and (up.shape != y.shape or up.dtype != y.dtype):
        raise ArgumentError(
            f"kernel {kernel!r}: the two right operands are {y.dtype}{list(y.shape)} and "
            f"{up.dtype}{list(up.shape)}",
            hint="they must agree",
        )
    _check_added(kernel, operands, (*x.shape[:-2], *plan.sizes(x, y)[:2]))
    return plan


def _check_added(kernel: str, operands: Operands, result: tuple[int, ...]) -> None:
    for name in ("bias", "residual"):
        added = getattr(operands, name)
        if added is not None and not broadcasts(added.shape, result):
            raise ArgumentError(
                f"kernel {kernel!r}: argument {name!r} {list(added.shape)} does not broadcast to "
                f"the result {list(result)}"
            )


def abstract(operand: Any) -> Any:
    """Shape and NumPy dtype of an operand, which may be a torch tensor, or None."""
    if operand is None:
        return None
    name = str(operand.dtype).removeprefix("torch.")
    return jax.ShapeDtypeStruct(tuple(operand.shape), jnp.dtype(name))
