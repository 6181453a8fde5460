"""What retention has deleted, or soon will, of the records that a run still needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

WARNED_SHARE = 0.5
"""Share of the retention time after which a record that is still needed is worth a warning."""


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest record of a partition that somebody still has to read."""

    why: str
    """`batch 7, which is not trained yet, names rollout r3`"""
    topic: str
    partition: int
    offset: int
    written_at: float | None
    """Unix seconds; None when the record is gone."""

    @property
    def place(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


class Finding(msgspec.Struct, frozen=True):
    """One thing to know about retention."""

    is_lost: bool
    """Whether the record is gone; else it is a warning."""
    text: str

    def __str__(self) -> str:
        return f"{'LOST' if self.is_lost else 'warning'}: {self.text}"


def findings(needs: Iterable[Need], retention_ms: Mapping[str, int], now: float) -> list[Finding]:
    """What is lost, and what has used up half of its time.

    `retention_ms` by topic; -1 keeps for ever.
    """
    found = []
    for need in needs:
        kept_s = retention_ms.get(need.topic, -1) / 1000
        if need.written_at is None:
            found.append(Finding(True, f"{need.why} at {need.place}, which has expired"))
        elif kept_s >= 0 and now - need.written_at > WARNED_SHARE * kept_s:
            left_s = need.written_at + kept_s - now
            found.append(
                Finding(
                    False,
                    f"{need.why} at {need.place}, written {_hours(now - need.written_at)} ago; "
                    f"retention.ms keeps it {_hours(kept_s)}, so it may go in {_hours(max(0, left_s))}"
                    ": train it before, or raise retention.ms",
                )
            )
    return found


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 360 else f"{seconds:.0f} s"
