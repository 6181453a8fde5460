"""What a worker says about itself."""

from __future__ import annotations

from turnfold.agents.worker.status import Running, Streak, line


def test_the_line_names_what_runs_longest_what_waits_and_what_has_ended() -> None:
    running = [Running("g1-00", "running", 3.0), Running("g0-01", "set-up", 45.2)]
    assert line(running, 5, 16, {"timeout": 1, "completed": 40}, Streak()) == (
        "2 of 16 rollouts run (longest g0-01, set-up for 45 s), 5 wait; "
        "ended: 40 completed, 1 timeout"
    )
    assert line([], 0, 4, {}, Streak()) == "0 of 4 rollouts run"


def test_a_long_streak_of_one_failure_is_part_of_it_and_a_reward_ends_it() -> None:
    streak = Streak()
    for number in range(1, 9):
        streak = streak.after("agent_error", "ModuleNotFoundError: no module 'x'\nmore")
        assert streak.is_news == (number == 8)
    assert line([], 0, 4, {"agent_error": 8}, streak) == (
        "0 of 4 rollouts run; ended: 8 agent_error; "
        "the last 8 all ended in agent_error: ModuleNotFoundError: no module 'x'"
    )
    assert streak.after("agent_timeout", "").count == 1
    assert streak.after(None, "").text() == ""
