"""Matrix products that can be differentiated, any number of times, in reverse mode.

A `custom_vjp` inside the JAX function rather than a backward registered on the operator: then
`jax.vjp` of the function is right wherever it is called (in a user's jax.jit, under jax.grad, in a
kernel built on this one), and the torch autograd, which the registry derives from that same
`jax.vjp`, cannot disagree with it.

The gradients of a fused product are elementwise operations, which XLA fuses by itself, and plain
products, which XLA computes faster than a kernel (docs/kernels/matmul.md). They are therefore left
to it, but for those in three passes: the kernel rounds halves where XLA cuts them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tpu_kernels.ops.epilogue import activate, sum_to
from tpu_kernels.ops.matmul_kernel import launch
from tpu_kernels.ops.matmul_plan import Operands, Plan

_Kept = tuple[jax.Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def product(operands: Operands, plan: Plan) -> jax.Array:
    """The product with all that is fused to it.

    Args:
        operands: The arrays; None for what there is not.
        plan: What to compute.

    Returns:
        [..., M, N] in the plan's dtype.
    """
    return _launch(operands, plan, keeps=False)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _keeping(operands: Operands, plan: Plan) -> tuple[jax.Array, _Kept]:
    """The same, and what the activation was applied to; gated, the second product as well."""
    result, *kept = _launch(operands, plan, keeps=True)
    return result, tuple(kept)


def _launch(operands: Operands, plan: Plan, *, keeps: bool) -> list[jax.Array]:
    if any(o is not None and o.dtype == jnp.float16 for o in operands):
        # Mosaic loads float16 on no chip.
        wide = Operands(
            *(o if o is None or o.dtype != jnp.float16 else o.astype(jnp.float32) for o in operands)
        )
        if jnp.float16 in (operands.x.dtype, operands.y.dtype):
            # A float16 is exactly two bfloat16, so "high" loses none of it, where one pass would
            # lose three bits.
            plan = dataclasses.replace(plan, precision="high")
        out_dtype = plan.out_dtype
        if out_dtype == jnp.float16:
            plan = dataclasses.replace(plan, out_dtype=jnp.float32)
        return [o.astype(out_dtype) for o in launch(wide, plan, keeps)]
    return launch(operands, plan, keeps)


def _forward(operands: Operands, plan: Plan) -> tuple[jax.Array, tuple[Operands, _Kept]]:
    if plan.activation is None and operands.up is None:
        return product(operands, plan), (operands, ())
    result, kept = _keeping(operands, plan)
    return result, (operands, kept)


def _backward(plan: Plan, saved: tuple[Operands, _Kept], grad: jax.Array) -> tuple[Operands]:
    operands, kept = saved
    return (_gradients(operands, kept, plan, grad, None),)


product.defvjp(_forward, _backward)


def _forward_keeping(
    operands: Operands, plan: Plan
) -> tuple[tuple[jax.Array, _Kept], tuple[Operands, _Kept]]:
    result, kept = _keeping(operands, plan)
    return (result, kept), (operands, kept)


def _backward_keeping(
    plan: Plan, saved: tuple[Operands, _Kept], grads: tuple[jax.Array, _Kept]
) -> tuple[Operands]:
    operands, kept = saved
    return (_gradients(operands, kept, plan, *grads),)


_keeping.defvjp(_forward_keeping, _backward_keeping)


def _gradients(
    operands: Operands, kept: _Kept, plan: Plan, grad: jax.Array, grads_kept: _Kept | None
) -> Operands:
    """Gradients of all operands.

    Args:
        operands: The arrays.
        kept: What the activation was applied to; gated, the second product as well.
        plan: What was computed.
        grad: Gradient of the result.
        grads_kept: Gradients of what was kept.

    Returns:
        Arrays like the operands, None where those are None.
    """
    inner = [grad.astype(jnp.float32)]
    if kept:

        def epilogue(first: jax.Array, *second: jax.Array) -> jax.Array:
            result = activate(first, plan.activation)
            return result * second[0] if second else result

        _, pull = jax.vjp(epilogue, *(k.astype(jnp.float32) for k in kept))
        inner = list(pull(inner[0]))
    if grads_kept is not None:
        inner = [a + b.astype(jnp.float32) for a, b in zip(inner, grads_kept, strict=True)]
    scaled = [inner[0] * plan.alpha if plan.alpha != 1 else inner[0], *inner[1:]]
    scaled = [s.astype(plan.out_dtype) for s in scaled]
    x, y, up = operands.x, operands.y, operands.up
    rights = [y] if up is None else [y, up]
    parts = [_left(right, s, plan) for right, s in zip(rights, scaled, strict=True)]
    bias, residual = operands.bias, operands.residual
    return Operands(
        x=functools.reduce(jnp.add, parts).astype(x.dtype),
        y=_right(x, scaled[0], plan).astype(y.dtype),
        up=None if up is None else _right(x, scaled[1], plan).astype(up.dtype),
        bias=None if bias is None else sum_to(inner[0] * plan.beta, bias.shape).astype(bias.dtype),
        residual=None
        if residual is None
        else sum_to(grad.astype(jnp.float32), residual.shape).astype(residual.dtype),
    )


def _left(y: jax.Array, grad: jax.Array, plan: Plan) -> jax.Array:
    """The gradient of `x` as it is stored."""
    if plan.transpose_x:
        return _plain(y, grad, plan, plan.transpose_y, True)
    return _plain(grad, y, plan, False, not plan.transpose_y)


def _right(x: jax.Array, grad: jax.Array, plan: Plan) -> jax.Array:
    """The gradient of `y` as it is stored."""
    if plan.transpose_y:
        return _plain(grad, x, plan, True, plan.transpose_x)
    return _plain(x, grad, plan, not plan.transpose_x, False)


def _plain(
    x: jax.Array, y: jax.Array, plan: Plan, transpose_x: bool, transpose_y: bool
) -> jax.Array:
    """A product with nothing fused, in float32: three passes by the kernel, others by XLA."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    if (
        dtype == jnp.float16
        or jnp.float16 in (x.dtype, y.dtype)
        or (dtype == jnp.float32 and plan.precision == "high")
    ):
        # Other shapes than the forward's, so blocks of their own.
        bare = Plan(
            plan.kernel,
            transpose_x,
            transpose_y,
            jnp.float32,
            plan.precision,
            interpret=plan.interpret,
        )
        return product(Operands(x, y), bare)
    batch = tuple(range(x.ndim - 2))
    axes = (x.ndim - 2 if transpose_x else x.ndim - 1, y.ndim - 1 if transpose_y else y.ndim - 2)
    exact = dtype == jnp.float32 and plan.precision == "highest"
    return jax.lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        (((axes[0],), (axes[1],)), (batch, batch)),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
