from __future__ import annotations

import msgspec
import pytest

from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.testing import row, trajectory
from turnfold.schemas.trajectories import Ledger, Row, TurnLedger, TurnSpan
from turnfold.trainer.metrics import advantage_zero_share, batch_metrics, ledger_shares
from turnfold.trainer.plan import Schedule, plan
from turnfold.trainer.rows import (
    RowError,
    TrainRow,
    check_media,
    token_advantages,
    train_rows,
)
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


@pytest.mark.field_case("SkyRL#1507")
def test_an_advantage_lands_on_the_rows_own_mask_and_nowhere_else() -> None:
    made = TrainRow("r", "g", row([1, 2, 3, 4, 5], [0, 1, 0, 1, 1]), 0.5)
    assert token_advantages(made).tolist() == [0, 0.5, 0, 0.5, 0.5]


def test_what_a_turn_has_on_top_lands_on_its_own_trained_tokens() -> None:
    # Turn t0 is context here: it is trained in another row.
    made = with_turns(row([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1]), (1, 3), (4, 6))
    by_turn = {"t0": 5.0, "t1": 0.25, "elsewhere": 9.0}
    train_row = TrainRow("r", "g", made, advantage=0.5, by_turn=by_turn)
    assert token_advantages(train_row).tolist() == [0, 0, 0, 0, 0.75, 0.75]


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
    expected = {
        "reward_mean": 1.0,
        "staleness_mean": 1 / 3,
        "staleness_max": 1,
        "groups": 1,
        "rollouts": 3,
        "split_rollouts": 0,
        "left_out_rollouts": 0,
        "rows": 3,
        "padding_rows": 1,
        "tokens": 12,
        "trained_tokens": 6,
        "advantage_zero_share": 1 / 3,
        "optimizer_steps": 1,
        "critic/score/mean": 1.0,
        "critic/score/max": 2.0,
        "critic/advantages/min": -1.0,
        "training/num_turns/max": 1.0,
        "prompt_length/mean": 2.0,
        "response_length/mean": 2.0,
        "perf/total_num_tokens": 12,
        "ledger/trained": 1.0,
        "ledger/masked": 0.0,
        "ledger/dropped": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_shares_of_the_ledger_say_where_sampled_tokens_went_and_why() -> None:
    turns = (
        TurnLedger(turn_id="t0", session_id="main", num_sampled=6, num_trained=6, row=0),
        TurnLedger(turn_id="t1", session_id="main", num_sampled=1, masked={"gap": 1}),
        TurnLedger(turn_id="t2", session_id="main", num_sampled=3, dropped={"orphan": 3}),
    )
    made = msgspec.structs.replace(trajectory("r"), ledger=Ledger(turns=turns))
    assert ledger_shares([made]) == {
        "ledger/trained": 0.6,
        "ledger/masked": 0.1,
        "ledger/masked/gap": 0.1,
        "ledger/dropped": 0.3,
        "ledger/dropped/orphan": 0.3,
    }
    assert ledger_shares([])["ledger/trained"] == 0.0


def test_offsets_that_lie_close_are_read_in_one_go() -> None:
    assert runs([5, 900, 6, 40]) == [[5, 6, 40], [900]]
    assert runs([]) == []


@pytest.mark.field_case("agent-lightning#559")
def test_a_row_with_the_place_of_an_image_is_refused_because_it_holds_no_image() -> None:
    made = trajectory("r1", rows=[row([1, 2, 99, 3], [0, 0, 0, 1])])
    rows = train_rows([made], {})
    check_media(rows, {77: "video_token_id"})
    with pytest.raises(RowError, match=r"rollout r1, row 0 .*: token 2 is the model's image_token"):
        check_media(rows, {99: "image_token_id"})


@pytest.mark.field_case("SkyRL#1870")
def test_a_batch_whose_sampling_logprobs_were_never_filled_is_refused() -> None:
    unfilled = trajectory("a", rows=[row([1, 2, 3], [0, 1, 1], [0, 0, 0])])
    certain = trajectory("b", rows=[row([1, 2, 3], [0, 1, 1], [0, 0, -0.1])])
    train_rows([unfilled, certain], {})
    with pytest.raises(RowError, match="logprob of every trained token of the batch is 0"):
        train_rows([unfilled], {})
