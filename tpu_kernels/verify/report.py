"""What `check` found, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_kernels.compiler.report import CompileReport

STATUSES = ("ok", "failed", "skipped", "unavailable")
"""``"skipped"``: the pass does not apply; ``"unavailable"``: it applies and could not be run."""


@dataclass(frozen=True)
class CheckRow:
    """The outcome of one pass.

    Attributes:
        name: Name of the pass.
        status: One of `STATUSES`.
        what: What was found or compared; why, where the pass was skipped.
        where: ``file:line`` in the author's source.
        source_line: The text of that line.
        hint: What to do about it.
        smallest: The smallest call found that fails in the same way, as Python; None where it was
            not looked for.
        seconds: Time that the pass took.
    """

    name: str
    status: str
    what: str = ""
    where: str | None = None
    source_line: str | None = None
    hint: str | None = None
    seconds: float = dataclasses.field(default=0.0, compare=False)
    smallest: str | None = None

    @property
    def text(self) -> str:
        """The row for people, with place and hint on lines of their own."""
        first, *rest = self.what.splitlines() or [""]
        lines = [f"{self.name:<11} {self.status:<11} {first}".rstrip(), *rest]
        if self.where:
            lines.append(f"at {self.where}")
        if self.source_line:
            lines.append(f"  {self.source_line}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        if self.smallest:
            lines.append("smallest failing call found:")
            lines.extend(f"  {line}" for line in self.smallest.splitlines())
        return "\n".join([lines[0], *(f"    {line}" for line in lines[1:])])


@dataclass(frozen=True)
class CheckReport:
    """The outcome of all passes over one kernel with one set of arguments.

    Attributes:
        kernel: Name of the kernel or function.
        target: The TPU that the rows on compilation are about, None if there are none.
        rows: One row per pass, in the order in which they were asked for.
        compiled: The compiler's report, None where no target was given or it was not asked.
    """

    kernel: str
    target: str | None
    rows: tuple[CheckRow, ...]
    compiled: CompileReport | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing failed and everything that was to be run could be run."""
        return all(row.status in ("ok", "skipped") for row in self.rows)

    @property
    def text(self) -> str:
        """The report for people: the verdict, then one entry per pass.

        Example:
            >>> rows = (CheckRow("grid", "ok", "4 points"), CheckRow("grad", "skipped", "none"))
            >>> print(CheckReport("tpu::f", "v6e", rows).text)
            tpu::f on v6e: ok
              grid        ok          4 points
              grad        skipped     none
        """
        return self.text_without(())

    def text_without(self, told: Sequence[CheckRow]) -> str:
        """The report for people but for rows that they have seen; these count for the verdict."""
        on = f" on {self.target}" if self.target else ""
        lines = [f"{self.kernel}{on}: {self._verdict}"]
        for row in self.rows:
            if row not in told:
                lines.extend(f"  {line}" for line in row.text.splitlines())
        return "\n".join(lines)

    @property
    def _verdict(self) -> str:
        found = [row.name for row in self.rows if row.status == "failed"]
        if found:
            return f"failed ({', '.join(found)})"
        missing = [row.name for row in self.rows if row.status == "unavailable"]
        return f"not fully checked ({', '.join(missing)})" if missing else "ok"

    def row(self, name: str) -> CheckRow:
        """Return the row of a pass.

        Args:
            name: Name of the pass.

        Returns:
            Its row.

        Raises:
            KeyError: If the pass was not asked for.

        Example:
            >>> CheckReport("f", None, (CheckRow("grid", "ok"),)).row("grid").status
            'ok'
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` takes.

        Example:
            >>> CheckReport("f", None, (CheckRow("grid", "failed"),)).to_dict()["ok"]
            False
        """
        return {
            "kernel": self.kernel,
            "target": self.target,
            "ok": self.ok,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "compiled": None if self.compiled is None else self.compiled.to_dict(),
        }

    def __str__(self) -> str:
        return self.text


class CheckReports(Mapping[str, CheckReport]):
    """Reports of one kernel for several targets.

    Args:
        reports: Report by name of the target.
    """

    def __init__(self, reports: Mapping[str, CheckReport]) -> None:
        self._reports = dict(reports)

    def __getitem__(self, target: str) -> CheckReport:
        return self._reports[target]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def ok(self) -> bool:
        """Whether the report for every target is ok."""
        return all(report.ok for report in self._reports.values())

    @property
    def text(self) -> str:
        """All reports for people; rows that are the same for every target are told once."""
        reports = list(self._reports.values())
        shared = [row for row in reports[0].rows if all(row in each.rows for each in reports[1:])]
        if not shared or len(reports) == 1:
            return "\n".join(report.text for report in reports)
        told = [CheckReport(reports[0].kernel, None, tuple(shared)).text]
        told += [report.text_without(shared) for report in reports]
        return "\n".join(told)

    def to_dict(self) -> dict[str, Any]:
        """Return all reports as plain data, by target."""
        return {target: report.to_dict() for target, report in self._reports.items()}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        verdicts = {target: report.ok for target, report in self._reports.items()}
        return f"CheckReports({verdicts})"
