"""Configs of a Helion kernel that are worth compiling: a bounded part of Helion's own space.

Helion's space for one matrix product has tens of thousands of configs. What decides a kernel's time
on a TPU are the block sizes and the form of the inner loop; those are tried in full around the
default, the rest by samples of Helion's own generator.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

from tpu_kernels import _compat_helion
from tpu_kernels.dsl import helion_config

LIMIT = 16
"""The largest number of configs that `configs_of` lists."""

_ELEMENTS = 2_000_000_000  # products of block sizes above it compile for minutes, or never
_SCALES = (1, 2, 4, 8)
_LOOPS = "pallas_loop_type"
_SAMPLES = 4


def configs_of(bound: Any, *, limit: int = LIMIT, seed: int = 0) -> list[str]:
    """List configs to try, the default first.

    Args:
        bound: A bound Helion kernel.
        limit: How many at most.
        seed: Makes the samples repeatable.

    Returns:
        Their texts, each once, with the block sizes that Helion will use.
    """
    found: dict[str, None] = {}
    declared = list(bound.kernel.configs)
    default = bound.config_spec.default_config()
    scaled = itertools.islice(_scaled(bound, seed), max(0, limit - _SAMPLES))
    for config in itertools.chain(declared, [default], scaled, _samples(bound, seed)):
        if len(found) >= limit:
            break
        text = _usable(bound, config, default)
        if text is not None:
            found.setdefault(text)
    return list(found)


def _usable(bound: Any, config: Any, default: Any) -> str | None:
    """The text of a config that Helion would try, None for any other.

    What is as by default is left out: the text is for people, too.
    """
    import helion

    try:
        normal = _compat_helion.normalized(bound, config)
    except helion.exc.InvalidConfig:
        return None
    sizes = [n for n in normal.config.get("block_sizes", []) if isinstance(n, int)]
    if math.prod(sizes) > _ELEMENTS or not _compat_helion.is_viable(bound, normal):
        return None
    usual = default.config
    told = {k: v for k, v in normal.config.items() if k == "block_sizes" or usual.get(k) != v}
    return helion_config.to_text(told)


def _scaled(bound: Any, seed: int) -> Iterator[Any]:
    """The default with other block sizes, and with each form of the inner loop."""
    import helion

    base = dict(bound.config_spec.default_config().config)
    sizes = base.get("block_sizes") or []
    loops = [base[_LOOPS]] if _LOOPS in base else []
    loops += [loop for loop in ("emit_pipeline", "fori_loop") if loops and loop not in loops]
    scaled = list(itertools.product(_SCALES, repeat=len(sizes)))
    random.Random(seed).shuffle(scaled)
    for factors in scaled:
        blocks = [n * f for n, f in zip(sizes, factors, strict=True)]
        for loop in loops[:1] or [None]:
            changed = {**base, "block_sizes": blocks} | ({_LOOPS: loop} if loop else {})
            yield helion.Config(**changed)
        if len(loops) > 1 and random.Random(f"{seed}{factors}").random() < 0.25:
            yield helion.Config(**{**base, "block_sizes": blocks, _LOOPS: loops[1]})


def _samples(bound: Any, seed: int) -> Iterator[Any]:
    state = random.getstate()
    random.seed(seed)  # Helion's generator draws from Python's global one
    try:
        yield from bound.config_spec.create_config_generation().random_population(_SAMPLES)
    finally:
        random.setstate(state)
