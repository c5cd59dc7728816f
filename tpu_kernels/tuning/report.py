"""The outcome of a tuning run as data: one row per candidate, failures included, and the choice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpu_kernels.tuning.records import encode

STATUSES = (
    "ok",
    "invalid",
    "vmem",
    "unsupported",
    "error",
    "timeout",
    "crashed",
    "wrong",
    "skipped",
)
"""Every status that a row may have; only ``"ok"`` can be chosen."""


@dataclass(frozen=True)
class TuneRow:
    """What became of one candidate.

    Attributes:
        config: The config with the values as they were given.
        status: One of `STATUSES`: ``"invalid"`` (a block or value that the kernel or Pallas
            refuses), ``"vmem"`` (does not fit), ``"unsupported"`` (by this chip), ``"error"``
            (anything else that was raised), ``"timeout"``, ``"crashed"`` (its process died),
            ``"wrong"`` (another result than the reference), ``"skipped"`` (the budget ended
            before).
        reason: One line for a failure, with the author's ``file:line`` where it is known.
        time_us: Measured time in µs, None if not measured.
        cost: The objective's figure, smaller is better, None if there is none.
        cost_unit: What the figure counts, such as ``"µs (estimated)"``.
        seconds: What trying this candidate took.
        same_as: Index of an earlier row with the identical program, whose outcome this row shares.
        figures: What else is known: VMEM bytes, bundles, spread and number of samples.
    """

    config: Mapping[str, Any]
    status: str
    reason: str = ""
    time_us: float | None = None
    cost: float | None = None
    cost_unit: str = ""
    seconds: float = 0.0
    same_as: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the candidate works."""
        return self.status == "ok"

    @property
    def rank(self) -> float:
        """What rows are ordered by: the measured time if there is one, else the cost figure."""
        if self.time_us is not None:
            return self.time_us
        return self.cost if self.cost is not None else float("inf")


@dataclass(frozen=True)
class TuneReport:
    """The outcome of `autotune`.

    Attributes:
        kernel: Name of the kernel.
        target: The chip that it was tuned for; None if candidates ran on this machine's CPU.
        objective: What candidates were ranked by.
        results: One row per candidate, in the order tried.
        best: The chosen row, None if no candidate works.
        fallback: What runs if no candidate works: ``"reference"``, or None if there is a best.
        decision: Why this one was chosen, in one line.
        seconds: Duration of the run.
        stored: Whether the choice is in the cache.
        space: How many configs there were; more than rows where the space was sampled.
        baseline: The reference compiled by XLA without the kernel, where that was asked for.
    """

    kernel: str
    target: str | None
    objective: str
    results: tuple[TuneRow, ...]
    best: TuneRow | None
    fallback: str | None = None
    decision: str = ""
    seconds: float = 0.0
    stored: bool = False
    space: int = 0
    baseline: TuneRow | None = None

    @property
    def ok(self) -> bool:
        """Whether some candidate works."""
        return self.best is not None

    @property
    def ranking(self) -> tuple[TuneRow, ...]:
        """The rows that work, best first; the chosen one comes first whatever its figure."""
        working = [row for row in self.results if row.ok]
        return tuple(sorted(working, key=lambda row: (row is not self.best, row.rank)))

    @property
    def text(self) -> str:
        """The report for people.

        Example:
            >>> row = TuneRow({"block": 8}, "ok", time_us=1.5)
            >>> bad = TuneRow({"block": 7}, "invalid", "7 is odd")
            >>> print(TuneReport("ns::f", None, "wall", (row, bad), row, seconds=2).text)
            ns::f: 1 of 2 configs work, 1 invalid; wall, 2.0 s
            * block=8  ok       1.50 µs
              block=7  invalid  7 is odd
        """
        counts = Counter(row.status for row in self.results)
        bad = "".join(f", {n} {status}" for status, n in counts.items() if status != "ok")
        target = f" for {self.target}" if self.target else ""
        lines = [
            f"{self.kernel}{target}: {counts['ok']} of {len(self.results)} configs work{bad}; "
            f"{self.objective}, {self.seconds:.1f} s"
        ]
        if self.space > len(self.results):
            lines[0] += f"; a sample of a space of {self.space}"
        failed = [row for row in self.results if not row.ok and row.status != "skipped"]
        rows = [*self.ranking, *failed]
        names = [config_text(row.config) for row in rows]
        width = max(map(len, names), default=0)
        status_width = max((len(row.status) for row in rows), default=0)
        for row, name in zip(rows, names, strict=True):
            mark = "*" if row is self.best else " "
            line = f"{mark} {name:{width}}  {row.status:{status_width}}  {_outcome(row)}"
            lines.append(line.rstrip())
        lines += self._skipped()
        if self.baseline is not None:
            lines.append(f"  XLA without the kernel: {_outcome(self.baseline)}")
        if self.decision:
            lines.append(self.decision)
        if self.fallback:
            lines.append(f"no config works; what is left is the {self.fallback}")
        return "\n".join(lines)

    def _skipped(self) -> list[str]:
        skipped = [row for row in self.results if row.status == "skipped"]
        if len(skipped) == 1:
            return [f"  {config_text(skipped[0].config)}  skipped  {skipped[0].reason}"]
        reasons = Counter(row.reason.partition(":")[0] for row in skipped)
        return [f"  {count} configs skipped: {reason}" for reason, count in reasons.items()]

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` takes (tuples become lists).

        Example:
            >>> row = TuneRow({"block": (8, 128)}, "ok")
            >>> report = TuneReport("ns::f", "v6e", "compiler", (row,), row)
            >>> report.to_dict()["best"]["config"]
            {'block': [8, 128]}
        """
        plain = {
            "kernel": self.kernel,
            "target": self.target,
            "objective": self.objective,
            "results": [_row_dict(row) for row in self.results],
            "best": _row_dict(self.best) if self.best is not None else None,
            "fallback": self.fallback,
            "decision": self.decision,
            "seconds": self.seconds,
            "stored": self.stored,
            "space": self.space,
            "baseline": _row_dict(self.baseline) if self.baseline is not None else None,
        }
        return dict(json.loads(json.dumps(plain)))


def _row_dict(row: TuneRow) -> dict[str, Any]:
    return {
        **asdict(row),
        "config": encode(row.config, where="config"),
        "figures": encode(row.figures, where="figures"),
    }


def _outcome(row: TuneRow) -> str:
    if not row.ok:
        return row.reason
    if row.time_us is not None:
        return f"{row.time_us:.2f} µs"
    return f"{row.cost:.2f} {row.cost_unit}" if row.cost is not None else ""


def config_text(config: Mapping[str, Any]) -> str:
    """Write a config in one line.

    Example:
        >>> config_text({"block": (8, 128), "stages": 2})
        'block=(8, 128) stages=2'
    """
    return " ".join(f"{name}={value!r}" for name, value in config.items()) or "(no parameters)"
