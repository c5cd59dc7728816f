"""`tpu::matmul`, `tpu::bmm`, `tpu::gated_matmul`: matrix products with what belongs to them fused.

Algorithm. Tiles of the output, the contracted dimension innermost, float32 accumulation in VMEM,
bias, activation and residual in the last step (`matmul_kernel`). One body serves all operators and
either operand transposed: a batch is one more grid axis in front, a transposed operand another
index map and another contracted dimension, so nothing is ever transposed or copied in HBM.

Source: the textbook blocked product of the Pallas documentation, written anew.

Limits. Floating point only. Reverse mode only: forward-mode differentiation is not defined. XLA's
own product is as fast for plain shapes; see docs/kernels/matmul.md.
"""

from __future__ import annotations

import functools

import jax
import torch

from tpu_kernels.ops.epilogue import activate_torch
from tpu_kernels.ops.matmul_blocks import CONFIGS, bucket, fits
from tpu_kernels.ops.matmul_gradients import product
from tpu_kernels.ops.matmul_plan import Operands, make_plan
from tpu_kernels.registry.decorator import tpu_kernel

# References ---------------------------------------------------------------------------------------


def reference(
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    transpose_x: bool = False,
    transpose_y: bool = False,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> torch.Tensor:
    """The fused product by PyTorch, in float32.

    Args:
        x: [..., M, K], or [..., K, M] with `transpose_x`.
        y: [..., K, N], or [..., N, K] with `transpose_y`.
        bias: Broadcasts to [..., M, N]; added before the activation.
        residual: Broadcasts to [..., M, N]; added after it.
        transpose_x: `x` is stored transposed.
        transpose_y: `y` is stored transposed.
        activation: None or one of `epilogue.ACTIVATIONS`.
        alpha: Factor on the product.
        beta: Factor on the bias.

    Returns:
        [..., M, N] in the promoted dtype of `x` and `y`.

    Example:
        >>> reference(torch.ones(2, 3), torch.ones(4, 3), transpose_y=True).shape
        torch.Size([2, 4])
    """
    dtype = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    left = (x.mT if transpose_x else x).to(wide)
    total = torch.matmul(left, (y.mT if transpose_y else y).to(wide)) * alpha
    if bias is not None:
        total = total + bias.to(wide) * beta
    total = activate_torch(total, activation)
    return (total if residual is None else total + residual.to(wide)).to(dtype)


def gated_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    residual: torch.Tensor | None = None,
    transpose_y: bool = False,
    activation: str | None = "silu",
) -> torch.Tensor:
    """The gated product by PyTorch, in float32.

    Args:
        x: [M, K].
        gate: [K, N], or [N, K] with `transpose_y`.
        up: As `gate`.
        residual: Broadcasts to [M, N].
        transpose_y: `gate` and `up` are stored transposed.
        activation: None or one of `epilogue.ACTIVATIONS`.

    Returns:
        [M, N] in the promoted dtype of `x` and `gate`.

    Example:
        >>> gated_reference(torch.ones(2, 3), torch.ones(3, 4), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    dtype = torch.promote_types(x.dtype, gate.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    first, second = (
        torch.matmul(x.to(wide), (y.mT if transpose_y else y).to(wide)) for y in (gate, up)
    )
    total = activate_torch(first, activation) * second
    return (total if residual is None else total + residual.to(wide)).to(dtype)


# Operators ----------------------------------------------------------------------------------------

_operator = functools.partial(
    tpu_kernel, configs=CONFIGS, constraints=fits, bucket=bucket, autocast=torch.bfloat16
)


@_operator("tpu::matmul", reference=reference)
def matmul(
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    precision: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply two matrices: ``activation(alpha * x @ y + beta * bias) + residual``.

    Args:
        x: [M, K], or [K, M] with `transpose_x`; bfloat16, float16 or float32.
        y: [K, N], or [N, K] with `transpose_y`; may differ from `x` in dtype.
        bias: Broadcasts to [M, N].
        residual: Broadcasts to [M, N].
        transpose_x: `x` is stored transposed. Nothing is copied.
        transpose_y: `y` is stored transposed. Nothing is copied.
        activation: "relu", "relu2" (squared), "gelu" (by erf), "gelu_tanh", "silu", "sigmoid" or
            "tanh", in float32; None for none.
        alpha: Factor on the product.
        beta: Factor on the bias.
        precision: For float32: None or "default" (one bfloat16 pass on the MXU), "high" (three
            passes), "highest" (six).
        block_m: Rows of the output per grid step; None for the heuristic's choice.
        block_n: Columns of the output per grid step.
        block_k: Elements of the contracted dimension per grid step.
        interpret: Filled in by the toolkit.

    Returns:
        [M, N] in the promoted dtype of `x` and `y`: accumulated in float32, and rounded once, after
        all that is fused.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` or `activation` is unknown.
        DTypeError: An operand is not of a floating point type that the kernel takes.
        ConfigError: A block neither covers its dimension nor is a whole number of tiles.

    Example:
        >>> matmul(torch.ones(2, 3), torch.ones(3, 1))
        tensor([[3.],
                [3.]])
        >>> matmul(torch.ones(2, 3), torch.ones(3, 1), torch.tensor([-4.0]), activation="relu")
        tensor([[0.],
                [0.]])
    """
    operands = Operands(x, y, bias=bias, residual=residual)
    plan = make_plan(
        "tpu::matmul",
        2,
        operands,
        transposed=(transpose_x, transpose_y),
        precision=precision,
        blocks=(block_m, block_n, block_k),
        activation=activation,
        alpha=alpha,
        beta=beta,
        interpret=interpret,
    )
    return product(operands, plan)


@_operator("tpu::bmm", reference=reference)
def bmm(
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    transpose_x: bool = False,
    transpose_y: bool = False,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    precision: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply two batches of matrices: `matmul` with one more grid axis in front.

    Args:
        x: [B, M, K], or [B, K, M] with `transpose_x`; bfloat16, float16 or float32.
        y: [B, K, N], or [B, N, K] with `transpose_y`; may differ from `x` in dtype.
        bias: Broadcasts to [B, M, N].
        residual: Broadcasts to [B, M, N].
        transpose_x: The matrices of `x` are stored transposed. Nothing is copied.
        transpose_y: The matrices of `y` are stored transposed. Nothing is copied.
        activation: As in `matmul`.
        alpha: As in `matmul`.
        beta: As in `matmul`.
        precision: As in `matmul`.
        block_m: As in `matmul`.
        block_n: As in `matmul`.
        block_k: As in `matmul`.
        interpret: Filled in by the toolkit.

    Returns:
        [B, M, N] in the promoted dtype of `x` and `y`, accumulated in float32.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` or `activation` is unknown.
        DTypeError: An operand is not of a floating point type that the kernel takes.
        ConfigError: A block neither covers its dimension nor is a whole number of tiles.

    Example:
        >>> bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4)).shape
        torch.Size([5, 2, 4])
    """
    operands = Operands(x, y, bias=bias, residual=residual)
    plan = make_plan(
        "tpu::bmm",
        3,
        operands,
        transposed=(transpose_x, transpose_y),
        precision=precision,
        blocks=(block_m, block_n, block_k),
        activation=activation,
        alpha=alpha,
        beta=beta,
        interpret=interpret,
    )
    return product(operands, plan)


def _gated_fits(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    block_m: int | None,
    block_n: int | None,
    block_k: int | None,
    transpose_y: bool = False,
) -> bool | str:
    return fits(x, gate, block_m, block_n, block_k, transpose_y=transpose_y, up=up)


@_operator("tpu::gated_matmul", reference=gated_reference, constraints=_gated_fits)
def gated_matmul(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    residual: jax.Array | None = None,
    *,
    transpose_y: bool = False,
    activation: str | None = "silu",
    precision: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Two products of one matrix, gated: ``activation(x @ gate) * (x @ up) + residual``.

    SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh". `x` is read once for both products, and
    neither of them is written.

    Args:
        x: [M, K]; bfloat16, float16 or float32.
        gate: [K, N], or [N, K] with `transpose_y`; may differ from `x` in dtype.
        up: As `gate`.
        residual: Broadcasts to [M, N].
        transpose_y: `gate` and `up` are stored transposed, as weights are. Nothing is copied.
        activation: As in `matmul`.
        precision: As in `matmul`.
        block_m: As in `matmul`.
        block_n: As in `matmul`.
        block_k: As in `matmul`.
        interpret: Filled in by the toolkit.

    Returns:
        [M, N] in the promoted dtype of `x` and `gate`, accumulated in float32.

    Raises:
        ArgumentError: Shapes do not fit, or `precision` or `activation` is unknown.
        DTypeError: An operand is not of a floating point type that the kernel takes.
        ConfigError: A block neither covers its dimension nor is a whole number of tiles.

    Example:
        >>> gated_matmul(torch.ones(2, 3), torch.ones(3, 1), torch.ones(3, 1), activation="relu")
        tensor([[9.],
                [9.]])
    """
    operands = Operands(x, gate, up, residual=residual)
    plan = make_plan(
        "tpu::gated_matmul",
        2,
        operands,
        transposed=(False, transpose_y),
        precision=precision,
        blocks=(block_m, block_n, block_k),
        activation=activation,
        interpret=interpret,
    )
    return product(operands, plan)
