"""What a search has found so far, on disk, so that a search that was killed goes on where it was.

One file for each search, a line of JSON for each decided candidate. A line is written in one call
and synced; a line that a kill cut short is left out. The file is removed when the search ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tpu_kernels.tuning.records import canonical, digest, encode, encode_config
from tpu_kernels.tuning.report import TuneRow

# A crash may be the kernel's killing of what takes too much memory, and what was skipped was not
# tried: both get another chance.
_FINAL: Final = frozenset({"ok", "invalid", "vmem", "unsupported", "error", "timeout", "wrong"})
_RUNNING: Final = "running"
_STALE_S: Final = 14 * 86400.0


class Journal:
    """The decided candidates of one search.

    Args:
        folder: Where journals lie.
        identity: Everything that decides what candidates give: kernel, source, arguments, target,
            measure, versions.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Journal(folder, {"kernel": "ns::f"}).add(TuneRow({"block": (8,)}, "ok", cost=2.0))
        ...     Journal(folder, {"kernel": "ns::f"}).recall([{"block": (8,)}, {"block": (9,)}])
        {0: TuneRow(config={'block': (8,)}, status='ok', reason='', time_us=None, cost=2.0, \
cost_unit='', seconds=0.0, same_as=None, figures={})}
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Any) -> None:
        self.file = Path(folder) / f"{digest(encode(identity))}.jsonl"

    def add(self, row: TuneRow) -> None:
        """Keep a row; one that says nothing final is not kept, and a full disk costs only that."""
        if row.status not in _FINAL or row.same_as is not None:
            return
        self._append(_plain(row))

    def begin(self, config: Mapping[str, Any]) -> None:
        """Keep that a config is about to run in this very process, which it may take down.

        If no row of it follows, `recall` gives it one: ``"crashed"``.
        """
        self._append({"config": encode_config(config), "status": _RUNNING})

    def _append(self, entry: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            line = json.dumps(entry, allow_nan=False) + "\n"
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a", encoding="utf-8") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())

    def recall(self, configs: Sequence[Mapping[str, Any]]) -> dict[int, TuneRow]:
        """Return the rows that an earlier search left, by the index of their config.

        Args:
            configs: The candidates of this search.
        """
        places = {canonical(encode(config)): index for index, config in enumerate(configs)}
        found: dict[int, TuneRow] = {}
        for row in self._read():
            index = places.get(canonical(encode(row.config)))
            if index is not None and row.status == _RUNNING:
                reason = "the process ended while this ran on the device"
                found[index] = TuneRow(configs[index], "crashed", reason)
            elif index is not None:
                found[index] = replace(row, config=configs[index])
        return found

    def close(self) -> None:
        """Remove the file, and those of searches that nobody will go on with."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)
        now = time.time()
        for file in self.file.parent.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                if now - file.stat().st_mtime > _STALE_S:
                    file.unlink()

    def _read(self) -> list[TuneRow]:
        try:
            lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # cut short by a kill
                rows.append(TuneRow(**json.loads(line)))
        known = {*_FINAL, _RUNNING}
        return [row for row in rows if isinstance(row.config, Mapping) and row.status in known]


def _plain(row: TuneRow) -> dict[str, Any]:
    return {
        "config": encode_config(row.config),
        "status": row.status,
        "reason": row.reason,
        "time_us": row.time_us,
        "cost": row.cost,
        "cost_unit": row.cost_unit,
        "seconds": row.seconds,
        "figures": encode(row.figures, where="figures"),
    }
