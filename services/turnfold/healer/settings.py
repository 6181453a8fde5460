"""What a healer is told."""

from __future__ import annotations

from collections.abc import Collection

from turnfold.log.settings import ServiceSettings
from turnfold.schemas.settings import SettingsError


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of `turnfold healer`."""

    partitions: str = ""
    """Partitions of the events topic that this process owns, such as 0-1 or 0,3; all when empty."""
    max_open_s: float = 86400.0
    """A rollout without a deadline of its own is aborted after this many seconds."""
    deadline_check_s: float = 1.0
    """Seconds between looks at the deadlines of open rollouts."""
    max_poll_records: int = 200
    """Records that go into one transaction, at most."""
    max_open_mb: float = 1024.0
    """Megabytes of open rollouts that are kept in memory; those that have been idle longest rest in
    a temporary file."""
    commit_every_s: float = 5.0
    """Seconds between two commits of the position while no rollout ends."""
    report_every_s: float = 30.0
    """Seconds between two lines of progress in the log."""

    def owned(self, existing: Collection[int]) -> list[int]:
        """The partitions to own. Raises SettingsError when the text is no list of existing ones.

        "0-1,3" with partitions 0 to 3 gives [0, 1, 3].
        """
        if not self.partitions.strip():
            return sorted(existing)
        try:
            chosen = {number for part in self.partitions.split(",") for number in _numbers(part)}
        except ValueError:
            raise SettingsError(
                f"TURNFOLD_PARTITIONS={self.partitions!r}: expected numbers and ranges, "
                "such as 0-1 or 0,3"
            ) from None
        unknown = sorted(chosen - set(existing))
        if unknown or not chosen:
            raise SettingsError(
                f"TURNFOLD_PARTITIONS={self.partitions!r}: the events topic has partitions "
                f"{min(existing)} to {max(existing)}, not {unknown}"
            )
        return sorted(chosen)


def _numbers(part: str) -> range:
    first, dash, last = part.strip().partition("-")
    return range(int(first), int(last if dash else first) + 1)
