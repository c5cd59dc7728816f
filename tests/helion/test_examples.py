"""Kernels that do what Helion's examples do compute what torch does, in either engine.

`python -m tests.helion.examples` runs all of them, through the checks and the TPU compiler as well.
"""

from __future__ import annotations

import logging

import pytest
import torch

import tpu_kernels as tk
from tests.helion import example_kernels, examples, kernels
from tests.helion.test_operator import randn
from tpu_kernels.errors import TraceError

# One of each kind; the others differ in what Helion and Pallas do, not in what we do.
KINDS = [
    *("softmax_two_pass", "swiglu_backward", "rms_norm_backward", "sum_backward_of_weight"),
    *("kl_div", "cross_entropy", "embedding", "causal_attention", "broadcast_matmul"),
    "segment_sum",
]


@pytest.mark.parametrize("name", KINDS)
def test_an_example_computes_what_torch_does(name: str) -> None:
    assert examples.run(name) == "ok"


def test_what_pallas_cannot_interpret_runs_in_the_tpu_interpreter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> object:
        raise NotImplementedError("no rule for this primitive")

    monkeypatch.setattr("tpu_kernels.lowering.host_code.plainly", refused)
    kernel = tk.tpu_kernel("helion_tests::slow_exp_backward")(example_kernels.exp_backward)
    x, y = randn(8, 128), randn(9, 128)[1:]
    with caplog.at_level(logging.INFO, logger="tpu_kernels"):
        result = kernel(x, y)
    torch.testing.assert_close(result, x * y)
    assert "runs in the TPU interpreter: NotImplementedError: no rule" in caplog.text


def test_what_is_wrong_with_a_kernel_is_no_matter_of_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = tk.tpu_kernel("helion_tests::broken_either_way")(kernels.broken)
    with caplog.at_level(logging.INFO), pytest.raises(TraceError, match="no_such_method"):
        kernel(randn(64, 128))
    assert "TPU interpreter" not in caplog.text
    assert "Helion compiler" not in caplog.text  # no traceback of Helion's own before ours
