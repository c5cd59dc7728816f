"""What `tune` shows while it runs: on a terminal, in a log, with --json."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tpu_kernels.cli.output import Output
from tpu_kernels.cli.progress import SearchProgress
from tpu_kernels.tuning import Activity, Progress, TuneRow

GOOD = TuneRow({"block": (8, 128)}, "ok", cost=12.345, cost_unit="µs (estimated)")


class Clock:
    """A time that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def drawn(shown: SearchProgress, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(shown.picture())
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_terminal_shows_what_runs_the_best_so_far_and_the_time_left() -> None:
    clock = Clock()
    output = Output(json_wanted=False)
    with SearchProgress(output, searches=2, stream=io.StringIO(), clock=clock) as shown:
        told = shown.search("ns::f for v6e")
        assert "starting" in drawn(shown)[1]
        told["watch"](Activity("compiling", ({"block": (16, 128)}, {"block": (32, 128)})))
        told["progress"](Progress(1, 5, GOOD, GOOD))
        clock.now += 20
        told["progress"](Progress(3, 5, TuneRow({"block": 1}, "invalid"), GOOD))
        first, bar, best, *running = drawn(shown)
    assert "ns::f for v6e (1 of 2)" in first
    assert bar.endswith("3 of 5 decided, 0:20, about 0:20 left")
    assert "best 12.35 µs (estimated): block=(8, 128)" in best
    assert running == ["  compiling block=(16, 128)", "  compiling block=(32, 128)"]


def test_the_budget_ends_a_search_before_its_pace_would() -> None:
    clock = Clock()
    output = Output(json_wanted=False)
    with SearchProgress(output, budget_s=60, stream=io.StringIO(), clock=clock) as shown:
        told = shown.search("ns::f")
        assert shown.left_s() == 60
        told["progress"](Progress(1, 100, GOOD, GOOD))
        clock.now += 10
        told["progress"](Progress(2, 100, GOOD, GOOD))
        assert shown.left_s() == 50


def test_long_lines_are_cut_instead_of_folded() -> None:
    with SearchProgress(Output(json_wanted=False), stream=io.StringIO(), clock=Clock()) as shown:
        told = shown.search("ns::f")
        told["watch"](Activity("tracing", ({f"parameter_{n}": n for n in range(20)},)))
        lines = drawn(shown, width=60)
    assert len(lines) == 3
    assert lines[2].endswith("…")


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    output = Output(json_wanted=False)
    with SearchProgress(output, stream=io.StringIO(), clock=clock) as shown:
        told = shown.search("ns::f for v6e")
        for done in range(1, 8):
            clock.now += 10
            told["progress"](Progress(done, 10, GOOD, GOOD))
    assert capsys.readouterr().err.splitlines() == [
        "tuning ns::f for v6e ...",
        "  3 of 10 decided, best 12.35 µs (estimated): block=(8, 128), about 1:45 left",
        "  6 of 10 decided, best 12.35 µs (estimated): block=(8, 128), about 0:48 left",
    ]


def test_with_json_nothing_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Terminal()
    with SearchProgress(Output(json_wanted=True), stream=stream, clock=Clock()) as shown:
        told: dict[str, Any] = shown.search("ns::f")
        told["progress"](Progress(1, 2, GOOD, GOOD))
        shown.note("kept")
    assert stream.getvalue() == ""
    assert capsys.readouterr().err == ""


def test_a_terminal_is_left_as_it_was_and_notes_stay() -> None:
    stream = Terminal()
    with SearchProgress(Output(json_wanted=False), stream=stream) as shown:
        told = shown.search("ns::f")
        told["progress"](Progress(1, 2, GOOD, GOOD))
        shown.note("a line that stays [not markup]")
    text = stream.getvalue()
    assert "a line that stays [not markup]" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
