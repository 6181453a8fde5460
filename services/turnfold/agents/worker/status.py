"""What a worker says about itself, in one line. Pure.

3 of 16 rollouts run (longest g7-02, running for 312 s), 5 wait; ended: 40 completed, 2 timeout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

_LONG_STREAK = 8
"""Failures of one kind, one after the other, that no single bad task explains."""
_MAX_SHOWN_CHARS = 200


class Running(msgspec.Struct, frozen=True):
    """A rollout of which the agent runs."""

    rollout_id: str
    phase: str
    seconds: float


class Streak(msgspec.Struct, frozen=True):
    """Failures with one reason and nothing else in between."""

    reason: str = ""
    count: int = 0
    message: str = ""

    def after(self, reason: str | None, message: str) -> Streak:
        """The streak after one more rollout; a reward ends it (reason None)."""
        if reason is None:
            return Streak()
        count = self.count + 1 if reason == self.reason else 1
        return Streak(reason, count, message)

    @property
    def is_news(self) -> bool:
        """Whether it has just become long."""
        return self.count == _LONG_STREAK

    def text(self) -> str:
        """Empty while it is short."""
        if self.count < _LONG_STREAK:
            return ""
        first_line = self.message.strip().partition("\n")[0][:_MAX_SHOWN_CHARS]
        because = f": {first_line}" if first_line else ""
        return f"the last {self.count} all ended in {self.reason}{because}"


def line(
    running: Sequence[Running],
    num_waiting: int,
    concurrency: int,
    ended: Mapping[str, int],
    streak: Streak,
) -> str:
    """What runs, what waits and what became of the rest."""
    parts = [f"{len(running)} of {concurrency} rollouts run"]
    if running:
        longest = max(running, key=lambda one: one.seconds)
        parts[0] += f" (longest {longest.rollout_id}, {longest.phase} for {longest.seconds:.0f} s)"
    if num_waiting:
        parts[0] += f", {num_waiting} wait"
    if ended:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(ended.items()))
        parts.append(f"ended: {counts}")
    if streak.text():
        parts.append(streak.text())
    return "; ".join(parts)
