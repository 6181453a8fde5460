"""Records that could not be used, kept whole with the reason."""

from __future__ import annotations

from turnfold.schemas.wire import Wire


class DeadLetter(Wire, frozen=True, kw_only=True, tag="dead_letter"):
    """A record as it was received."""

    topic: str
    partition: int
    offset: int
    reason: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    at: float = 0.0
