"""The time limit for the author's code where it runs in this process."""

from __future__ import annotations

import time

import jax
import pytest

from tpu_kernels.compiler.compile import compile_function
from tpu_kernels.compiler.time_limit import time_limit
from tpu_kernels.errors import TraceTimeout


def _spin() -> None:
    while True:
        time.sleep(0.001)


def test_an_endless_loop_is_interrupted_and_named() -> None:
    with (
        pytest.raises(TraceTimeout, match=r"the loop did not end within 0.1 s") as caught,
        time_limit(0.1, "the loop"),
    ):
        _spin()
    assert "test_time_limit.py" in (caught.value.where or "")
    assert isinstance(caught.value, TimeoutError)


def test_code_that_swallows_the_interruption_is_interrupted_again() -> None:
    swallowed = []

    def stubborn() -> None:
        while not swallowed:
            try:
                _spin()
            except BaseException as error:
                swallowed.append(error)
        _spin()

    with pytest.raises(TraceTimeout), time_limit(0.05, "it"):
        stubborn()
    assert len(swallowed) == 1


def test_what_ends_in_time_is_left_alone() -> None:
    with time_limit(0.05, "it"):
        pass
    time.sleep(0.2)
    with pytest.raises(KeyError), time_limit(60, "it"):
        raise KeyError("its own exceptions pass")


@pytest.mark.libtpu
def test_a_function_that_does_not_end_is_a_report() -> None:
    def stuck(x: jax.Array) -> jax.Array:
        _spin()
        return x

    aval = jax.ShapeDtypeStruct((8, 128), "float32")
    report = compile_function(stuck, [aval], "v6e", name="stuck", timeout_s=0.3)
    assert (report.status, report.error) == ("timeout", "timeout after 0.3 s")
    assert report.source_line == "time.sleep(0.001)"
