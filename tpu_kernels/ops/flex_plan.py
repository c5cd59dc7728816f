"""FlexAttention but for its arrays: mods, scale and blocks."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tpu_kernels.errors import ArgumentError
from tpu_kernels.ops.attention_blocks import Band
from tpu_kernels.ops.attention_plan import Blocks, Plan, Shape, choose_blocks
from tpu_kernels.ops.attention_scores import LOG2E
from tpu_kernels.ops.flex_blocks import Sparsity
from tpu_kernels.ops.flex_operands import Hoisted, hoist, values
from tpu_kernels.ops.flex_program import Program, parse
from tpu_kernels.ops.tiles import LANES, round_up

_EVERYTHING = Band()


@dataclasses.dataclass(frozen=True)
class FlexPlan(Plan):
    """How attention with mods is computed; see `Plan` for the rest.

    Attributes:
        score_mod: Text of a program, or "".
        mask_mod: Text of a program, or "".
        sparse_block: Queries and keys of a block of the BlockMask.
    """

    band: Band = _EVERYTHING
    scale: float = 1.0
    score_mod: str = ""
    mask_mod: str = ""
    sparse_block: tuple[int, int] = (128, 128)

    @property
    def score(self) -> Program | None:
        """The score_mod."""
        return parse(self.score_mod) if self.score_mod else None

    @property
    def mask(self) -> Program | None:
        """The mask_mod; None if it keeps everything."""
        program = parse(self.mask_mod) if self.mask_mod else None
        return None if program is None or keeps_everything(self.mask_mod) else program

    @property
    def after_scale(self) -> float:
        """What a scaled score is multiplied by to be in base 2, before a score_mod if none."""
        return 1.0 if self.score_mod else LOG2E

    def factors(self, split: bool) -> tuple[float, float]:
        """What queries and what products are multiplied by; see `attention_scores.factor`."""
        whole = self.scale * self.after_scale
        return (whole, 1.0) if split else (1.0, whole)


@functools.lru_cache(maxsize=256)
def keeps_everything(text: str) -> bool:
    """Whether a mask_mod is the constant True: PyTorch's stand-in for none."""
    program = parse(text)
    step = program.step_of(program.source(program.result))
    if step is None:
        return False
    if step.name in ("aten::new_ones", "aten::ones", "aten::ones_like"):
        return True
    place = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 1, "aten::scalar_tensor": 0}
    return step.name in place and step.args[place[step.name]] in (True, 1)


@dataclasses.dataclass(frozen=True)
class Mods:
    """The mods of one call with their hoisted values.

    Attributes:
        score: The score_mod.
        mask: The mask_mod.
        score_values: Hoisted values of the score_mod.
        mask_values: Hoisted values of the mask_mod.
    """

    score: Program | None
    mask: Program | None
    score_values: tuple[jax.Array, ...]
    mask_values: tuple[jax.Array, ...]

    @property
    def score_hoisted(self) -> tuple[Hoisted, ...]:
        """What the score_mod's values are."""
        return hoist(self.score) if self.score is not None else ()


def split_buffers(plan: FlexPlan, buffers: Any) -> tuple[list[Any], list[Any]]:
    """The captured tensors of the score_mod and of the mask_mod."""
    count = len(parse(plan.score_mod).ranks) if plan.score_mod else 0
    return list(buffers[:count]), list(buffers[count:])


def score_values(plan: FlexPlan, buffers: Any, shape: Shape) -> tuple[jax.Array, ...]:
    """Hoisted values of the score_mod."""
    if plan.score is None:
        return ()
    return tuple(values(plan.score, each, buffers, shape) for each in hoist(plan.score))


def mods_of(plan: FlexPlan, buffers: Any, shape: Shape) -> Mods:
    """Evaluate what the mods need before the kernel."""
    of_score, of_mask = split_buffers(plan, buffers)
    mask = plan.mask
    masks: tuple[jax.Array, ...] = ()
    if mask is not None:
        masks = tuple(values(mask, each, of_mask, shape) for each in hoist(mask))
    return Mods(plan.score, mask, score_values(plan, of_score, shape), masks)


def blocks_of(
    plan: FlexPlan,
    mods: Mods,
    shape: Shape,
    itemsize: int,
    sparsity: Sparsity | None,
    *,
    backward: bool = False,
) -> Blocks:
    """The blocks in force.

    By default those of `attention`, but for three cases: without a score_mod the forward takes more
    queries at a time, as tuned for `attention`; matrices of operands take VMEM, so blocks are
    smaller; and where a BlockMask is all that masks, its blocks must be the kernel's.
    """
    asked = plan.backward_blocks if backward else plan.blocks
    if mods.mask is None and sparsity is not None and sparsity.cuts(shape):
        size = math.gcd(*sparsity.size)
        if size % LANES:
            raise ArgumentError(
                f"kernel {plan.kernel!r}: a BlockMask of {sparsity.size} without a mask_mod",
                hint=f"use blocks of a multiple of {LANES}, or a mask_mod",
            )
        asked = (size, size, size, size)
    blocks = choose_blocks(shape, itemsize, asked, plan.kernel, backward=backward)
    if any(block is not None for block in asked):
        return blocks
    programs = [p for p in (mods.score, mods.mask) if p is not None]
    if any(each.kind == "matrix" for p in programs for each in hoist(p)):
        asked = (min(blocks.q, 512), min(blocks.kv, 512), None, None)
    elif (
        mods.score is None
        and not backward
        and blocks.block == (1024, 1024)
        and round_up(shape.queries, 1024) % 2048 == 0
        and max(shape.depth, shape.depth_v) <= 128
    ):
        asked = (2048, 1024, None, None)
    return choose_blocks(shape, itemsize, asked, plan.kernel, backward=backward)


def sparsity_of(plan: FlexPlan, tensors: Any) -> Sparsity | None:
    """The BlockMask's tensors."""
    return Sparsity.of(tensors, plan.sparse_block)


def is_floating(array: Any) -> bool:
    """Whether an array has a gradient."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
