"""Attention as others compute it, built for the comparison in kernels.py.

The peers are those that the interpreter at hand can import: flash and splash attention of JAX, and
splash attention of tokamax (which wants a newer Python and JAX than this package's tests use).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Forward = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Case:
    """One problem: batch, query and key heads, length, head dimension; causal, bfloat16."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    depth: int

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of q, k and v."""
        q = (self.batch, self.heads, self.length, self.depth)
        k = (self.batch, self.kv_heads, self.length, self.depth)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k, k)]


CASES = {
    case.name: case
    for case in (
        Case("llama3-8b/prefill_s4096", 1, 32, 8, 4096, 128),
        Case("llama3-8b/prefill_s8192", 1, 32, 8, 8192, 128),
        Case("gemma3-4b/train_global_s8192", 1, 8, 4, 8192, 256),
        Case("gpt-oss-120b/prefill_global_s8192", 1, 64, 8, 8192, 64),
    )
}


def step(forward: Forward) -> Callable[..., Any]:
    """Forward and backward, as one training step runs them."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array) -> Any:
        out, backward = jax.vjp(forward, q, k, v)
        return out, backward(grad)

    return run


def peers(case: Case) -> Iterator[tuple[str, Forward]]:
    """Names and functions of the peers at their best block sizes."""
    if importlib.util.find_spec("tokamax") is not None:
        for scheduler in (False, True):
            name = "tokamax splash 1024" + (", LP scheduler" if scheduler else "")
            yield name, functools.partial(_tokamax_splash, case, 1024, scheduler)
        return
    yield "jax flash 512", functools.partial(_flash, case, 512)
    yield "jax splash 1024/512", functools.partial(_splash, case, 1024, 512)
    yield "jax splash 1024", functools.partial(_splash, case, 1024, 1024)


def _flash(case: Case, block: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    names = [name for name in flash.BlockSizes.__dataclass_fields__ if name != "block_b"]
    sizes = flash.BlockSizes(**dict.fromkeys(names, block), block_b=1)
    group = case.heads // case.kv_heads
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))  # it knows no groups of heads
    out: jax.Array = flash.flash_attention(
        q, k, v, causal=True, sm_scale=1 / math.sqrt(case.depth), block_sizes=sizes
    )
    return out


def _splash(
    case: Case, block: int, compute: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((case.length, case.length))] * case.heads)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,
    )
    # Tables of 32 bits, which the simulation of scalar memory reads.
    run = splash.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, downcast_smem_data=False
    )
    out: jax.Array = jax.vmap(run)(q * (1 / math.sqrt(case.depth)), k, v)
    return out


def _tokamax_splash(
    case: Case, block: int, scheduler: bool, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    config = splash.SplashConfig(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_experimental_scheduler=scheduler,
    )
    run = splash.make_splash_mha_single_device(
        masks.CausalMask((case.length, case.length)), config=config, downcast_smem_data=False
    )
    out: jax.Array = jax.vmap(run)(q * (1 / math.sqrt(case.depth)), k, v)
    return out
