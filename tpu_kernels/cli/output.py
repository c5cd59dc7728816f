"""What commands print: tables for people, one JSON document for scripts, errors on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Wide enough that a table is not folded when it goes into a pipe or a file.
PIPE_WIDTH = 400


def output_path(place: str) -> str:
    """Shorten a path, with or without a line, if it lies below the working folder.

    Example:
        >>> output_path(f"{os.getcwd()}/kernels.py:3"), output_path("/elsewhere/kernels.py")
        ('kernels.py:3', '/elsewhere/kernels.py')
    """
    return place.removeprefix(os.getcwd() + os.sep)


class Output:
    """Where a command's results go.

    Args:
        json_wanted: Whether the user asked for ``--json``; then only `document` prints, and tables
            and lines are dropped, so that stdout holds exactly one JSON document.
    """

    def __init__(self, *, json_wanted: bool) -> None:
        self.json_wanted = json_wanted

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the machine-readable result, if ``--json`` was given.

        Args:
            value: What to print; values that JSON does not know are printed as their ``str``.
        """
        if self.json_wanted:
            import json

            sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table, unless ``--json`` was given.

        Args:
            title: Line above the table; empty for none.
            columns: Headings.
            rows: Cells, as many as headings in each; None is printed as a dash.
        """
        if self.json_wanted:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(columns)
        )
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            # Text, because names such as `f32[8]` would be read as rich's markup.
            table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
        console = self._console()
        if title:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
        console.print(table)

    def line(self, text: str = "") -> None:
        """Print one line of text, unless ``--json`` was given."""
        if not self.json_wanted:
            sys.stdout.write(text + "\n")

    def note(self, text: str) -> None:
        """Print one line of progress to stderr, unless ``--json`` was given."""
        if not self.json_wanted:
            sys.stderr.write(text + "\n")

    def error(self, error: Exception) -> None:
        """Print an error to stderr, and as a JSON document if ``--json`` was given."""
        self.document({"error": {"type": type(error).__name__, "message": str(error)}})
        sys.stderr.write(f"tpu-kernels: {error}\n")

    @staticmethod
    def _console() -> Console:
        from rich.console import Console

        class OurConsole(Console):
            def on_broken_pipe(self) -> None:
                """Leave a reader that went away to `main`; rich would end with status 1."""
                raise BrokenPipeError

        return OurConsole() if sys.stdout.isatty() else OurConsole(width=PIPE_WIDTH)
