"""Deadlines lie inside one another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.agents.deadlines import deadlines

seconds = st.floats(min_value=0.01, max_value=1e6)


def test_there_is_time_between_the_agents_end_and_the_healers_deadline() -> None:
    found = deadlines(1800.0, grace_s=10.0, setup_timeout_s=300.0)
    assert (found.setup_s, found.run_s, found.kill_s, found.end_s) == (300, 1785, 1795, 1800)
    assert found.grace_s == 10.0


@pytest.mark.field_case("rllm#677")
@given(timeout_s=seconds, grace_s=st.floats(0, 1e6), setup_timeout_s=st.none() | seconds)
def test_every_deadline_lies_before_the_one_around_it_whatever_the_settings(
    timeout_s: float, grace_s: float, setup_timeout_s: float | None
) -> None:
    found = deadlines(timeout_s, grace_s, setup_timeout_s)
    assert 0 < found.setup_s <= found.run_s <= found.kill_s < found.end_s == timeout_s
    assert found.run_s >= 0.7 * timeout_s  # the agent keeps most of a short time too
