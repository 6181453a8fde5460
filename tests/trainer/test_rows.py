from __future__ import annotations

import msgspec
import pytest

from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.testing import row, trajectory
from turnfold.schemas.trajectories import Row, TurnSpan
from turnfold.trainer.metrics import advantage_zero_share, batch_metrics
from turnfold.trainer.plan import Schedule, plan
from turnfold.trainer.rows import RowError, TrainRow, token_advantages, train_rows
from turnfold.trainer.source import Batch, runs, staleness


def with_turns(made: Row, *spans: tuple[int, int]) -> Row:
    turns = tuple(TurnSpan(turn_id=f"t{i}", start=a, end=b) for i, (a, b) in enumerate(spans))
    return msgspec.structs.replace(made, turns=turns)


def test_the_prompt_ends_at_the_first_sampled_token_even_when_that_one_is_masked() -> None:
    made = with_turns(row([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1]), (2, 4), (4, 6))
    assert TrainRow("r", "g", made).num_prompt == 2


def test_without_turns_the_prompt_ends_at_the_first_trained_token() -> None:
    assert TrainRow("r", "g", with_turns(row([1, 2, 3, 4], [0, 0, 0, 1]))).num_prompt == 3
    assert TrainRow("r", "g", with_turns(row([1, 2, 3, 4], [0, 0, 0, 0]))).num_prompt == 3


def test_an_advantage_lands_on_the_rows_own_mask_and_nowhere_else() -> None:
    assert token_advantages(0.5, row([1, 2, 3, 4, 5], [0, 1, 0, 1, 1])).tolist() == [
        0,
        0.5,
        0,
        0.5,
        0.5,
    ]


def test_the_first_token_of_a_row_cannot_be_trained() -> None:
    bad = trajectory("a", rows=[with_turns(row([1, 2], [1, 1]))])
    with pytest.raises(RowError, match="rollout a, row 0 of the batch: the first token has no con"):
        train_rows([bad], {})


def test_a_row_of_one_token_is_refused() -> None:
    with pytest.raises(RowError, match="expected at least 2 tokens, got 1"):
        train_rows([trajectory("a", rows=[row([1], [0])])], {})


def test_the_share_of_zero_advantages_counts_trained_tokens_only() -> None:
    half = TrainRow("a", "g", row([1, 2, 3], [0, 1, 0]), 0.5)
    zero = TrainRow("b", "g", row([1, 2, 3], [0, 1, 1]), 0.0)
    assert advantage_zero_share([half, zero]) == pytest.approx(2 / 3)
    assert advantage_zero_share([]) == 1.0


def batch(*versions: tuple[int, int], index: int) -> Batch:
    """One rollout for each pair of oldest and newest version."""
    trajectories = tuple(trajectory(f"r{i}", reward=float(i)) for i in range(len(versions)))
    rollouts = tuple(
        RolloutRef(
            rollout_id=f"r{i}",
            index=i,
            partition=0,
            offset=i,
            digest="",
            reward=float(i),
            num_rows=1,
            num_tokens=4,
            num_trained=2,
            max_row_tokens=4,
            min_policy_version=oldest,
            max_policy_version=newest,
        )
        for i, (oldest, newest) in enumerate(versions)
    )
    cut = BatchCut(
        run_id="t",
        index=index,
        groups=(GroupRef(group_id="g", dispatch_index=0, rollouts=rollouts),),
        positions=Positions(tasks={}, trajectories={}),
        at=0.0,
        config_digest="",
    )
    return Batch(cut=cut, trajectories=trajectories)


def test_staleness_is_counted_from_the_oldest_version_that_sampled() -> None:
    made = batch((9, 12), (0, 0), index=13)
    assert [staleness(made.cut, ref) for ref in made.cut.groups[0].rollouts] == [3, 12]


def test_metrics_of_a_batch_describe_rewards_staleness_and_sizes() -> None:
    made = batch((2, 2), (1, 2), (2, 2), index=3)
    rows = train_rows(made.trajectories, {"r0": -1.0, "r2": 1.0})
    schedule = Schedule(
        num_mini_batches=1, num_ranks=2, rollouts_per_mini_batch=3, max_row_tokens=9
    )
    metrics = batch_metrics(made, rows, plan([r.size for r in rows], schedule))
    assert metrics == pytest.approx(
        {
            "reward_mean": 1.0,
            "staleness_mean": 1 / 3,
            "staleness_max": 1,
            "groups": 1,
            "rollouts": 3,
            "rows": 3,
            "padding_rows": 1,
            "tokens": 12,
            "trained_tokens": 6,
            "advantage_zero_share": 1 / 3,
            "optimizer_steps": 1,
        }
    )


def test_offsets_that_lie_close_are_read_in_one_go() -> None:
    assert runs([5, 900, 6, 40]) == [[5, 6, 40], [900]]
    assert runs([]) == []
