"""The cut policy, rule by rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from turnfold.assembler import metrics
from turnfold.assembler.cut import Wait
from turnfold.assembler.rollouts import summary
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupDropped, LeftOut
from turnfold.schemas.testing import row, trajectory


def groups_of(decision: Any) -> list[str]:
    assert isinstance(decision, BatchCut), decision
    return [group.group_id for group in decision.groups]


def reasons(left_out: tuple[LeftOut, ...]) -> dict[str, str]:
    return {entry.rollout_id: entry.reason for entry in left_out}


def test_a_batch_is_cut_when_enough_groups_are_complete(desk: Any) -> None:
    d = desk()
    for name in "ab":
        d.dispatch(name)
    d.finish_group("a")
    assert isinstance(d.decide(), Wait)
    d.finish_group("b")
    cut = d.decide()
    assert groups_of(cut) == ["a", "b"]
    assert (cut.index, cut.policy_version, cut.num_rollouts) == (1, 0, 4)


def test_the_oldest_dispatched_group_goes_first_whatever_finished_first(desk: Any) -> None:
    d = desk()
    for name in "abc":
        d.dispatch(name)
    for name in "cba":
        d.finish_group(name)
    assert groups_of(d.decide()) == ["a", "b"]


def test_an_older_group_that_still_runs_does_not_block_newer_ones(desk: Any) -> None:
    d = desk()
    for name in "abcd":
        d.dispatch(name)
    d.finish("a", 0)
    d.finish_group("b")
    d.finish_group("c")
    assert [groups_of(cut) for cut in d.decide_all()] == [["b", "c"]]
    d.finish_group("d")
    d.finish("a", 1)
    (cut,) = d.decide_all()
    assert (cut.index, groups_of(cut)) == (2, ["a", "d"])


def test_batches_are_cut_ahead_of_the_trainer(desk: Any) -> None:
    d = desk()
    for name in "abcd":
        d.dispatch(name)
        d.finish_group(name)
    assert [(cut.index, groups_of(cut)) for cut in d.decide_all()] == [
        (1, ["a", "b"]),
        (2, ["c", "d"]),
    ]


def test_a_group_is_dropped_when_it_would_be_staler_than_allowed(desk: Any) -> None:
    d = desk(max_staleness=1, groups_per_batch=1)
    for name in "abcd":
        d.dispatch(name)
        d.finish_group(name, policy_version=0)
    # Version 0 in batches 1 and 2 is 0 and 1 version old; in batch 3 it would be 2.
    first, second, *dropped = d.decide_all()
    assert (groups_of(first), groups_of(second)) == (["a"], ["b"])
    assert [(drop.group_id, drop.reason) for drop in dropped] == [("c", "stale"), ("d", "stale")]


def test_one_stale_rollout_makes_its_group_stale(desk: Any) -> None:
    d = desk(max_staleness=0, groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    d.decide_all()
    d.dispatch("b")
    d.finish("b", 0, policy_version=0)
    d.finish("b", 1, policy_version=1)
    (drop,) = d.decide_all()
    assert (drop.group_id, drop.reason) == ("b", "stale")
    assert reasons(drop.left_out) == {"b-00": "stale", "b-01": "stale"}


def test_staleness_counts_from_the_oldest_version_that_sampled_a_rollout(desk: Any) -> None:
    d = desk(max_staleness=0, groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    d.decide_all()
    d.dispatch("b")
    d.finish_group("b", min_policy_version=0, max_policy_version=1)
    (drop,) = d.decide_all()
    assert drop.reason == "stale"


@pytest.mark.field_case("miles#2030")
def test_stale_groups_are_trained_when_asked(desk: Any) -> None:
    d = desk(max_staleness=0, groups_per_batch=1, on_stale="train")
    for name in "abc":
        d.dispatch(name)
        d.finish_group(name, policy_version=0)
    assert [groups_of(cut) for cut in d.decide_all()] == [["a"], ["b"], ["c"]]


@pytest.mark.field_case("verl#4449")
def test_staleness_of_zero_is_strictly_on_policy(desk: Any) -> None:
    d = desk(max_staleness=0)
    for version in range(4):
        for name in (f"{version}a", f"{version}b", f"{version}late"):
            d.dispatch(name)
        d.finish_group(f"{version}a", policy_version=version)
        d.finish_group(f"{version}b", policy_version=version)
        d.decide_all()
        d.finish_group(f"{version}late", policy_version=version)
        for decision in d.decide_all():
            assert decision.reason == "stale"
    assert d.state.decisions.num_batches == 4


def test_a_batch_never_holds_rows_of_a_version_that_it_has_yet_to_make(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("early")
    d.finish_group("early", policy_version=1)
    assert isinstance(d.decide(), Wait)
    d.dispatch("now")
    d.finish_group("now", policy_version=0)
    assert [groups_of(cut) for cut in d.decide_all()] == [["now"], ["early"]]


def test_at_its_deadline_a_group_closes_with_its_survivors(desk: Any) -> None:
    d = desk(group_size=3, group_timeout_s=60.0, groups_per_batch=1)
    d.dispatch("a")
    d.finish("a", 0)
    d.finish("a", 2)
    assert d.decide() == Wait(1060.0)
    d.now = 1060.0
    cut = d.decide()
    (group,) = cut.groups
    assert [ref.rollout_id for ref in group.rollouts] == ["a-00", "a-02"]
    assert reasons(group.left_out) == {"a-01": "not_finished"}


def test_a_group_with_too_few_survivors_at_its_deadline_is_dropped(desk: Any) -> None:
    d = desk(group_timeout_s=60.0)
    d.dispatch("a")
    d.finish("a", 0)
    d.now = 1060.0
    drop = d.decide()
    assert isinstance(drop, GroupDropped)
    assert drop.reason == "group_timeout"
    assert reasons(drop.left_out) == {"a-00": "group_timeout", "a-01": "not_finished"}


def test_a_group_of_which_nothing_was_ever_heard_is_dropped_at_its_deadline(desk: Any) -> None:
    d = desk(group_timeout_s=60.0)
    d.dispatch("lost")
    d.now = 1061.0
    drop = d.decide()
    assert (drop.group_id, drop.reason) == ("lost", "group_timeout")
    assert reasons(drop.left_out) == {"lost-00": "not_finished", "lost-01": "not_finished"}


@pytest.mark.field_case("NeMo RL#3238")
def test_one_hanging_rollout_does_not_hold_its_group_for_ever(desk: Any) -> None:
    d = desk(group_size=16, groups_per_batch=1, group_timeout_s=60.0)
    d.dispatch("a")
    for index in range(15):
        d.finish("a", index)
    d.now = 1060.0
    (group,) = d.decide().groups
    assert len(group.rollouts) == 15


def test_waiting_names_the_earliest_deadline_of_a_running_group(desk: Any) -> None:
    d = desk(group_timeout_s=60.0)
    d.dispatch("a")
    d.now = 1010.0
    d.dispatch("b")
    assert d.decide() == Wait(1060.0)
    d.finish_group("a")
    assert d.decide() == Wait(1070.0)
    d.finish_group("b")
    d.decide_all()
    assert d.decide() == Wait(None)


def test_a_task_that_does_not_say_when_it_was_dispatched_has_no_deadline(desk: Any) -> None:
    d = desk()
    d.dispatch("a", dispatched_at=0.0)
    d.now = 1e9
    assert d.decide() == Wait(None)


@pytest.mark.field_case("NeMo RL#3201")
def test_an_aborted_rollout_with_a_reward_is_neither_trained_nor_in_the_baseline(desk: Any) -> None:
    d = desk(group_size=3, groups_per_batch=1)
    d.dispatch("g")
    ended = trajectory(
        "g-00", group_id="g", index=0, status="aborted", reason="cancelled", reward=1.0
    )
    d.state.add_rollout(summary(ended, 1, 0, codec.digest(ended)))
    d.finish("g", 1, reward=0.0)
    d.finish("g", 2, reward=0.5)
    (cut,) = d.decide_all()
    assert [(ref.index, ref.reward) for ref in cut.groups[0].rollouts] == [(1, 0.0), (2, 0.5)]
    assert [left.reason for left in cut.groups[0].left_out] == ["aborted:cancelled"]


@pytest.mark.field_case("prime-rl#2674")
def test_a_group_that_ended_early_is_as_stale_as_the_batch_that_trains_it_is_late(
    desk: Any,
) -> None:
    """What counts is the batch less the version that sampled, wherever the time was spent."""
    d = desk(groups_per_batch=1, max_staleness=10)
    for name in "abcde":
        d.dispatch(name)
        d.finish_group(name, policy_version=0)
    lags = [
        cut.policy_version - cut.groups[0].rollouts[0].min_policy_version for cut in d.decide_all()
    ]
    assert lags == [0, 1, 2, 3, 4]


@pytest.mark.field_case("prime-rl#2812")
def test_the_effective_staleness_of_every_trained_rollout_is_counted(desk: Any) -> None:
    d = desk(groups_per_batch=1, max_staleness=10)
    for name in "abc":
        d.dispatch(name)
        d.finish_group(name, policy_version=0)
    before = metrics.STALENESS._sum.get()
    for cut in d.decide_all():
        metrics.count(cut)
    assert metrics.STALENESS._sum.get() - before == 2 * (0 + 1 + 2)


@pytest.mark.field_case("verl#7155")
def test_a_late_result_of_a_group_that_was_reissued_changes_nothing(desk: Any) -> None:
    d = desk(group_timeout_s=50.0, groups_per_batch=1)
    d.dispatch("lost")
    d.now += 50.0
    (dropped,) = d.decide_all()
    assert dropped.reason == "group_timeout"
    d.dispatch("again", attempt=1)
    d.finish_group("lost")
    assert isinstance(d.decide(), Wait)
    d.finish_group("again")
    (cut,) = d.decide_all()
    assert groups_of(cut) == ["again"]


@pytest.mark.field_case("miles#1717")
def test_a_failed_rollout_is_left_out_and_is_no_reward_of_zero(desk: Any) -> None:
    d = desk(group_size=3, groups_per_batch=1)
    d.dispatch("a")
    d.finish("a", 0, reward=1.0)
    d.finish("a", 1, status="aborted", reason="agent_error", rows=())
    d.finish("a", 2, reward=1.0)
    (group,) = d.decide().groups
    assert [ref.reward for ref in group.rollouts] == [1.0, 1.0]
    assert reasons(group.left_out) == {"a-01": "aborted:agent_error"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rows": ()}, "no_rows"),
        # A masked rollout is out of the baseline too, whatever its reward was by accident.
        ({"rows": (row([1, 2], [0, 0]),)}, "no_trained_tokens"),
        ({"rows": (row([1] * 9, [1] * 9),)}, "row_too_long"),
        ({"reward": math.nan}, "reward_not_finite"),
    ],
)
def test_a_rollout_that_cannot_be_trained_is_left_out_with_its_reason(
    desk: Any, fields: dict[str, Any], reason: str
) -> None:
    d = desk(group_size=3, groups_per_batch=1, max_row_tokens=8)
    d.dispatch("a")
    d.finish("a", 0)
    d.finish("a", 1, **fields)
    d.finish("a", 2)
    (group,) = d.decide().groups
    assert [ref.index for ref in group.rollouts] == [0, 2]
    assert reasons(group.left_out) == {"a-01": reason}


def test_rewards_of_one_zero_one_and_a_rollout_without_tokens_leave_three_to_train(
    desk: Any,
) -> None:
    d = desk(group_size=4, groups_per_batch=1)
    d.dispatch("a")
    for index, reward in enumerate([1.0, 0.0, 1.0]):
        d.finish("a", index, reward=reward)
    d.finish("a", 3, reward=0.0, rows=())
    (group,) = d.decide().groups
    assert [ref.reward for ref in group.rollouts] == [1.0, 0.0, 1.0]


def test_a_complete_group_with_too_few_survivors_is_dropped_at_once(desk: Any) -> None:
    d = desk()
    d.dispatch("a")
    d.finish("a", 0)
    d.finish("a", 1, status="aborted", reason="deadline", rows=())
    drop = d.decide()
    assert drop.reason == "too_few_survivors"
    assert reasons(drop.left_out) == {"a-00": "too_few_survivors", "a-01": "aborted:deadline"}


def test_a_truncated_rollout_with_a_reward_survives(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish("a", 0)
    d.finish("a", 1, status="truncated")
    assert d.decide().num_rollouts == 2


@pytest.mark.field_case("slime#2305")
def test_equal_rewards_are_dropped_when_asked_and_the_batch_is_refilled(desk: Any) -> None:
    d = desk(is_zero_variance_dropped=True)
    for name in "abc":
        d.dispatch(name)
    d.finish_group("a")
    d.finish_group("b", reward=5.0)
    d.finish_group("c")
    drop, cut = d.decide_all()
    assert (drop.group_id, drop.reason) == ("b", "zero_variance")
    assert groups_of(cut) == ["a", "c"]


def test_equal_rewards_are_trained_by_default(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a", reward=5.0)
    assert groups_of(d.decide()) == ["a"]


def test_of_two_rollouts_for_one_slot_the_first_attempt_that_completed_counts(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish("a", 0, rollout_id="third", attempt=2, reward=3.0)
    d.finish("a", 0, rollout_id="second", attempt=1, reward=2.0)
    d.finish("a", 0, rollout_id="first", attempt=0, status="aborted", rows=())
    d.finish("a", 1, rollout_id="other")
    (group,) = d.decide().groups
    assert [ref.rollout_id for ref in group.rollouts] == ["second", "other"]
    assert reasons(group.left_out) == {"first": "aborted", "third": "superseded"}


def test_a_rollout_of_a_slot_that_the_task_does_not_have_is_left_out(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    d.finish("a", 7)
    (group,) = d.decide().groups
    assert reasons(group.left_out) == {"a-07": "no_such_slot"}


def test_the_newest_revision_before_the_cut_counts(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish("a", 0, reward=0.0)
    d.finish("a", 0, reward=1.0, revision=1)
    d.finish("a", 1)
    (group,) = d.decide().groups
    assert [(ref.rollout_id, ref.reward, ref.offset) for ref in group.rollouts] == [
        ("a-00", 1.0, 1),
        ("a-01", 1.0, 2),
    ]


def test_a_revision_after_the_cut_is_ignored(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    d.decide_all()
    d.finish("a", 0, reward=9.0, revision=1)
    assert d.decide() == Wait(None)
    assert d.state.open == {}


def test_evaluation_rollouts_never_enter_a_batch(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a", split="eval")
    d.finish_group("a", split="eval")
    assert isinstance(d.decide(), Wait)
    assert d.state.open == {}


def test_groups_of_another_run_are_not_ours(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a", run_id="other")
    d.finish_group("a", run_id="other")
    assert isinstance(d.decide(), Wait)


def test_a_group_that_nobody_dispatched_is_complete_with_group_size_rewards(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.finish("foreign", 0, rollout_id="x")
    d.finish("foreign", 0, rollout_id="y", status="aborted", rows=())
    assert isinstance(d.decide(), Wait)
    d.finish("foreign", 0, rollout_id="z")
    (group,) = d.decide().groups
    assert [ref.rollout_id for ref in group.rollouts] == ["x", "z"]
    assert reasons(group.left_out) == {"y": "aborted"}


def test_groups_that_nobody_dispatched_come_after_the_dispatched_ones_by_name(desk: Any) -> None:
    d = desk(groups_per_batch=3)
    d.finish_group("z")
    d.finish_group("m")
    d.dispatch("zz")
    d.finish_group("zz")
    assert groups_of(d.decide()) == ["zz", "m", "z"]


def test_more_rollouts_than_a_foreign_group_may_hold_are_surplus(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    for index in range(3):
        d.finish("foreign", index)
    (group,) = d.decide().groups
    assert reasons(group.left_out) == {"foreign-02": "surplus"}


def test_a_manifest_says_where_the_rows_are_and_under_which_configuration(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish("a", 1)
    d.finish("a", 0, rows=(row([1, 2, 3], [0, 1, 1]), row([1, 9], [0, 1])))
    cut = d.decide()
    (group,) = cut.groups
    (first, second) = group.rollouts
    assert (first.rollout_id, first.partition, first.offset) == ("a-00", 0, 1)
    assert (first.num_rows, first.num_tokens, first.num_trained, first.max_row_tokens) == (
        2,
        5,
        3,
        3,
    )
    assert (second.rollout_id, second.offset) == ("a-01", 0)
    assert (cut.positions.tasks, cut.positions.trajectories) == ({0: 1}, {0: 2})
    assert (cut.at, cut.config_digest) == (1000.0, d.config.digest)


def test_the_same_state_gives_the_same_bytes(desk: Any) -> None:
    d = desk(groups_per_batch=1)
    d.dispatch("a")
    d.finish_group("a")
    assert codec.encode(d.decide()) == codec.encode(d.decide())


def test_deciding_under_another_configuration_than_the_state_was_made_with_is_refused(
    desk: Any,
) -> None:
    from turnfold.assembler.cut import decide
    from turnfold.schemas.run import RunConfig

    with pytest.raises(AssertionError, match="configuration"):
        decide(desk().state, RunConfig(group_size=5), 0.0)
