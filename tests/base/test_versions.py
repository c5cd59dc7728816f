"""Versions: what is declared, what is known to break, and what a user is told."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels import versions
from tpu_kernels.errors import VersionError, VersionWarning

GOOD = {
    "torch": "2.13.0+cpu",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "helion": "1.5.1",
    "libtpu": "0.0.52",
    "torch_tpu": "0.2.0",
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let checks run again, as in a new process."""
    versions._check.cache_clear()
    monkeypatch.setattr(
        versions,
        "installed",
        lambda names=(): {name: GOOD[name] for name in names if name in GOOD},
    )
    yield monkeypatch
    versions._check.cache_clear()


def test_what_the_tests_run_with_has_no_problem() -> None:
    assert versions.problems(versions=GOOD) == []
    assert versions.problems(versions={}) == []


def test_this_environment_has_no_problem() -> None:
    assert versions.problems() == []


def test_the_ranges_are_those_that_the_package_declares() -> None:
    declared: dict[str, set[str]] = {}
    for requirement in metadata.requires("tpu_kernels") or ():
        name, conditions = re.match(r"([\w.-]+)([^;]*)", requirement).groups()
        declared.setdefault(name, set(conditions.strip().split(",")))
    # The first rule of a package without a second one is its range; of those with extras, the
    # range is beside the package that matters most.
    for package in versions.PACKAGES:
        rule = next(r for r in versions.rules() if r.package == package and "{" not in r.wanted)
        assert set(rule.wanted.split(",")) == declared[package], package


@pytest.mark.parametrize(
    ("changed", "pair", "fix"),
    [
        ({"torch": "2.16.1"}, "torch 2.16.1 with torch_tpu 0.2.0", "'torch>=2.11,<=2.15'"),
        ({"jaxlib": "0.10.3"}, "jaxlib 0.10.3 with jax 0.10.2", "'jaxlib<=0.10.2'"),
        ({"libtpu": "0.0.41"}, "libtpu 0.0.41 with torch_tpu 0.2.0", "'libtpu>=0.0.50'"),
    ],
)
def test_a_pair_that_breaks_raises_and_names_both_and_the_fix(
    changed: dict[str, str], pair: str, fix: str, fresh: pytest.MonkeyPatch
) -> None:
    fresh.setattr(versions, "installed", lambda names: GOOD | changed)
    with pytest.raises(VersionError) as caught:
        versions.check(*versions.PACKAGES)
    assert f"{pair} does not work" in str(caught.value)
    assert f"hint: pip install {fix}" in str(caught.value)


def test_a_version_that_nobody_tested_warns_once(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(versions, "installed", lambda names: {"helion": "1.7.0"})
    with pytest.warns(VersionWarning, match=r"helion 1\.7\.0 was not tested") as caught:
        versions.check("helion")
    assert "pip install 'helion>=1.5.1,<1.6'" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check("helion")


def test_only_what_is_used_is_checked(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(versions, "installed", lambda names: GOOD | {"torch_tpu": "0.3.1"})
    versions.check(*versions.BASE)
    with pytest.warns(VersionWarning, match=r"torch_tpu 0\.3\.1 with torch 2\.13\.0"):
        versions.check("torch", "torch_tpu")


def test_checking_imports_none_of_the_packages() -> None:
    code = (
        "import sys; from tpu_kernels import versions; versions.check(*versions.PACKAGES); "
        "print(sorted({'torch', 'jax', 'helion', 'libtpu', 'torch_tpu'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


numbers = st.lists(st.integers(0, 99), min_size=1, max_size=4)


@given(numbers, numbers)
def test_ranges_agree_with_the_order_of_versions(have: list[int], limit: list[int]) -> None:
    version, bound = (".".join(map(str, parts)) for parts in (have, limit))
    width = max(len(have), len(limit))
    padded = [parts + [0] * (width - len(parts)) for parts in (have, limit)]
    if padded[0] != padded[1]:
        assert versions.in_range(version, f">={bound}") == (padded[0] > padded[1])
        assert versions.in_range(version, f"<{bound}") == (padded[0] < padded[1])
    assert versions.in_range(version, f"<={bound}") is not versions.in_range(version, f">{bound}")
    assert versions.in_range(f"{version}+local", f">={bound}") == versions.in_range(
        version, f">={bound}"
    )
