"""Overrides in graphs (stub)."""

from __future__ import annotations


def prepare() -> None:
    """Stub."""
