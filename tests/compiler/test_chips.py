"""The table of chips, and how users name targets."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

import jax
import pytest

from tpu_kernels.compiler import Target, chips, resolve
from tpu_kernels.compiler.chips import Chip, field_source
from tpu_kernels.config import CHIPS
from tpu_kernels.errors import ConfigError


def test_every_generation_of_the_settings_is_known() -> None:
    assert tuple(chips()) == CHIPS


@pytest.mark.parametrize("chip", chips().values(), ids=lambda chip: chip.name)
def test_figures_agree_with_what_jax_says_of_the_chip(chip: Chip) -> None:
    from jax.experimental.pallas import tpu as pltpu

    device = jax.sharding.AbstractDevice(
        device_kind=chip.device_kind, num_cores=chip.cores_per_device, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        info = pltpu.get_tpu_info()
    assert chip.generation == info.generation
    assert (chip.mxu_count, chip.mxu_size) == (info.num_mxus, info.mxu_column_size)
    assert chip.vmem_bytes == info.vmem_capacity_bytes
    assert chip.smem_bytes == info.smem_capacity_bytes
    assert chip.hbm_bytes == pytest.approx(info.hbm_capacity_bytes, rel=0.01)
    assert chip.hbm_bytes_per_s == pytest.approx(info.mem_bw_bytes_per_second, rel=0.01)
    peaks = {
        "bf16": info.bf16_ops_per_second,
        "int8": info.int8_ops_per_second,
        "fp8": info.fp8_ops_per_second,
        "int4": info.int4_ops_per_second,
    }
    assert dict(chip.peak_ops_per_s) == pytest.approx(
        {name: peak for name, peak in peaks.items() if peak}, rel=0.01
    )


@pytest.mark.parametrize("chip", chips().values(), ids=lambda chip: chip.name)
def test_the_clock_is_the_one_that_gives_the_peak(chip: Chip) -> None:
    rows_per_cycle = 128 // chip.cycles_per_vmatmul["bf16"] / 8  # a vmatmul holds 8 x 128 rows
    per_cycle = chip.mxu_count * 2 * chip.mxu_size**2 * rows_per_cycle
    assert per_cycle * chip.clock_hz == pytest.approx(chip.peak_ops_per_s["bf16"], rel=0.03)


def test_every_figure_has_a_source() -> None:
    named = {field.name for field in dataclasses.fields(Chip)} - {"name", "aliases"}
    table = json.loads(resources.files("tpu_kernels.compiler").joinpath("chips.json").read_text())
    assert set(table["field_sources"]) == named
    assert all(field_source(field) for field in named)


@pytest.mark.parametrize(
    ("named", "topology", "shown"),
    [
        ("v6e", "v6e:2x2", "v6e"),
        ("V6E", "v6e:2x2", "v6e"),
        ("trillium", "v6e:2x2", "v6e"),
        ("TPU v5 lite", "v5e:2x2", "v5e"),
        ("v6e:4x8", "v6e:4x8", "v6e:4x8"),
        ("v5p:2x2x2", "v5p:2x2x2", "v5p:2x2x2"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", "tpu7x"),
    ],
)
def test_a_target_is_found_by_the_names_people_use(named: str, topology: str, shown: str) -> None:
    target = resolve(named)
    assert isinstance(target, Target)
    assert (target.topology_name, target.name) == (topology, shown)
    assert resolve(target) is target


@pytest.mark.parametrize("named", ["v99", "", "cpu", "v6"])
def test_an_unknown_target_lists_the_known_ones(named: str) -> None:
    with pytest.raises(ConfigError, match="v4, v5e, v5p, v6e, tpu7x"):
        resolve(named)


@pytest.mark.parametrize("named", ["v6e:2x2x1", "v5p:2x2", "v6e:two", "v6e:2x"])
def test_a_topology_that_does_not_fit_is_refused_with_one_that_does(named: str) -> None:
    chip = named.partition(":")[0]
    with pytest.raises(ConfigError, match=f"'{resolve(chip).topology_name}'"):
        resolve(named)
