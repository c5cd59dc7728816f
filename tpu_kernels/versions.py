"""Which versions of torch, jax, libtpu, torch_tpu and helion work together.

The knowledge is ``versions.json``: what the tests of this release ran with, and pairs that are
known to break. It is checked at the first use of what needs the packages, from their metadata alone
(nothing is imported): a pair that breaks raises, one that nobody tested warns once.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpu_kernels.errors import VersionError, VersionWarning

PACKAGES = ("torch", "jax", "jaxlib", "helion", "libtpu", "torch_tpu")
BASE = ("torch", "jax", "jaxlib", "helion")
"""What every use of the package needs."""

_CONDITION = re.compile(r"(?P<operator>>=|<=|<|>)\s*(?P<version>[0-9.]+)")
_HOLDS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda have, limit: have >= limit,
    "<=": lambda have, limit: have[: len(limit)] <= limit,
    "<": lambda have, limit: have < limit,
    ">": lambda have, limit: have[: len(limit)] > limit,
}


@dataclass(frozen=True)
class Rule:
    """What is known of one package, alone or beside another.

    Attributes:
        package: The package.
        wanted: Range of versions, such as ``">=2.13,<2.14"``; ``{name}`` stands for the installed
            version of another package.
        breaks: Whether other versions are known not to work; else nobody has tested them.
        why: The reason, in one line.
        beside: The other package, or None.
        beside_range: Versions of the other package that the rule is about.
        extra: The extra of this package that brings the right version; None for a requirement.
    """

    package: str
    wanted: str
    breaks: bool
    why: str
    beside: str | None = None
    beside_range: str = ""
    extra: str | None = None


@dataclass(frozen=True)
class Problem:
    """A rule that the installed versions do not keep.

    Attributes:
        rule: The rule.
        pair: The package with its version, and the other one with its, such as
            ``"torch 2.16.0 with torch_tpu 0.2.0"``.
        fix: A command that makes it right.
    """

    rule: Rule
    pair: str
    fix: str

    @property
    def text(self) -> str:
        """One line for people."""
        verdict = "does not work" if self.rule.breaks else "was not tested"
        return f"{self.pair} {verdict}: {self.rule.why}"


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules, in the order of the file."""
    from importlib import resources  # slow to import

    text = resources.files("tpu_kernels").joinpath("versions.json").read_text(encoding="utf-8")
    found = []
    for row in json.loads(text)["rules"]:
        beside, beside_range = next(iter(row.get("with", {}).items()), (None, ""))
        found.append(
            Rule(
                package=row["package"],
                wanted=row["wanted"],
                breaks=row["breaks"],
                why=row["why"],
                beside=beside,
                beside_range=beside_range,
                extra=row["extra"],
            )
        )
    return tuple(found)


def installed(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages that are installed, by name; nothing is imported.

    Example:
        >>> sorted(installed(("torch", "no_such_package")))
        ['torch']
    """
    from importlib import metadata  # slow to import

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def in_range(version: str, wanted: str) -> bool:
    """Tell whether a version satisfies a range, by its numbers alone.

    Args:
        version: Such as ``"2.13.0+cpu"``; what follows the numbers is ignored.
        wanted: Conditions with ``>=``, ``>``, ``<=`` and ``<``.

    Returns:
        Whether all conditions hold.

    Example:
        >>> in_range("2.13.0+cpu", ">=2.13,<2.14"), in_range("2.14.1", ">=2.13,<2.14")
        (True, False)
        >>> in_range("2.15.3", "<=2.15")
        True
    """
    have = _numbers(version)
    return all(
        _HOLDS[condition["operator"]](have, _numbers(condition["version"]))
        for condition in _CONDITION.finditer(wanted)
    )


def problems(
    packages: Sequence[str] = PACKAGES, versions: Mapping[str, str] | None = None
) -> list[Problem]:
    """Return the rules about some packages that are not kept.

    Args:
        packages: A rule counts if its package and the other one are among them.
        versions: Installed versions by package; those of this environment by default.

    Returns:
        The problems, those that break first. A package that is not installed has none.

    Example:
        >>> have = {"torch": "2.16.0", "torch_tpu": "0.2.0"}
        >>> [problem.pair for problem in problems(versions=have)]
        ['torch 2.16.0 with torch_tpu 0.2.0', 'torch 2.16.0']
    """
    have = installed(packages) if versions is None else versions
    found = []
    for rule in rules():
        version, other = have.get(rule.package), have.get(rule.beside or "")
        if version is None or rule.package not in packages:
            continue
        if rule.beside is not None and (
            other is None or rule.beside not in packages or not in_range(other, rule.beside_range)
        ):
            continue
        wanted = rule.wanted.format(**have)
        if not in_range(version, wanted):
            pair = f"{rule.package} {version}"
            if rule.beside is not None:
                pair += f" with {rule.beside} {other}"
            found.append(Problem(rule, pair, f"pip install '{rule.package}{wanted}'"))
    return sorted(found, key=lambda problem: not problem.rule.breaks)


def check(*packages: str) -> None:
    """Raise for versions that do not work together, warn once for those that nobody tested.

    Called at the first use of what needs the packages; later calls cost nothing.

    Args:
        *packages: What is about to be used.

    Raises:
        VersionError: A pair is known to break; names it and the fix.

    Warns:
        VersionWarning: A version was not tested; names it and the fix.

    Example:
        >>> check("torch", "jax", "jaxlib", "helion")
    """
    _check(packages)


@functools.cache
def _check(packages: tuple[str, ...]) -> None:
    for problem in problems(packages):
        if problem.rule.breaks:
            raise VersionError(problem.text, hint=problem.fix)
        warnings.warn(f"{problem.text}\n  hint: {problem.fix}", VersionWarning, stacklevel=4)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9.]*[0-9]", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
