"""Which open rollouts are past their deadline. Pure: it is told the time."""

from __future__ import annotations

from collections.abc import Iterable

from turnfold.schemas.events import RolloutStarted


class Deadlines:
    """The deadlines of the open rollouts of one partition.

    A deadline that has passed proves nothing as long as there is log left to fold: the end of the
    rollout may be in it. So each look remembers the time and where the log ended, and a rollout is
    due when its deadline had passed at an earlier look and the fold has reached what was the end
    then.

    look at 100 s, log ends at offset 50, folded to 40     nobody is due
    look at 101 s, log ends at offset 60, folded to 55     due: open, and deadline not after 100 s
    """

    def __init__(self, max_open_s: float) -> None:
        self._max_open_s = max_open_s
        self._deadlines: dict[str, float] = {}
        self._asked: set[str] = set()
        self._last_look: tuple[float, int] | None = None
        """When, and where the log ended then."""

    def opened(self, started: RolloutStarted, at: float) -> None:
        """A rollout began; `at` is the time of the record, Unix seconds."""
        deadline = started.deadline_at
        self._deadlines[started.rollout_id] = (
            at + self._max_open_s if deadline is None else deadline
        )

    def closed(self, rollout_id: str) -> None:
        self._deadlines.pop(rollout_id, None)
        self._asked.discard(rollout_id)

    def due(self, now: float, position: int, end: int) -> list[str]:
        """Rollouts to abort. `position` is the next offset to fold, `end` the end of the log."""
        if self._last_look is None:
            self._last_look = (now, end)
            return []
        looked_at, end_then = self._last_look
        if position < end_then:
            return []
        self._last_look = (now, end)
        return [
            rollout_id
            for rollout_id, deadline in self._deadlines.items()
            if deadline <= looked_at and rollout_id not in self._asked
        ]

    def asked(self, rollout_ids: Iterable[str]) -> None:
        """Their aborts are in the log; they need no second one while it is read back."""
        self._asked.update(rollout_ids)
