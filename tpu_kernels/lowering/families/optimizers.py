"""Fused optimiser steps; each returns the new values of what torch's operator writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tpu_kernels.lowering.rules import lowers
from tpu_kernels.lowering.values import Array

Lists = tuple[list[Array], ...]


def _scaled(grad: Array, grad_scale: Array | None, maximize: bool) -> Array:
    grad = grad if grad_scale is None else grad / grad_scale.astype(grad.dtype)
    return -grad if maximize else grad


def _kept(skip: Array | None, old: Array, new: Array) -> Array:
    """The old value where the gradients were not finite (`found_inf`)."""
    return new if skip is None else jnp.where(skip.reshape(()) == 1, old, new)


def _adam(
    params: Sequence[Array], grads: Sequence[Array], exp_avgs: Sequence[Array],
    exp_avg_sqs: Sequence[Array], max_exp_avg_sqs: Sequence[Array], steps: Sequence[Array], *,
    lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool,
    maximize: bool, grad_scale: Array | None, found_inf: Array | None, decoupled: bool,
) -> Lists:  # fmt: skip
    out: Lists = ([], [], [], [], [])
    for i, param in enumerate(params):
        dtype = param.dtype
        rate = jnp.asarray(lr).astype(dtype)
        raw = _scaled(grads[i], grad_scale, False)
        grad = -raw if maximize else raw
        new = param
        if weight_decay and decoupled:
            new = new - rate * weight_decay * new
        elif weight_decay:
            grad = grad + weight_decay * new
        mean = exp_avgs[i] + (grad - exp_avgs[i]) * (1 - beta1)
        square = exp_avg_sqs[i] * beta2 + (1 - beta2) * grad * grad
        step = steps[i].astype(dtype)
        correction1 = 1 - lax.pow(lax.full_like(step, beta1), step)
        correction2 = lax.sqrt(1 - lax.pow(lax.full_like(step, beta2), step))
        largest = square
        if amsgrad:
            largest = jnp.maximum(max_exp_avg_sqs[i], square)
            out[4].append(_kept(found_inf, max_exp_avg_sqs[i], largest))
        denominator = lax.sqrt(largest) / correction2 + eps
        new = new - rate / correction1 * mean / denominator
        out[0].append(_kept(found_inf, param, new))
        out[1].append(_kept(found_inf, grads[i], raw))
        out[2].append(_kept(found_inf, exp_avgs[i], mean))
        out[3].append(_kept(found_inf, exp_avg_sqs[i], square))
    return out


@lowers("_fused_adamw", "_fused_adamw.tensor_lr")
def fused_adamw(*args: Any, grad_scale: Any = None, found_inf: Any = None, **kwargs: Any) -> Lists:
    return _adam(*args, grad_scale=grad_scale, found_inf=found_inf, decoupled=True, **kwargs)


@lowers("_fused_adam", "_fused_adam.tensor_lr")
def fused_adam(*args: Any, grad_scale: Any = None, found_inf: Any = None, **kwargs: Any) -> Lists:
    return _adam(*args, grad_scale=grad_scale, found_inf=found_inf, decoupled=False, **kwargs)


@lowers("_fused_sgd", "_fused_sgd.tensor_lr")
def fused_sgd(
    params: Sequence[Array], grads: Sequence[Array], buffers: Sequence[Array], *,
    weight_decay: float, momentum: float, lr: Any, dampening: float, nesterov: bool,
    maximize: bool, is_first_step: bool, grad_scale: Any = None, found_inf: Any = None,
) -> Lists:  # fmt: skip
    out: Lists = ([], [], [])
    for i, param in enumerate(params):
        raw = _scaled(grads[i], grad_scale, False)
        grad = -raw if maximize else raw
        if weight_decay:
            grad = grad + weight_decay * param
        if momentum:
            buffer = grad if is_first_step else momentum * buffers[i] + (1 - dampening) * grad
            out[2].append(_kept(found_inf, buffers[i], buffer))
            grad = grad + momentum * buffer if nesterov else buffer
        out[0].append(_kept(found_inf, param, param - jnp.asarray(lr).astype(param.dtype) * grad))
        out[1].append(_kept(found_inf, grads[i], raw))
    return out
