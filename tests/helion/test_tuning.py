"""Tuning Helion kernels: their own space and configs, ranked by the TPU compiler."""

from __future__ import annotations

import helion
import pytest
import torch

import tpu_kernels as tk
from tests.helion import kernels


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
