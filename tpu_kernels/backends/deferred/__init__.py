"""Deferred mode: operators on the simulated device are recorded, and run as one program."""

from __future__ import annotations


def register() -> None:
    """Make the mode known."""
