"""What an assembler is told, besides the RunConfig."""

from __future__ import annotations

from turnfold.log.settings import ServiceSettings


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of `turnfold assembler`; how batches are cut is the RunConfig's."""

    max_batches_ahead: int = 1
    """Batches cut beyond the one that the trainer works on; the trainer's `prefetch` or more.

    More would fill with quick groups what slow ones could still go into. -1 cuts without a limit.
    """

    is_slow_awaited: bool = True
    """Put off a cut that would make a running group stale, at most until the group's deadline.

    Otherwise the trainer never waits for a slow group, and the slowest are not trained.
    """

    @property
    def max_ahead(self) -> int | None:
        return None if self.max_batches_ahead < 0 else self.max_batches_ahead
