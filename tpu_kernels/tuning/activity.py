"""What a search is doing right now, for whoever watches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_kernels.tuning.candidates import Candidate


@dataclass(frozen=True)
class Activity:
    """What is running.

    Attributes:
        stage: ``"tracing"``, ``"compiling"``, ``"running"`` or ``"timing"``.
        running: The configs that workers have in hand.
    """

    stage: str
    running: tuple[Mapping[str, Any], ...]


class Stage:
    """One stage of a batch: which of its candidates have started and not ended.

    Args:
        name: See `Activity`.
        candidates: The batch.
        tell: Called whenever something starts or ends; None to watch nothing.

    Example:
        >>> from types import SimpleNamespace
        >>> stage = Stage("tracing", [SimpleNamespace(config={"n": 1})], print)
        >>> stage.started(0)
        Activity(stage='tracing', running=({'n': 1},))
        >>> stage.ended(0)
        Activity(stage='tracing', running=())
    """

    def __init__(
        self,
        name: str,
        candidates: Sequence[Candidate],
        tell: Callable[[Activity], None] | None,
    ) -> None:
        self._name = name
        self._candidates = candidates
        self._tell = tell
        self._running: dict[int, Mapping[str, Any]] = {}

    def started(self, position: int) -> None:
        """A worker has taken the candidate at this place of the batch; again after it was lost."""
        self._running[position] = self._candidates[position].config
        self._say()

    def ended(self, position: int) -> None:
        """The candidate at this place of the batch is done with the stage."""
        self._running.pop(position, None)
        self._say()

    def _say(self) -> None:
        if self._tell is not None:
            self._tell(Activity(self._name, tuple(self._running.values())))
