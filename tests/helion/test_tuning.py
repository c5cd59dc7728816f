"""Tuning Helion kernels: their own space and configs, ranked by the TPU compiler."""

from __future__ import annotations

import json
import math
import types
from typing import Any

import helion
import pytest
import torch

import tpu_kernels as tk
from tests.helion import kernels
from tpu_kernels import tuning
from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning import helion_search
from tpu_kernels.tuning.report import TuneRow


@pytest.mark.libtpu
def test_helion_configs_are_ranked_by_the_compiler() -> None:
    kernel = tk.tpu_kernel("helion_tests::tuned_add")(kernels.add)
    args = (torch.ones(256, 512), torch.ones(256, 512))
    small, large = helion.Config(block_sizes=[8, 128]), helion.Config(block_sizes=[256, 512])
    # Helion rounds 64 up to the 128 lanes of a vector register: the same program as the first.
    same = helion.Config(block_sizes=[8, 64])
    report = tk.autotune(kernel, args, configs=[small, large, same], target="v6e")

    rows = {str(row.config["config"]): row for row in report.results}
    assert {row.status for row in rows.values()} == {"ok"}, str(report)
    (copy,) = [row for row in report.results if row.same_as is not None]
    assert copy.config in ({"config": '{"block_sizes": [8, 64]}'}, {"config": None})
    assert report.best is not None
    assert helion.Config.from_json(report.best.config["config"]) == large
    choice = kernel.config_for(*args, target="v6e")
    assert (choice.config, choice.provenance) == (report.best.config, "tuned")
    torch.testing.assert_close(kernel(*args, config=large), torch.full((256, 512), 2.0))


def test_a_search_of_helions_is_priced_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tk.tpu_kernel("helion_tests::searched_matmul")(kernels.matmul)
    lots: list[list[str]] = []

    def priced(kernel: Any, args: Any, *, configs: Any, **options: Any) -> Any:
        """Stands for the compiler: 256 in every dimension is best, small rows do not compile."""
        texts = [config["config"] for config in configs]
        lots.append(texts)
        rows = []
        for text in texts:
            sizes = json.loads(text)["block_sizes"]
            cost = 1.0 + sum(abs(math.log2(size) - 8) for size in sizes)
            status = "error" if sizes[0] < 64 else "ok"
            rows.append(TuneRow({"config": text}, status, cost=cost))
        best = min(rows, key=lambda row: row.rank)
        return types.SimpleNamespace(results=rows, best=best, stored=options["store"])

    monkeypatch.setattr(helion_search, "autotune", priced)
    args = (torch.empty(512, 512, device="meta"),) * 2
    report = tuning.search_helion(kernel, args, target="v6e", trials=40, seed=3)

    *searched, finalists = lots
    tried = [text for lot in searched for text in lot]
    assert len(set(tried)) == len(tried) <= 40  # no config is priced twice
    assert report.stored
    assert set(finalists) <= set(tried)
    default = priced(kernel, args, configs=[{"config": tried[0]}], store=False).best.rank
    assert report.best.rank < default


def test_only_helion_kernels_and_helions_searches_are_taken() -> None:
    from tpu_kernels.ops import matmul

    x = torch.empty(8, 128, device="meta")
    with pytest.raises(ArgumentError, match="takes a Helion kernel"):
        tuning.search_helion(matmul, (x, x), target="v6e")
    kernel = tk.tpu_kernel("helion_tests::searched_add")(kernels.add)
    with pytest.raises(ArgumentError, match="no search 'guessing'"):
        tuning.search_helion(kernel, (x, x), target="v6e", algorithm="guessing")
