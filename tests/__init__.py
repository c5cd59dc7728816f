"""Tests, one folder per layer; a package so that they can share helpers (`from tests...`)."""
