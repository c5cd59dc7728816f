"""From FlexAttention's arguments, mods and a BlockMask, to a call of `tpu::flex_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from tpu_kernels.errors import TraceError
from tpu_kernels.ops.flex_operands import hoist
from tpu_kernels.ops.flex_program import parse
from tpu_kernels.ops.flex_trace import trace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LN2 = 0.6931471805599453


@dataclasses.dataclass(frozen=True)
class FlexCall:
    """What the operators take besides queries, keys and values.

    Attributes:
        blocks: Tensors of the BlockMask.
        buffers: Captured tensors.
        score_mod: Text of a program, or "".
        mask_mod: Text of a program, or "".
        sparse_block: Queries and keys of a block of the BlockMask.
        scored: For each buffer that the score_mod was given, its place among `buffers`; None for
            what is no tensor.
    """

    blocks: list[Any]
    buffers: list[Any]
    score_mod: str
    mask_mod: str
    sparse_block: tuple[int, int]
    scored: tuple[int | None, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operators' arguments from `blocks` to `sparse_block`."""
        texts = self.score_mod, self.mask_mod
        return (self.blocks, self.buffers, *texts, self.sparse_block)


def why_not(query: Any, key: Any, value: Any) -> str | None:
    """Why no kernel takes these queries, keys and values, None if one does."""
    if query.dtype not in DTYPES:
        return f"queries of {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return "queries, keys and values of several dtypes"
    return None


def call_of(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    blocks: Sequence[Any],
    sparse_block: tuple[int, int],
    device: torch.device | str,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
    *,
    stand_ins: Callable[[Any], Any] = lambda buffer: buffer,
) -> FlexCall:
    """Trace the mods and put a call together.

    Args:
        score_mod: A function or graph, or None.
        mask_mod: A function or graph, or None.
        blocks: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices of a BlockMask, the
            last two possibly None; or nothing.
        sparse_block: Queries and keys of a block of the BlockMask.
        device: Where the tensors are.
        score_buffers: What a graph takes for the tensors that its score_mod captured.
        mask_buffers: The same for the mask_mod.
        stand_ins: Makes a tensor of the shape and dtype of a buffer, where buffers are none.

    Returns:
        The call.

    Raises:
        TraceError: A mod has no form as a program, or not one that a kernel computes.
    """
    texts: list[str] = []
    found: list[list[Any]] = []
    for mod, buffers, scored in (
        (score_mod, score_buffers, True),
        (mask_mod, mask_buffers, False),
    ):
        if mod is None:
            texts.append("")
            found.append([])
            continue
        traced = trace(mod, [stand_ins(x) for x in buffers], scored=scored, device=device)
        program = parse(traced.text)
        hoist(program)
        same = scored and program.result == 0  # torch's stand-in for no score_mod
        texts.append("" if same else traced.text)
        given = [x for x in buffers if not isinstance(x, (int, float, torch.SymInt))]
        found.append([] if same else [*given, *traced.tensors])
    places: list[int | None] = []
    for x in score_buffers:
        number = isinstance(x, (int, float, torch.SymInt)) or not texts[0]
        places.append(None if number else sum(p is not None for p in places))
    listed = [x for x in blocks if x is not None]
    return FlexCall(listed, [*found[0], *found[1]], texts[0], texts[1], sparse_block, tuple(places))


def narrow(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """64-bit integers as 32-bit ones: what mods read are indices."""
    return [x.to(torch.int32) if x.dtype is torch.int64 else x for x in buffers]


def wanted_gradients(joint: Any, buffers: Sequence[Any]) -> tuple[int, ...]:
    """Which captured tensors want gradients, by the graph that torch made for them.

    Args:
        joint: Graph of the score_mod's backward, or None.
        buffers: Captured tensors and numbers.

    Returns:
        Positions among the buffers.

    Raises:
        TraceError: The graph is of no known form.
    """
    if not isinstance(joint, GraphModule):
        return tuple(
            n for n, x in enumerate(buffers) if isinstance(x, torch.Tensor) and x.requires_grad
        )
    output = next(n for n in joint.graph.nodes if n.op == "output").args[0]
    if not isinstance(output, (list, tuple)) or len(output) < 5:
        raise TraceError("the score_mod's backward graph returns something else than gradients")
    return tuple(n for n, grad in enumerate(output[5:]) if grad is not None)
