"""What `tpu-kernels tune` shows while it runs: what is running, the best so far, the time left.

On a terminal a few lines that are redrawn; elsewhere a line now and then, for logs. All of it goes
to stderr, and none of it with ``--json``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from tpu_kernels.cli.output import Output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from tpu_kernels.tuning import Activity, Progress

_LINE_S = 30.0  # between lines of a log
_BAR_WIDTH = 30


class SearchProgress:
    """The state of a run of searches, drawn. A context manager.

    Args:
        output: The command's output.
        searches: How many searches will run.
        budget_s: Seconds for all of them.
        stream: Where to draw; stderr by default.
        clock: Gives the time in seconds.
    """

    def __init__(
        self,
        output: Output,
        *,
        searches: int = 1,
        budget_s: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output
        self._searches = searches
        self._budget_s = budget_s
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._started = self._begun = self._told = clock()
        self._number = 0
        self._title = ""
        self._state: Progress | None = None
        self._at_first = 0
        self._activity: Activity | None = None
        self._live: Live | None = None

    def __enter__(self) -> SearchProgress:
        if not self._output.json_wanted and self._stream.isatty():
            from rich.live import Live

            self._live = Live(
                console=_console(self._stream),
                get_renderable=self.picture,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def search(self, title: str) -> dict[str, Any]:
        """Begin the next search.

        Args:
            title: Kernel, call and target.

        Returns:
            Options of `autotune` that keep this informed.
        """
        self._number += 1
        self._title, self._state, self._activity = title, None, None
        self._begun = self._told = self._clock()
        if self._live is None:
            place = f"[{self._number}/{self._searches}] " if self._searches > 1 else ""
            self._output.note(f"{place}tuning {title} ...")
        return {"progress": self._decided, "watch": self._watch}

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text), soft_wrap=True)
        else:
            self._output.note(text)

    def _decided(self, state: Progress) -> None:
        if self._state is None:
            self._at_first = state.done  # what an earlier search had decided took no time
        self._state = state
        now = self._clock()
        if self._live is None and now - self._told >= _LINE_S:
            self._told = now
            self._output.note("  " + ", ".join(filter(None, self.summary())))

    def _watch(self, activity: Activity) -> None:
        self._activity = activity

    def summary(self) -> tuple[str, str, str]:
        """How far, the best so far, and the time left, each in words or empty."""
        state = self._state
        if state is None:
            return "starting", "", ""
        best = ""
        if state.best is not None:
            unit = "µs" if state.best.time_us is not None else state.best.cost_unit
            best = f"best {state.best.rank:.2f} {unit}: {_config(state.best.config)}"
        left = self.left_s()
        return (
            f"{state.done} of {state.total} decided",
            best,
            "" if left is None else f"about {_clock_text(left)} left",
        )

    def left_s(self) -> float | None:
        """Seconds that this search will take, by its pace so far; None before there is one."""
        state, now = self._state, self._clock()
        paced = None
        if state is not None and state.done > self._at_first:
            pace = (now - self._begun) / (state.done - self._at_first)
            paced = pace * (state.total - state.done)
        if self._budget_s is None:
            return paced
        left = max(0.0, self._budget_s - (now - self._started))
        return left if paced is None else min(left, paced)

    def picture(self) -> Table:
        """The lines that are redrawn."""
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        state = self._state
        done, total = (state.done, state.total) if state is not None else (0, 1)
        far, best, left = self.summary()
        place = f" ({self._number} of {self._searches})" if self._searches > 1 else ""
        elapsed = _clock_text(self._clock() - self._begun)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(total, 1), completed=done, width=_BAR_WIDTH),
            Text(", ".join(filter(None, (far, elapsed, left)))),
        )
        lines = Table.grid(padding=(0, 1))
        lines.add_column(width=1)
        lines.add_column(no_wrap=True, overflow="ellipsis")
        lines.add_row(Spinner("dots"), Text(self._title + place, style="bold"))
        lines.add_row("", bar)
        if best:
            lines.add_row("", Text(best, style="green"))
        if self._activity is not None:
            for config in self._activity.running:
                lines.add_row("", Text(f"{self._activity.stage} {_config(config)}", style="dim"))
        return lines


def _config(config: Mapping[str, Any]) -> str:
    from tpu_kernels.tuning.report import config_text

    return config_text(config)


def _clock_text(seconds: float) -> str:
    """Write a duration.

    Example:
        >>> _clock_text(7.2), _clock_text(75), _clock_text(3723)
        ('0:07', '1:15', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream)
