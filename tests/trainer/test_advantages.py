from __future__ import annotations

import msgspec
import pytest

from turnfold.schemas.testing import row, trajectory
from turnfold.schemas.trajectories import Row, Trajectory, TurnSpan
from turnfold.trainer.advantages import (
    AdvantageError,
    Score,
    returns,
    rollout_advantages,
    score,
    turn_advantages,
)
from turnfold.trainer.rows import RowError, token_advantages, train_rows

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]


def scores(*groups: list[float | None], num_trained: int = 3) -> list[Score]:
    """Groups of rewards; rollout ids count through."""
    flat = [(g, reward) for g, group in enumerate(groups) for reward in group]
    return [
        Score(rollout_id=f"r{i}", group_id=f"g{g}", reward=reward, num_trained=num_trained)
        for i, (g, reward) in enumerate(flat)
    ]


def without_std() -> object:
    from verl.trainer.config import AlgoConfig

    return AlgoConfig(norm_adv_by_std_in_grpo=False)


def test_a_rollout_of_two_rows_counts_once_in_the_baseline() -> None:
    first = row([1, 2, 3], [0, 1, 1])
    second = row([1, 2, 7, 8], [0, 0, 0, 1])  # token 2 is shared context here
    a = trajectory("a", group_id="g", rows=[first, second], reward=0.0)
    b = trajectory("b", group_id="g", rows=[row([1, 9], [0, 1])], reward=4.0)
    advantages = rollout_advantages([score(a), score(b)], "grpo", without_std())
    assert advantages == {"a": -2.0, "b": 2.0}
    rows = train_rows([a, b], advantages)
    assert [token_advantages(r).tolist() for r in rows] == [
        [0, -2, -2],
        [0, 0, 0, -2],
        [0, 2],
    ]


@pytest.mark.field_case("slime#2302")
def test_a_rollout_of_three_rows_against_one_of_one_has_baseline_one_half() -> None:
    rows = [row([1, 2 + i], [0, 1]) for i in range(3)]
    a, b = (
        trajectory("a", group_id="g", rows=rows, reward=1.0),
        trajectory("b", group_id="g", rows=rows[:1], reward=0.0),
    )
    advantages = rollout_advantages([score(a), score(b)], "grpo", without_std())
    assert [r.advantage for r in train_rows([a, b], advantages)] == [0.5, 0.5, 0.5, -0.5]


def test_a_rollout_without_tokens_is_no_sample_of_its_group() -> None:
    table = [
        *scores([1.0, 0.0, 1.0]),
        Score(rollout_id="e", group_id="g0", reward=1.0, num_trained=0),
    ]
    advantages = rollout_advantages(table, "grpo", without_std())
    assert advantages == pytest.approx({"r0": 1 / 3, "r1": -2 / 3, "r2": 1 / 3, "e": 0.0})


@pytest.mark.field_case("NeMo RL#3201")
def test_a_rollout_without_reward_is_out_of_the_baseline_and_gets_zero() -> None:
    advantages = rollout_advantages(scores([1.0, None, 0.0]), "grpo", without_std())
    assert advantages == {"r0": 0.5, "r1": 0.0, "r2": -0.5}


@pytest.mark.field_case("slime#1414")
@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "opo", "gpg"])
def test_equal_rewards_and_single_survivors_give_exactly_zero(estimator: str) -> None:
    groups = scores([5.0, 5.0, 5.0], [0.1, 0.1, 0.1], [1.0], [1.0, 0.0])
    advantages = rollout_advantages(groups, estimator)
    assert [advantages[f"r{i}"] for i in range(7)] == [0.0] * 7
    assert advantages["r7"] > 0 > advantages["r8"]


def test_baselines_are_per_group_whatever_the_sizes() -> None:
    groups = scores([0.0, 0.0, 4.0, 4.0], [5.0, 5.0, 5.0], [1.0, 0.0, 0.0, 0.0])
    advantages = rollout_advantages(groups, "grpo", without_std())
    assert list(advantages.values()) == pytest.approx(
        [-2, -2, 2, 2, 0, 0, 0, 0.75, -0.25, -0.25, -0.25]
    )


def test_rloo_leaves_the_rollout_itself_out() -> None:
    advantages = rollout_advantages(scores([1.0, 0.0, 0.0]), "rloo")
    assert list(advantages.values()) == pytest.approx([1.0, -0.5, -0.5])


def test_opo_weighs_the_baseline_by_trained_tokens() -> None:
    table = [
        Score(rollout_id="long", group_id="g", reward=1.0, num_trained=9),
        Score(rollout_id="short", group_id="g", reward=0.0, num_trained=1),
    ]
    assert rollout_advantages(table, "opo") == pytest.approx({"long": 0.1, "short": -0.9})


def test_a_batch_baseline_also_moves_a_group_of_one() -> None:
    advantages = rollout_advantages(scores([1.0], [0.0], [0.0]), "reinforce_plus_plus")
    assert advantages["r0"] > 0 > advantages["r1"]


@pytest.mark.parametrize("estimator", ["gae", "remax", "gdpo", "optimal_token_baseline"])
def test_estimators_that_one_entry_per_rollout_cannot_carry_are_refused(estimator: str) -> None:
    with pytest.raises(AdvantageError, match=f"adv_estimator={estimator}: .*; use grpo"):
        rollout_advantages(scores([1.0, 0.0]), estimator)


def test_an_estimator_of_the_users_own_is_found_by_name() -> None:
    from verl.trainer.ppo.core_algos import register_adv_est

    @register_adv_est("turnfold_test_identity")
    def identity(token_level_rewards, response_mask, index, config):  # type: ignore[no-untyped-def]
        return token_level_rewards, token_level_rewards

    advantages = rollout_advantages(scores([3.0, 1.0]), "turnfold_test_identity")
    assert advantages == {"r0": 3.0, "r1": 1.0}


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(AdvantageError, match="rollout a: reward nan is not finite"):
        score(trajectory("a", group_id="g", rows=[], reward=float("nan")))


@pytest.mark.field_case("SkyRL#1870")
def test_a_row_without_logprobs_is_refused() -> None:
    broken = row([1, 2, 3], [0, 1, 1], [])
    with pytest.raises(RowError, match=r"rollout a, row 0 .* 3 tokens, 3 mask entries and 0 logp"):
        train_rows([trajectory("a", group_id="g", rows=[broken], reward=1.0)], {})
    broken = row([1, 2, 3], [0, 1, 1], [0, float("-inf"), 0])
    with pytest.raises(RowError, match="logprob is not finite"):
        train_rows([trajectory("a", group_id="g", rows=[broken], reward=1.0)], {})


def tree(rollout_id: str, *branches: list[str], turn_rewards: dict[str, float]) -> Trajectory:
    """A row for each branch of turns of two tokens, each trained where it comes first."""
    seen: set[str] = set()
    rows: list[Row] = []
    for branch in branches:
        mask = [0]
        for turn_id in branch:
            mask += [0, 0] if turn_id in seen else [1, 1]
            seen.add(turn_id)
        spans = tuple(
            TurnSpan(turn_id=turn_id, start=1 + 2 * i, end=3 + 2 * i)
            for i, turn_id in enumerate(branch)
        )
        made = row(list(range(1, len(mask) + 1)), mask)
        rows.append(msgspec.structs.replace(made, turns=spans))
    made_of_rows = trajectory(rollout_id, group_id="g", rows=rows, reward=0.0)
    return msgspec.structs.replace(made_of_rows, turn_rewards=turn_rewards)


@pytest.mark.field_case("AReaL#1666")
def test_a_reward_flows_to_the_turns_that_led_to_it_and_to_no_branch_beside() -> None:
    made = tree("r", ["t0", "t1", "t2"], ["t0", "t3"], turn_rewards={})
    assert returns(made, {"t2": 1.0, "t3": 4.0}, gamma=0.5) == {
        "t0": 0.25 * 1.0 + 0.5 * 4.0,
        "t1": 0.5,
        "t2": 1.0,
        "t3": 4.0,
    }


def test_process_rewards_are_compared_within_the_group_and_discounted_along_the_turns() -> None:
    from verl.trainer.config import AlgoConfig

    algorithm = AlgoConfig(norm_adv_by_std_in_grpo=False, gamma=0.5)
    a = tree("a", ["t0", "t1"], ["t0", "t2"], turn_rewards={"t1": 1.0, "t2": 0.0})
    b = tree("b", ["t0"], turn_rewards={"t0": 2.0})
    silent = tree("c", ["t0"], turn_rewards={})
    found = turn_advantages([a, b, silent], "grpo", algorithm)
    assert found == {
        "a": pytest.approx({"t0": 0.5 * (0.0 - 1.0), "t1": 0.0, "t2": -1.0}),
        "b": pytest.approx({"t0": 1.0}),
    }
    rows = train_rows([a], {"a": 10.0}, found)
    assert [token_advantages(r).tolist() for r in rows] == [
        [0, 9.5, 9.5, 10, 10],
        [0, 0, 0, 9, 9],  # t0 is trained in the first row
    ]


def test_without_process_rewards_turns_have_nothing_on_top() -> None:
    assert turn_advantages([tree("a", ["t0"], turn_rewards={})], "grpo") == {}


def test_a_process_reward_that_is_not_finite_is_refused_with_its_turn() -> None:
    bad = tree("a", ["t0"], turn_rewards={"t0": float("inf")})
    with pytest.raises(AdvantageError, match="rollout a, turn t0: reward inf is not finite"):
        turn_advantages([bad], "grpo")
