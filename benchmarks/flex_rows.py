"""FlexAttention's kernels for the comparison in kernels.py: the same problem, asked as a BlockMask.

The blocks to visit are part of the program here, so that the estimate can follow them. In a model
they are computed from the BlockMask's tensors, once per mask, and the kernel's code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from attention_peers import Case

Named = tuple[str, Callable[..., Any], Callable[..., Any]]


def flex(case: Case) -> Iterator[Named]:
    """Name, forward and step of FlexAttention for a causal mask, alone and with a score_mod."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from tpu_kernels.ops.flex_backward import Saved, captured_gradients, context, gradients
    from tpu_kernels.ops.flex_call import call_of
    from tpu_kernels.ops.flex_forward import forward
    from tpu_kernels.ops.flex_plan import FlexPlan

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    slopes = torch.ones(case.heads)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 50 * torch.tanh(score / 50)

    mask = create_block_mask(causal, None, None, case.length, case.length, device="cpu")
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    for name, mod in (("causal", None), ("causal, ALiBi", alibi), ("causal, softcap", softcap)):
        call = call_of(mod, causal, lists, mask.BLOCK_SIZE, "cpu")
        tensors = [x.numpy() for x in call.blocks]
        buffers = [jnp.asarray(x.numpy()) for x in call.buffers]
        plan = FlexPlan(
            "tpu::flex_attention",
            scale=case.depth**-0.5,
            score_mod=call.score_mod,
            mask_mod=call.mask_mod,
        )

        def run(
            q: jax.Array, k: jax.Array, v: jax.Array,
            tensors: Any = tensors, buffers: Any = buffers, plan: FlexPlan = plan,
        ) -> jax.Array:  # fmt: skip
            return forward(q, k, v, tensors, buffers, plan)[0]

        def step(
            q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array,
            tensors: Any = tensors, buffers: Any = buffers, plan: FlexPlan = plan,
        ) -> Any:  # fmt: skip
            out, lse, _ = forward(q, k, v, tensors, buffers, plan)
            found = context(Saved(q, k, v, tensors, buffers, out, lse), grad, None, plan)
            captured = [x for x in captured_gradients(found, buffers) if x is not None]
            return out, gradients(found), captured

        yield f"tpu::flex_attention, {name}", run, step
