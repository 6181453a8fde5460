"""What one session may ask of a gateway."""

import time

import pytest

from turnfold.gateway.http.limits import CallLimits
from turnfold.gateway.keys import SessionKey
from turnfold.gateway.refusals import Refusal


def key(session_id: str = "main") -> SessionKey:
    return SessionKey(
        rollout_id="r", session_id=session_id, partition=0, offset=0, expires_at=2_000_000_000
    )


def test_a_session_over_its_rate_is_told_when_to_try_again() -> None:
    limits = CallLimits(calls_per_minute=2, clock=time.time)
    for _ in range(2):
        with limits.call(key()):
            pass
    with pytest.raises(Refusal) as refused, limits.call(key()):
        pass
    assert refused.value.status == 429
    assert refused.value.is_retriable
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 60


def test_other_sessions_are_counted_by_themselves() -> None:
    limits = CallLimits(calls_per_minute=1, calls_at_once=1, clock=time.time)
    with limits.call(key("a")), limits.call(key("b")):
        pass


def test_a_place_is_free_again_when_its_call_is_over_however_it_ended() -> None:
    limits = CallLimits(calls_at_once=1, clock=time.time)
    with pytest.raises(ZeroDivisionError), limits.call(key()):
        raise ZeroDivisionError
    with limits.call(key()):
        with pytest.raises(Refusal, match="not answered yet") as refused, limits.call(key()):
            pass
        assert refused.value.code == "too_many_calls_at_once"
    with limits.call(key()):
        pass


def test_no_limit_is_no_limit() -> None:
    limits = CallLimits(clock=time.time)
    for _ in range(200):
        with limits.call(key()):
            pass
