"""Settings read from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kernels.compiler.chips import chips
from tpu_kernels.config import (
    CACHE_DIR,
    CHIPS,
    PROGRAM_CACHE_MIB,
    SIM_CHIP,
    SIM_DEVICE,
    Settings,
    settings,
)
from tpu_kernels.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    found = Settings.from_environment({})
    assert found.cache_dir.is_absolute()
    assert found.cache_dir.name == "tpu_kernels"
    assert (found.sim_chip, found.sim_device) == ("v6e", True)


def test_an_empty_value_counts_as_unset() -> None:
    names = (CACHE_DIR, SIM_CHIP, SIM_DEVICE)
    assert Settings.from_environment(dict.fromkeys(names, "")) == Settings.from_environment({})


@pytest.mark.parametrize("chip", CHIPS)
def test_every_generation_is_accepted_in_any_case(chip: str) -> None:
    assert Settings.from_environment({SIM_CHIP: chip.upper()}).sim_chip == chip


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("yes", True), ("ON", True), ("0", False), ("False", False), ("no", False)],
)
def test_switches_are_read_as_people_write_them(text: str, value: bool) -> None:
    assert Settings.from_environment({SIM_DEVICE: text}).sim_device is value


@pytest.mark.parametrize(
    ("variable", "value"),
    [(SIM_CHIP, "v99"), (SIM_DEVICE, "maybe"), (CACHE_DIR, __file__), (PROGRAM_CACHE_MIB, "-1")],
)
def test_a_bad_value_names_the_variable_and_what_it_takes(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({variable: value})
    assert f"{variable}={value!r}" in str(caught.value)
    assert f"set {variable} to" in str(caught.value)


def test_settings_are_kept_until_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = settings()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    assert settings() is before
    try:
        settings.cache_clear()
        assert settings().cache_dir == tmp_path
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_the_generations_are_those_that_the_compiler_layer_knows() -> None:
    assert tuple(chips()) == CHIPS
