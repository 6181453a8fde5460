"""How much one session may ask of a gateway: calls a minute, and calls at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from turnfold.gateway.keys import SessionKey
from turnfold.gateway.refusals import Refusal

_RETRY_SOON_S = 1.0
"""A session has a free place again as soon as one of its calls is answered."""


class CallLimits:
    """Counts the calls of each session; 0 is no limit.

    limits = CallLimits(calls_per_minute=120, calls_at_once=16, clock=time.time)
    with limits.call(key): ...

    One gateway counts for itself: behind a balancer a session may do as much on each of them.
    """

    def __init__(
        self, *, calls_per_minute: int = 0, calls_at_once: int = 0, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._calls_at_once = calls_at_once
        self._num_running: Counter[tuple[str, str]] = Counter()
        self._rate = RateLimitItemPerMinute(calls_per_minute) if calls_per_minute else None
        self._windows = MovingWindowRateLimiter(MemoryStorage())

    @contextmanager
    def call(self, key: SessionKey) -> Iterator[None]:
        """For as long as the call is worked on. Raises Refusal (429) saying when to try again."""
        session = (key.rollout_id, key.session_id)
        self._refuse_crowd(session)
        self._refuse_haste(session)
        self._num_running[session] += 1
        try:
            yield
        finally:
            self._num_running[session] -= 1
            if not self._num_running[session]:
                del self._num_running[session]

    def _refuse_crowd(self, session: tuple[str, str]) -> None:
        if self._calls_at_once and self._num_running[session] >= self._calls_at_once:
            raise Refusal(
                "rate_limited",
                f"this session has {self._calls_at_once} calls that are not answered yet, the most "
                "that it may have",
                code="too_many_calls_at_once",
                is_retriable=True,
                retry_after_s=_RETRY_SOON_S,
            )

    def _refuse_haste(self, session: tuple[str, str]) -> None:
        if self._rate is None or self._windows.hit(self._rate, *session):
            return
        reset_at = self._windows.get_window_stats(self._rate, *session).reset_time
        raise Refusal(
            "rate_limited",
            f"this session has made {self._rate.amount} calls within a minute, the most that it may",
            code="rate_limit_exceeded",
            is_retriable=True,
            retry_after_s=max(reset_at - self._clock(), _RETRY_SOON_S),
        )
