"""Helion's own searches through the config space of a Helion kernel, priced by our compiler.

A search asks for the prices of a few configs at a time; each lot is tuned like any other list of
configs: in worker processes, with a time limit for each, what is compiled already from the cache of
results. No kernel runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpu_kernels.compiler.chips import Target
from tpu_kernels.compiler.pool import worker_pool
from tpu_kernels.errors import ArgumentError
from tpu_kernels.registry.kernel import Kernel
from tpu_kernels.registry.layout import fill
from tpu_kernels.registry.programs import named_values
from tpu_kernels.tuning.cache import TuningCache
from tpu_kernels.tuning.report import TuneReport
from tpu_kernels.tuning.tuner import autotune

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "PatternSearch": {"initial_population": 16, "copies": 2, "max_generations": 8},
    "DifferentialEvolutionSearch": {"population_size": 12, "max_generations": 8},
    "RandomSearch": {"count": 64},
}
"""Keywords of the searches that take a compilation for each price, sized for it."""

_FINALISTS = 8  # compiled already; the report and the record are made of them


class _Enough(Exception):
    """The trials or the time are used up."""


def search_helion(
    kernel: Kernel,
    args: Sequence[Any] | torch.Tensor,
    *,
    target: str | Target,
    algorithm: str = "PatternSearch",
    trials: int = 64,
    budget_s: float | None = None,
    timeout_s: float = 60.0,
    measure: str = "compiler",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    cache: TuningCache | str | os.PathLike[str] | None = None,
    store: bool = True,
) -> TuneReport:
    """Find a config of a Helion kernel by one of Helion's own search algorithms.

    Args:
        kernel: The operator of a Helion kernel.
        args: Its positional arguments (or the only one): tensors of the shapes and dtypes to tune
            for; none of them is read.
        target: The chip to tune for, such as ``"v6e"``.
        algorithm: Name of the search: ``"PatternSearch"``, ``"DifferentialEvolutionSearch"``,
            ``"RandomSearch"``, or another of `helion.autotuner.search_algorithms`.
        trials: How many configs are priced at most.
        budget_s: Seconds for the search, None for no limit.
        timeout_s: Seconds for one config.
        measure: As in `autotune`: what a config is priced by.
        seed: Makes the search repeatable.
        options: Keywords of the search, in place of `OPTIONS`.
        cache: As in `autotune`.
        store: Whether to keep the choice.

    Returns:
        The report of the best configs that were found and the one in force; the best is stored, so
        that the next call of these shapes uses it.

    Raises:
        ArgumentError: It is no Helion kernel, or Helion has no search of this name.

    Example:
        >>> search_helion(search_helion, (), target="v6e")
        Traceback (most recent call last):
        ...
        tpu_kernels.errors.ArgumentError: search_helion takes a Helion kernel, got function
          hint: tune other kernels by autotune
    """
    arguments = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    _refuse(kernel, algorithm)
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    spec = kernel.spec
    function: Any = spec.jax_fn
    prices: dict[str, float] = {}

    def price(texts: Sequence[str]) -> list[float]:
        fresh = [text for text in dict.fromkeys(texts) if text not in prices]
        fresh = fresh[: max(0, trials - len(prices))]
        left = deadline - time.monotonic()
        if texts and (left <= 0 or (not fresh and any(text not in prices for text in texts))):
            raise _Enough
        if fresh:
            report = autotune(
                kernel,
                arguments,
                configs=[{function.config_name: text} for text in fresh],
                target=target,
                measure=measure,
                timeout_s=timeout_s,
                budget_s=None if left == math.inf else left,
                store=False,
            )
            prices.update(dict.fromkeys(fresh, math.inf))
            for row in report.results:
                text = row.config.get(function.config_name)
                if row.ok and text in prices:
                    prices[text] = row.rank
        return [prices.get(text, math.inf) for text in texts]

    bound = kernel.bind(*arguments)
    tensors = fill(bound.call.layout, bound.avals)
    values = named_values(spec.op_parameters, tensors, bound.dynamics, bound.static)
    chosen = dict(OPTIONS.get(algorithm, {}) if options is None else options)
    with worker_pool():  # the same workers for every lot
        with contextlib.suppress(_Enough):  # what is known by now decides
            function.search(values, price, algorithm=algorithm, seed=seed, options=chosen)
        working = sorted((t for t in prices if prices[t] < math.inf), key=prices.__getitem__)
        finalists = working[:_FINALISTS] or list(prices)[:1]
        return autotune(
            kernel,
            arguments,
            configs=[{function.config_name: text} for text in finalists] or None,
            target=target,
            measure=measure,
            timeout_s=timeout_s,
            cache=cache,
            store=store,
        )


def _refuse(kernel: Any, algorithm: str) -> None:
    if not isinstance(kernel, Kernel) or kernel.spec.language != "helion":
        kind = type(kernel).__name__
        raise ArgumentError(
            f"search_helion takes a Helion kernel, got {kind}",
            hint="tune other kernels by autotune",
        )
    from helion.autotuner import search_algorithms

    if algorithm not in search_algorithms:
        raise ArgumentError(
            f"Helion has no search {algorithm!r}", hint=f"one of {', '.join(search_algorithms)}"
        )
