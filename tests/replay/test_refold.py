"""Another reward on a trajectory."""

from pathlib import Path

import pytest

from turnfold.replay.refold.client import load_reward
from turnfold.replay.refold.rewards import RewardError, with_reward
from turnfold.schemas.testing import trajectory


def test_a_reward_function_replaces_the_reward_and_its_parts() -> None:
    logged = trajectory("r1", reward=1.0, rewards={"style": 1.0})
    made = with_reward(logged, lambda t: t.reward / 4 if t.reward else 0.0, "f")
    assert (made.reward, made.rewards) == (0.25, {})
    assert made.rows == logged.rows


def test_an_aborted_rollout_keeps_having_no_reward() -> None:
    aborted = trajectory("r1", reward=None)
    assert with_reward(aborted, lambda _: 1.0, "f") == aborted


@pytest.mark.parametrize("value", [float("nan"), True, "1", None])
def test_what_is_no_finite_number_is_refused_with_the_rollout_named(value: object) -> None:
    with pytest.raises(RewardError, match=r"rollout r1: reward function f gave .* a finite number"):
        with_reward(trajectory("r1"), lambda _: value, "f")  # type: ignore[arg-type,return-value]


def test_an_exception_of_the_function_names_the_rollout() -> None:
    with pytest.raises(RewardError, match="rollout r1: reward function f raised ZeroDivisionError"):
        with_reward(trajectory("r1"), lambda _: 1 / 0, "f")


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(trajectory):\n    return 0.5\n")
    assert load_reward(f"{tmp_path / 'rewards.py'}:score")(trajectory("r1")) == 0.5
    assert load_reward("math:floor") is not None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("score", "expected module:function"),
        ("nowhere.py:score", "file nowhere.py does not exist"),
        ("no_such_module:score", "cannot be imported"),
        ("math:score", "has no function 'score'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_one_clear_error(name: str, what: str) -> None:
    with pytest.raises(RewardError, match=what):
        load_reward(name)
