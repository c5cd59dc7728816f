"""What is done to a matrix product before it is stored: activations, and how operands broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch

from tpu_kernels.errors import ArgumentError

# In float32 on both sides. JAX's serve kernels and gradients, torch's the reference.
_JAX: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda z: jnp.maximum(z, 0.0),
    "relu2": lambda z: jnp.square(jnp.maximum(z, 0.0)),
    "gelu": lambda z: 0.5 * z * (1.0 + jax.lax.erf(z * 2**-0.5)),
    "gelu_tanh": lambda z: 0.5 * z * (1.0 + jnp.tanh(0.7978845608028654 * (z + 0.044715 * z**3))),
    "silu": lambda z: z * jax.lax.logistic(z),
    "sigmoid": jax.lax.logistic,
    "tanh": jnp.tanh,
}
_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
ACTIVATIONS = tuple(_JAX)


def check_activation(activation: str | None, kernel: str) -> None:
    """Refuse an activation that no kernel knows.

    Args:
        activation: The value passed by the caller.
        kernel: Name of the kernel, for the message.

    Raises:
        ArgumentError: It is neither None nor one of `ACTIVATIONS`.

    Example:
        >>> check_activation("gelu", "tpu::matmul")
    """
    if activation is not None and activation not in _JAX:
        raise ArgumentError(
            f"kernel {kernel!r}: argument 'activation' is {activation!r}",
            hint="pass None or one of " + ", ".join(repr(name) for name in ACTIVATIONS),
        )


def activate(z: jax.Array, activation: str | None) -> jax.Array:
    """Apply an activation.

    Args:
        z: float32 of any shape.
        activation: None or one of `ACTIVATIONS`.

    Returns:
        As `z`.

    Example:
        >>> float(activate(jnp.float32(-2.0), "relu"))
        0.0
    """
    return z if activation is None else _JAX[activation](z)


def activate_torch(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    """`activate` by PyTorch's own functions, for references."""
    return z if activation is None else _TORCH[activation](z)


def as_rank(operand: jax.Array, rank: int) -> jax.Array:
    """An operand with axes of one element in front.

    Args:
        operand: At most `rank` dimensions.
        rank: How many it shall have.

    Returns:
        A reshaped operand.

    Example:
        >>> as_rank(jnp.ones(3), 2).shape
        (1, 3)
    """
    return operand.reshape((1,) * (rank - operand.ndim) + operand.shape)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether an operand of one shape can be added to a result of another without growing it.

    Example:
        >>> broadcasts((1, 3), (2, 3)), broadcasts((3,), (2, 3)), broadcasts((2,), (2, 3))
        (True, True, False)
    """
    behind = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape, behind, strict=True))


def sum_to(total: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The gradient of a broadcast: the sum over the axes along which it repeated elements.

    Args:
        total: Gradient of the result.
        shape: Shape of the operand that was broadcast.

    Returns:
        An array of `shape`.

    Example:
        >>> sum_to(jnp.ones((2, 3)), (1, 3))
        Array([[2., 2., 2.]], dtype=float32)
    """
    extra = total.ndim - len(shape)
    axes = [*range(extra)]
    axes += [extra + i for i, size in enumerate(shape) if size == 1 != total.shape[extra + i]]
    return jnp.sum(total, axis=tuple(axes)).reshape(tuple(shape))
