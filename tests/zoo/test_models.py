"""Small models of every kind, trained on the simulated device as on the CPU.

The suite compiles some; ``make test-zoo`` (``TPU_KERNELS_ZOO=all``) compiles all.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator

import pytest
import torch

from tests.zoo import language
from tests.zoo.training import CPU, MODELS, MODES, Trained, difference, train
from tpu_kernels.backends.graphs import compile_stats

WHOLE = os.environ.get("TPU_KERNELS_ZOO") == "all"
COMPILED = ("llama", "dlrm")  # by the suite; the others take longer
# What torch runs between programs.
LEFT = {"dlrm": {"aten._embedding_bag.default", "aten._embedding_bag_backward.default"}}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers: pip install 'tpu_kernels[dev]'",
)
CASES = [
    pytest.param(
        name, mode, id=f"{name}-{mode}", marks=needs_transformers if name in language.MODELS else ()
    )
    for name in MODELS
    for mode in MODES
    if mode == "strict" or WHOLE or (mode == "compiled" and name in COMPILED)
]


@functools.cache
def on_cpu(name: str) -> Trained:
    return train(name, CPU)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Of torch and transformers, about their own deprecated names.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# Of Dynamo, which hides it where warnings are only shown: it asks a result for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_training_is_that_of_the_cpu(name: str, mode: str) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    before = compile_stats()
    found = train(name, MODES[mode])
    after = compile_stats()
    assert difference(found, on_cpu(name)) is None
    if mode == "compiled":
        assert after.programs > before.programs
        left = {op for op, n in after.left.items() if n > before.left.get(op, 0)}
        assert left == LEFT.get(name, set())
        assert after.whole == before.whole
