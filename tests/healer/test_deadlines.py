"""When a rollout without an end is aborted."""

from turnfold.healer.deadlines import Deadlines
from turnfold.schemas.testing import started


def deadlines(**rollouts: float | None) -> Deadlines:
    """Rollouts that began at 1000 s, with their deadlines; without one it is 1050 s."""
    made = Deadlines(max_open_s=50)
    for rollout_id, deadline_at in rollouts.items():
        made.opened(started(rollout_id, deadline_at=deadline_at), at=1000)
    return made


def test_nobody_is_due_before_the_log_of_that_moment_is_folded() -> None:
    watched = deadlines(a=1010, b=1020)
    assert watched.due(now=1015, position=40, end=50) == []
    assert watched.due(now=1016, position=49, end=60) == []
    assert watched.due(now=1017, position=50, end=60) == ["a"]


def test_only_what_was_due_at_the_earlier_look_counts() -> None:
    watched = deadlines(a=1010)
    assert watched.due(now=1009, position=5, end=5) == []
    assert watched.due(now=1011, position=5, end=5) == []
    assert watched.due(now=1012, position=5, end=5) == ["a"]


def test_a_rollout_without_a_deadline_has_the_longest_time_from_its_start() -> None:
    watched = deadlines(a=None)
    watched.due(now=1049, position=0, end=0)
    assert watched.due(now=1050, position=0, end=0) == []
    assert watched.due(now=1051, position=0, end=0) == ["a"]


def test_a_deadline_is_asked_for_once_and_forgotten_with_its_rollout() -> None:
    watched = deadlines(a=1, b=2)
    watched.due(now=1000, position=0, end=0)
    assert watched.due(now=1001, position=0, end=0) == ["a", "b"]
    watched.asked(["a"])
    watched.closed("b")
    assert watched.due(now=1002, position=0, end=0) == []


def test_a_deadline_of_zero_has_passed() -> None:
    watched = deadlines(a=0.0)
    watched.due(now=1000, position=0, end=0)
    assert watched.due(now=1001, position=0, end=0) == ["a"]
