"""Rows, masks and ledgers of whole rollouts, with small integers for tokens."""

from typing import Any

import numpy as np
import pytest

from turnfold.healer.fold import fold_all
from turnfold.healer.rows import trajectory
from turnfold.schemas.events import Event, HistoryMode, VersionSpan
from turnfold.schemas.testing import RolloutScript, finished, started, turn
from turnfold.schemas.trajectories import Row, Trajectory, TurnSpan


def made(events: list[Event], mode: HistoryMode | None = None) -> Trajectory:
    state = fold_all(enumerate(events))
    return trajectory(state, topic="turnfold.events", partition=0, mode=mode)


def rollout(*turns: tuple[list[int], list[int]], **fields: Any) -> list[Event]:
    """Turns that carry their whole prompt and name no parent."""
    return [
        started("r1"),
        *(
            turn("r1", f"t{i}", prompt=prompt, output=output, **fields)
            for i, (prompt, output) in enumerate(turns)
        ),
        finished("r1"),
    ]


def shown(row: Row) -> tuple[list[int], list[int]]:
    return row.token_ids.tolist(), row.loss_mask.tolist()


def rows_of(events: list[Event], mode: HistoryMode | None = None) -> list[Any]:
    return [shown(row) for row in made(events, mode).rows]


def test_one_turn_is_one_row_with_its_logprobs() -> None:
    events = rollout(([1, 2, 3], [4, 5]), logprobs=[-0.125, -0.25])
    (row,) = made(events).rows
    assert shown(row) == ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    assert row.logprobs.tolist() == [0, 0, 0, -0.125, -0.25]
    assert row.turns == (TurnSpan(turn_id="t0", start=3, end=5),)


def test_a_clean_extension_continues_the_row_and_masks_what_came_between() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2, 3], [4, 5], logprobs=[-0.125, -0.25])
    script.turn("t1", [1, 2, 3, 4, 5, 6], [7], logprobs=[-0.5], parent="t0")
    script.finish()
    (row,) = made(script.events).rows
    assert shown(row) == ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 0, 1])
    assert row.logprobs.tolist() == [0, 0, 0, -0.125, -0.25, 0, -0.5]


def test_three_turns_with_observations_are_one_row_with_seven_trained_tokens() -> None:
    prompt, outputs, observations = list(range(1, 11)), [4, 2, 1], [3, 5, 0]
    script, fresh = RolloutScript("r1"), iter(range(100, 200))
    for index, (num_output, num_observed) in enumerate(zip(outputs, observations, strict=True)):
        output = [next(fresh) for _ in range(num_output)]
        parent = f"t{index - 1}" if index else None
        script.turn(f"t{index}", prompt, output, parent=parent)
        prompt = [*prompt, *output, *(next(fresh) for _ in range(num_observed))]
    script.finish()
    (row,) = made(script.events).rows
    assert len(row.token_ids) == 25
    assert row.num_trained == 7


@pytest.mark.parametrize("num_sampled", [2, 1500])
def test_drift_starts_a_second_row_and_loses_no_generation(num_sampled: int) -> None:
    nines = [9] * num_sampled
    events = rollout(([1, 2], nines), ([1, 2, 8, 3], [7]))
    assert rows_of(events) == [
        ([1, 2, *nines], [0, 0] + [1] * num_sampled),
        ([1, 2, 8, 3, 7], [0, 0, 0, 0, 1]),
    ]


def test_drift_told_by_a_parent_link_gives_the_same_rows_as_whole_prompts() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [9, 9])
    script.turn("t1", [1, 2, 8, 3], [7], parent="t0")
    script.finish()
    assert rows_of(script.events) == rows_of(rollout(([1, 2], [9, 9]), ([1, 2, 8, 3], [7])))


def test_another_first_message_starts_a_second_row_under_the_same_reward() -> None:
    events = [*rollout(([1, 2], [9]), ([3, 4], [8]))[:-1], finished("r1", reward=0.5)]
    result = made(events)
    assert [shown(row) for row in result.rows] == [([1, 2, 9], [0, 0, 1]), ([3, 4, 8], [0, 0, 1])]
    assert result.reward == 0.5


def test_parallel_branches_train_their_common_token_once() -> None:
    events = rollout(([1], [2]), ([1, 2, 30], [40]), ([1, 2, 31], [41]))
    assert rows_of(events) == [
        ([1, 2, 30, 40], [0, 1, 0, 1]),
        ([1, 2, 31, 41], [0, 0, 0, 1]),
    ]


def test_fork_after_two_shared_turns_trains_each_token_once_over_three_leaves() -> None:
    events = rollout(
        ([1], [2]),
        ([1, 2, 3], [4]),
        ([1, 2, 3, 4, 50], [60]),
        ([1, 2, 3, 4, 51], [61]),
        ([1, 2, 3, 4, 52], [62]),
    )
    rows = made(events).rows
    assert [row.loss_mask.tolist() for row in rows] == [
        [0, 1, 0, 1, 0, 1],
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 1],
    ]
    assert [span.is_trained for span in rows[1].turns] == [False, False, True]


def test_a_drifted_branch_and_a_clean_one_need_two_rows_only() -> None:
    events = rollout(([1], [2]), ([1, 9, 3], [4]), ([1, 2, 5], [6]))
    assert rows_of(events) == [([1, 9, 3, 4], [0, 0, 0, 1]), ([1, 2, 5, 6], [0, 1, 0, 1])]


def test_fork_inside_a_turn_starts_a_row_with_masked_context() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [3, 4, 5])
    script.turn("t1", [1, 2, 3, 9], [7], parent="t0")
    script.finish()
    assert rows_of(script.events) == [
        ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]),
        ([1, 2, 3, 9, 7], [0, 0, 0, 0, 1]),
    ]


def test_an_empty_output_makes_no_row() -> None:
    result = made(rollout(([1, 2], [])))
    assert result.rows == ()
    assert result.ledger.num_sampled == 0


def test_an_untrained_tail_is_cut() -> None:
    assert rows_of(rollout(([1, 2], [3]), ([1, 2, 3, 4, 5], []))) == [([1, 2, 3], [0, 0, 1])]


def test_a_turn_goes_on_from_an_empty_output() -> None:
    assert rows_of(rollout(([1, 2], []), ([1, 2, 5], [6]))) == [([1, 2, 5, 6], [0, 0, 0, 1])]


def test_a_second_try_after_an_empty_output_is_the_answer() -> None:
    assert rows_of(rollout(([1, 2], []), ([1, 2], [3]))) == [([1, 2, 3], [0, 0, 1])]


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["length"], "truncated"),
        (["length", "stop"], "completed"),
        (["stop", "length"], "truncated"),
    ],
)
def test_a_rollout_is_truncated_when_its_last_turn_is(reasons: list[str], expected: str) -> None:
    script = RolloutScript("r1")
    for index, reason in enumerate(reasons):
        prompt = [*script.sequence("t0"), 7] if index else [1]
        parent = "t0" if index else None
        script.turn(f"t{index}", prompt, [index + 2], parent=parent, finish_reason=reason)
    script.finish()
    result = made(script.events)
    assert result.status == expected
    assert [turn.finish_reason for turn in result.ledger.turns] == reasons


def test_a_foreign_assistant_message_inside_the_prompt_is_not_trained() -> None:
    assert rows_of(rollout(([1, 2, 3, 4], [5]))) == [([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])]


def test_a_turn_without_prompt_is_left_out_and_marked() -> None:
    result = made(rollout(([], [5]), ([1], [2])))
    assert [shown(row) for row in result.rows] == [([1, 2], [0, 1])]
    assert result.marks == ("prompt_empty:t0",)
    assert result.ledger.dropped == {"prompt_empty": 1}


def test_five_turns_give_one_row_a_session_with_the_bytes_the_engine_saw() -> None:
    script = RolloutScript("r1")
    prompts: dict[str, list[int]] = {}
    for session_id, base in (("main", 100), ("sub", 200)):
        prompt = [base, base + 1]
        for index in range(5):
            turn_id = f"{session_id}-{index}"
            parent = f"{session_id}-{index - 1}" if index else None
            script.turn(turn_id, prompt, [base + 10 + index], parent=parent, session_id=session_id)
            prompts[session_id] = prompt
            prompt = [*script.sequence(turn_id), base + 50 + index]
    script.finish()
    rows = made(script.events).rows
    assert [row.session_id for row in rows] == ["main", "sub"]
    for row in rows:
        last_prompt = prompts[row.session_id]
        assert row.token_ids.tolist()[: len(last_prompt)] == last_prompt
        assert row.num_trained == 5


def retried() -> RolloutScript:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [3])
    script.turn("t1", [1, 2, 3, 4], [5], parent="t0")
    script.turn("t1-again", [1, 2, 3, 4], [6], parent="t0")
    return script


def test_a_retry_whose_second_answer_was_used_drops_the_first_in_linear_mode() -> None:
    script = retried()
    script.turn("t2", [1, 2, 3, 4, 6, 7], [8], parent="t1-again")
    script.finish()
    result = made(script.events, "linear")
    assert [shown(row) for row in result.rows] == [([1, 2, 3, 4, 6, 7, 8], [0, 0, 1, 0, 1, 0, 1])]
    assert result.ledger.dropped == {"orphan": 1}


def test_a_retry_whose_first_answer_was_used_after_all_drops_the_second() -> None:
    script = retried()
    script.turn("t2", [1, 2, 3, 4, 5, 7], [8], parent="t1")
    script.finish()
    assert rows_of(script.events, "linear") == [([1, 2, 3, 4, 5, 7, 8], [0, 0, 1, 0, 1, 0, 1])]


def test_of_retries_that_end_the_conversation_the_last_one_counts() -> None:
    script = retried()
    script.finish()
    assert rows_of(script.events, "linear") == [([1, 2, 3, 4, 6], [0, 0, 1, 0, 1])]


def test_an_abandoned_answer_is_a_leaf_of_its_own_in_tree_mode() -> None:
    script = retried()
    script.turn("t2", [1, 2, 3, 4, 6, 7], [8], parent="t1-again")
    script.finish()
    assert rows_of(script.events, "tree") == [
        ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]),
        ([1, 2, 3, 4, 6, 7, 8], [0, 0, 0, 0, 1, 0, 1]),
    ]


def test_two_answers_to_one_prompt_that_were_both_continued_are_both_trained() -> None:
    script = retried()
    script.turn("t2", [1, 2, 3, 4, 5, 7], [8], parent="t1")
    script.turn("t3", [1, 2, 3, 4, 6, 7], [9], parent="t1-again")
    script.finish()
    result = made(script.events, "linear")
    assert result.ledger.num_trained == result.ledger.num_sampled == 5
    assert len(result.rows) == 2


def test_an_answer_that_only_abandoned_answers_continue_is_abandoned_with_them() -> None:
    script = RolloutScript("r1")
    script.turn("a0", [1, 2], [3])
    script.turn("a1", [1, 2, 3, 4], [5], parent="a0")
    for turn_id, prompt, output, parent in [
        ("b0", [1, 2], [3], None),
        ("b1", [1, 2, 3, 4], [5], "b0"),
        ("b2", [1, 2, 3, 4, 5, 6], [7], "b1"),
    ]:
        script.turn(turn_id, prompt, output, parent=parent)
    script.finish()
    result = made(script.events, "linear")
    assert [row.token_ids.tolist() for row in result.rows] == [[1, 2, 3, 4, 5, 6, 7]]
    assert {turn.turn_id for turn in result.ledger.turns if turn.dropped} == {"a0", "a1"}
    assert len(made(script.events, "tree").rows) == 2


def test_a_retry_continued_from_inside_its_output_is_no_orphan() -> None:
    script = retried()
    script.turn("t2", [1, 2, 3, 4, 5, 9], [8], parent="t1")
    script.finish()
    dropped = {t.turn_id for t in made(script.events).ledger.turns if t.dropped}
    assert dropped == {"t1-again"}


def test_the_same_prompt_in_two_sessions_is_no_retry() -> None:
    script = RolloutScript("r1")
    script.turn("a0", [1, 2], [3], session_id="a")
    script.turn("b0", [1, 2], [4], session_id="b")
    script.finish()
    assert made(script.events).ledger.num_trained == 2


def test_an_answer_given_up_for_an_empty_one_is_an_orphan() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [])
    script.turn("t1", [1, 2], [3])
    script.turn("t2", [1, 2, 9], [4], parent="t0")
    script.finish()
    assert rows_of(script.events) == [([1, 2, 9, 4], [0, 0, 0, 1])]


def test_two_agents_alternating_under_one_session_give_one_row_each() -> None:
    script = RolloutScript("r1")
    for index in range(3):
        for agent, base in (("m", 100), ("x", 200)):
            parent = f"{agent}{index - 1}" if index else None
            prompt = [*script.sequence(parent), base + 3] if parent else [base]
            script.turn(f"{agent}{index}", prompt, [base + 10 + index], parent=parent)
    script.finish()
    rows = made(script.events).rows
    assert [row.num_trained for row in rows] == [3, 3]


@pytest.mark.field_case("slime#2092")
def test_a_row_carries_the_policy_versions_of_its_tokens() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [3, 4], policy_version=9)
    spans = (
        VersionSpan(policy_version=10, start=0, end=1),
        VersionSpan(policy_version=12, start=1, end=3),
    )
    script.turn("t1", [1, 2, 3, 4, 5], [6, 7, 8], parent="t0", policy_versions=spans)
    script.finish()
    result = made(script.events)
    assert result.rows[0].policy_versions == (
        VersionSpan(policy_version=9, start=2, end=4),
        VersionSpan(policy_version=10, start=5, end=6),
        VersionSpan(policy_version=12, start=6, end=8),
    )
    assert (result.min_policy_version, result.max_policy_version) == (9, 12)
    assert result.marks == ()


def test_version_zero_is_a_version_and_an_unknown_one_is_marked() -> None:
    assert made(rollout(([1], [2]), policy_version=0)).marks == ()
    assert made(rollout(([1], [2]), policy_version=None)).marks == ("policy_version_unknown",)


@pytest.mark.field_case("NeMo Gym#2750")
@pytest.mark.field_case("prime-rl#2983")
def test_an_aborted_rollout_has_no_reward_and_no_rows_and_drops_every_token() -> None:
    script = retried()
    script.abort("agent_timeout")
    result = made(script.events)
    assert (result.status, result.reason, result.reward) == ("aborted", "agent_timeout", None)
    assert result.rows == ()
    assert result.ledger.dropped == {"rollout_aborted:agent_timeout": 3}


def test_a_failed_turn_is_counted_and_is_not_a_sample() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1], [2])
    script.fail("t1", reason="engine_unavailable")
    script.finish()
    result = made(script.events)
    assert (result.num_turns, result.num_failed_turns) == (1, 1)
    assert len(result.ledger.turns) == 1


def test_a_reward_that_is_not_finite_is_no_reward() -> None:
    result = made([started("r1"), finished("r1", reward=float("nan"))])
    assert (result.status, result.reason, result.reward) == ("aborted", "reward_not_finite", None)
    assert result.marks == ("reward_not_finite",)


def test_a_revised_reward_supersedes_the_first() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1], [2])
    script.finish(0.0)
    script.revise(1.0)
    result = made(script.events)
    assert (result.revision, result.reward) == (1, 1.0)
    assert result.source.last_offset == 3


def test_a_missing_parent_drops_what_depends_on_it_and_keeps_the_rest() -> None:
    script = RolloutScript("r1")
    for index in range(4):
        parent = f"t{index - 1}" if index else None
        prompt = [*script.sequence(parent), 50 + index] if parent else [1, 2]
        script.turn(f"t{index}", prompt, [10 + index], parent=parent)
    script.finish()
    without_t2 = [event for event in script.events if getattr(event, "turn_id", "") != "t2"]
    result = made(without_t2)
    assert [shown(row) for row in result.rows] == [([1, 2, 10, 51, 11], [0, 0, 1, 0, 1])]
    assert result.marks == ("gap:t3",)
    assert result.ledger.dropped == {"gap": 1}


def test_after_a_gap_a_turn_with_its_whole_prompt_starts_its_own_row() -> None:
    events: list[Event] = [
        started("r1"),
        turn("r1", "t1", prompt=[1, 2, 3], output=[4], parent="t0"),
        finished("r1"),
    ]
    result = made(events)
    assert [shown(row) for row in result.rows] == [([1, 2, 3, 4], [0, 0, 0, 1])]
    assert result.marks == ("parent_missing:t1",)


@pytest.mark.parametrize("parent", ["t1", "t2"])
def test_turns_that_name_each_other_as_parent_are_gaps(parent: str) -> None:
    events: list[Event] = [
        started("r1"),
        turn("r1", "t1", prompt=[1, 2], output=[4], parent=parent, shared_len=1),
        turn("r1", "t2", prompt=[1, 2], output=[4], parent="t1", shared_len=1),
        finished("r1"),
    ]
    assert made(events).marks == ("gap:t1", "gap:t2")


def test_a_turn_that_shares_more_than_its_parent_has_is_a_gap() -> None:
    events: list[Event] = [
        started("r1"),
        turn("r1", "t0", prompt=[1, 2], output=[3]),
        turn("r1", "t1", prompt=[1, 2, 3, 4, 5], output=[6], parent="t0", shared_len=4),
        finished("r1"),
    ]
    assert made(events).marks == ("gap:t1",)


def test_tokens_without_a_finite_logprob_are_context_for_what_follows() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [3, 4], logprobs=[-0.5, float("-inf")])
    script.turn("t1", [1, 2, 3, 4, 5], [6], parent="t0")
    script.finish()
    result = made(script.events)
    assert [shown(row) for row in result.rows] == [([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1])]
    assert result.ledger.masked == {"logprobs_not_finite": 2}
    assert result.marks == ("logprobs_not_finite:t0",)
    assert np.isfinite(result.rows[0].logprobs.array).all()


def test_tokens_without_a_finite_logprob_at_the_end_are_in_no_row() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [1, 2], [3])
    script.turn("t1", [1, 2, 3, 5], [6], parent="t0", logprobs=[float("nan")])
    script.finish()
    result = made(script.events)
    assert [shown(row) for row in result.rows] == [([1, 2, 3], [0, 0, 1])]
    assert result.ledger.dropped == {"logprobs_not_finite": 1}


def test_a_trajectory_that_kafka_would_refuse_is_aborted_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turnfold.healer.rows.MAX_TRAJECTORY_BYTES", 400)
    result = made(rollout((list(range(100)), [5, 6])))
    assert (result.status, result.reason, result.rows) == ("aborted", "too_large", ())
    assert result.ledger.dropped == {"rollout_aborted:too_large": 2}


def test_the_trajectory_names_its_rollout_and_its_place_in_the_log() -> None:
    events: list[Event] = [
        started(
            "r1", group_id="g7", run_id="run", task_id="t", index=3, attempt=1, dispatch_index=9
        ),
        turn("r1", "t0", prompt=[1], output=[2], continuity="healed"),
        finished("r1", rewards={"format": 1.0}),
    ]
    result = made(events)
    assert (result.group_id, result.run_id, result.task_id) == ("g7", "run", "t")
    assert (result.index, result.attempt, result.dispatch_index) == (3, 1, 9)
    assert (result.num_healed, result.rewards) == (1, {"format": 1.0})
    assert (result.source.first_offset, result.source.last_offset) == (0, 2)


def test_process_rewards_go_to_the_turns_in_the_rows_and_an_unknown_turn_is_marked() -> None:
    events: list[Event] = [
        started("r1"),
        turn("r1", "t0", prompt=[1], output=[2]),
        finished("r1", reward=1.0, turn_rewards={"t0": 0.5}),
    ]
    assert made(events).turn_rewards == {"t0": 0.5}
    assert "reward_of_unknown_turn" not in made(events).marks
    elsewhere = finished("r1", reward=1.0, turn_rewards={"t0": 0.5, "t9": 1.0})
    result = made([*events[:2], elsewhere])
    assert result.turn_rewards == {"t0": 0.5}
    assert "reward_of_unknown_turn" in result.marks
    broken = finished("r1", reward=1.0, turn_rewards={"t0": float("nan")})
    assert made([*events[:2], broken]).reason == "reward_not_finite"


def test_a_turn_may_share_tokens_with_one_that_names_no_parent_but_has_one() -> None:
    script = RolloutScript("r1")
    script.turn("t0", [2], [1], session_id="a")
    script.turn("t1", [2, 1], [3], parent="t0", session_id="b")
    script.turn("t2", [2, 1, 3], [4], session_id="b")  # carries its whole prompt, extends t1
    script.turn("t3", [2], [8], parent="t2", session_id="a")  # shares one token with t2
    script.finish()
    made = trajectory(fold_all(enumerate(script.events)), topic="turnfold.events", partition=0)
    assert [row.token_ids.tolist() for row in made.rows] == [[2, 1, 3, 4]]
    assert made.ledger.dropped == {"orphan": 1}
