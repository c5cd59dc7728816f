"""The examples in docstrings run.

Not by ``pytest --doctest-modules``: it would import ``dsl/spec.py`` as ``dsl.spec``, a second copy
of ``tpu_kernels.dsl.spec`` with classes of its own.
"""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.packaging.sources import modules

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", modules())
def test_examples_of(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for example in doctest.DocTestFinder().find(importlib.import_module(name)):
        # The globals stay: torch.compile removes what it put there when the function goes.
        runner.run(example, clear_globs=False)
    assert runner.failures == 0, capsys.readouterr().out


def test_most_layers_have_examples() -> None:
    """Guards the test above: without examples it could not fail."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("tpu_kernels.errors", "tpu_kernels.config", "tpu_kernels.cli.argspec"):
        found = finder.find(importlib.import_module(name))
        assert sum(len(test.examples) for test in found) > 0, name
