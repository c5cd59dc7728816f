"""The entries of the database that are known not to agree, as data with reasons."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

_FILE = Path(__file__).with_name("known.json")


def exceptions(suite: str) -> dict[str, str]:
    """Reason by entry, of a suite such as ``"device"`` or ``"lowering float32"``."""
    found = json.loads(_FILE.read_text(encoding="utf-8"))
    return dict(found.get(suite, {}))


def changes(suite: str, failed: Mapping[str, str], checked: Collection[str]) -> list[str]:
    """What is news: entries that fail and are not known to, and known ones that agree.

    Args:
        suite: Which list.
        failed: What is wrong, by entry.
        checked: The entries that were run.

    Returns:
        A line for each, empty where all is as known, or nothing is written down of the suite.
    """
    if suite not in json.loads(_FILE.read_text(encoding="utf-8")):
        return []  # a suite that is only reported
    known = exceptions(suite)
    worse = [f"{name}: {why}" for name, why in failed.items() if name not in known]
    better = [
        f"{name} agrees now; take it out of {_FILE.name}"
        for name in known
        if name in checked and name not in failed
    ]
    return worse + better
