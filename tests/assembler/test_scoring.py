"""Evaluation groups and rounds: what they score, when they close, and that training is untouched."""

from __future__ import annotations

from typing import Any

import pytest

from turnfold.assembler.cut import Wait
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.scoring import decide_evaluation, pass_at
from turnfold.schemas import codec
from turnfold.schemas.batches import EvaluationCompleted, GroupEvaluated
from turnfold.schemas.tasks import Evaluation


class Evaluations:
    """A desk on which a round of evaluation lies beside the training."""

    def __init__(self, desk: Any, num_tasks: int = 2, n: int = 2) -> None:
        self.desk, self.n = desk, n
        self.round = Evaluation(version=4, num_tasks=num_tasks)

    def dispatch(self, cursor: int, attempt: int = 0) -> str:
        name = f"eval-{cursor}-{attempt}"
        self.desk.dispatch(
            name,
            n=self.n,
            task_id=f"t{cursor}",
            split="eval",
            cursor=cursor,
            attempt=attempt,
            evaluation=self.round,
        )
        return name

    def finish(self, name: str, *rewards: float | None, **fields: Any) -> None:
        for index, reward in enumerate(rewards):
            given = {"reward": reward} if reward is not None else {"status": "aborted", "rows": ()}
            self.desk.finish(
                name, index, split="eval", dispatch_index=0, policy_version=4, **given, **fields
            )

    def decide(self) -> GroupEvaluated | EvaluationCompleted | None:
        return decide_evaluation(self.desk.state, self.desk.config, self.desk.now)

    def apply(self) -> Any:
        decision = self.decide()
        assert decision is not None
        assert self.desk.state.add_decision(decision)
        return decision


def test_a_group_is_scored_when_all_its_rollouts_have_ended(desk: Any) -> None:
    e = Evaluations(desk())
    name = e.dispatch(0)
    e.finish(name, 1.0)
    assert e.decide() is None
    e.desk.finish(name, 1, reward=0.25, split="eval", dispatch_index=0)
    decision = e.apply()
    assert isinstance(decision, GroupEvaluated)
    assert [(r.rollout_id, r.reward) for r in decision.rollouts] == [
        ("eval-0-0-00", 1.0),
        ("eval-0-0-01", 0.25),
    ]
    assert (decision.mean_reward, decision.num_passed, decision.task_id) == (0.625, 1, "t0")
    assert e.decide() is None, "the other task of the round is missing"


def test_a_round_is_complete_with_its_last_task_and_only_once(desk: Any) -> None:
    e = Evaluations(desk())
    for cursor, rewards in ((1, (0.0, 0.0)), (0, (1.0, 0.0))):
        e.finish(e.dispatch(cursor), *rewards)
    first, second, completed = e.apply(), e.apply(), e.apply()
    assert (first.cursor, second.cursor) == (0, 1), "in the order of the round"
    assert isinstance(completed, EvaluationCompleted)
    assert (completed.version, completed.num_scored, completed.num_rollouts) == (4, 2, 4)
    assert completed.mean_reward == 0.25
    assert completed.pass_at == {1: 0.25, 2: 0.5}
    assert (completed.min_policy_version, completed.max_policy_version) == (4, 4)
    assert e.decide() is None
    assert not e.desk.state.add_decision(completed)


def test_a_failed_rollout_is_left_out_of_the_score_and_listed(desk: Any) -> None:
    e = Evaluations(desk(), num_tasks=1)
    e.finish(e.dispatch(0), 1.0, None)
    assert e.apply().mean_reward == 1.0
    completed = e.apply()
    assert completed.left_out == {"aborted": 1}
    assert completed.pass_at == {1: 1.0}


@pytest.mark.field_case("NeMo RL#3238")
def test_a_hanging_rollout_closes_its_group_at_the_deadline_with_a_reason(desk: Any) -> None:
    e = Evaluations(desk(group_timeout_s=50.0), num_tasks=1)
    name = e.dispatch(0)
    e.finish(name, 1.0)
    assert e.decide() is None
    assert e.desk.state.evaluations.next_deadline(e.desk.now) == 1050.0
    e.desk.now += 50.0
    decision = e.apply()
    assert [(left.rollout_id, left.reason) for left in decision.left_out] == [
        ("eval-0-0-01", "not_finished")
    ]
    assert e.apply().mean_reward == 1.0


@pytest.mark.field_case("verl#7155")
def test_a_group_without_any_reward_is_tried_again_and_then_counts_as_unscored(desk: Any) -> None:
    e = Evaluations(desk(max_attempts=2), num_tasks=1)
    e.finish(e.dispatch(0), None, None)
    assert e.apply().is_retried
    assert e.decide() is None, "the round waits for the second attempt"
    e.finish("eval-0-0", 1.0)  # late: it has been decided on
    e.finish(e.dispatch(0, attempt=1), None, None)
    assert not e.apply().is_retried
    completed = e.apply()
    assert (completed.num_scored, completed.mean_reward, completed.pass_at) == (0, None, {})
    assert completed.left_out == {"aborted": 2}


def test_evaluations_move_no_batch(desk: Any) -> None:
    plain, beside = desk(), desk()
    e = Evaluations(beside)
    for d in (plain, beside):
        d.dispatch("a")
        d.finish_group("a")
    name = e.dispatch(0)
    e.finish(name, 1.0, 1.0)
    e.apply()
    assert isinstance(beside.decide(), Wait)
    for d in (plain, beside):
        d.dispatch("b", dispatch_index=1)
        d.finish_group("b")
    (cut,), (other,) = plain.decide_all(), beside.decide_all()
    assert cut.groups[0].group_id == other.groups[0].group_id == "a"
    assert [g.group_id for g in cut.groups] == [g.group_id for g in other.groups]


def test_evaluation_rollouts_that_nobody_dispatched_are_not_kept(desk: Any) -> None:
    d = desk()
    d.finish("foreign", 0, split="eval")
    d.dispatch("by_hand", split="eval")
    d.finish("by_hand", 0, split="eval", dispatch_index=3)
    d.finish("by_hand", 1, split="eval", dispatch_index=3)
    assert d.state.evaluations.open == {}
    assert decide_evaluation(d.state, d.config, 1e9) is None


def test_a_task_read_after_its_trajectories_gives_the_same_bytes(desk: Any) -> None:
    first, second = Evaluations(desk(), num_tasks=1), Evaluations(desk(), num_tasks=1)
    first.dispatch(0)
    first.finish("eval-0-0", 1.0, 0.0)
    second.finish("eval-0-0", 1.0, 0.0)
    second.dispatch(0)
    decisions = first.decide(), second.decide()
    assert all(decisions)
    assert codec.encode(decisions[0]) == codec.encode(decisions[1])  # type: ignore[arg-type]


def test_decisions_alone_complete_a_round(desk: Any) -> None:
    """As after a restart: the results of a round are in the decisions."""
    e = Evaluations(desk())
    made = []
    for cursor in (0, 1):
        e.finish(e.dispatch(cursor), 1.0, 0.0)
        made.append(e.apply())
    again = GroupsState(e.desk.config)
    for decision in made:
        assert again.add_decision(decision)
    completed = decide_evaluation(again, e.desk.config, e.desk.now)
    assert isinstance(completed, EvaluationCompleted)
    assert completed.mean_reward == 0.5


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], {}),
        ([(1, 0)], {1: 0.0}),
        ([(4, 1), (4, 4)], {1: 0.625, 2: 0.75, 4: 1.0}),
        ([(5, 2), (2, 0)], {1: 0.2, 2: 0.35}),
    ],
)
def test_pass_at_k(groups: Any, expected: dict[int, float]) -> None:
    assert pass_at(groups) == pytest.approx(expected)
