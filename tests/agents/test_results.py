"""What counts as a reward."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest

from turnfold.agents.results import InvalidResult, Outcome, Reason, Result, as_result, outcome_of


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.int64(2)])
def test_a_number_is_a_reward(value: Any) -> None:
    result = as_result(value)
    assert result == Result(reward=float(value))
    assert type(result.reward) is float


def test_a_result_has_named_parts() -> None:
    given = Result(reward=np.float64(1.5), rewards={"format": 1}, is_truncated=True)
    assert as_result(given) == Result(reward=1.5, rewards={"format": 1.0}, is_truncated=True)


@pytest.mark.parametrize("value", [True, "0.5", math.nan, math.inf, [1, 2], None])
def test_anything_else_is_a_mistake_of_the_agent(value: Any) -> None:
    with pytest.raises(InvalidResult, match="reward: expected a finite number, got"):
        as_result(value)


def test_a_part_that_is_no_number_is_named() -> None:
    with pytest.raises(InvalidResult, match=r"rewards\['style'\]: expected a finite number"):
        as_result(Result(reward=1.0, rewards={"style": math.nan}))


def test_named_parts_are_a_reward_and_their_sum_counts() -> None:
    given = {"format": 0.25, "answer": np.float32(0.5)}
    assert as_result(given) == Result(reward=0.75, rewards={"format": 0.25, "answer": 0.5})
    with pytest.raises(InvalidResult, match="no parts at all"):
        as_result({})
    with pytest.raises(InvalidResult, match=r"rewards\['answer'\]: expected a finite number"):
        as_result({"answer": None})


@pytest.mark.field_case("NeMo Gym#2750")
def test_every_reason_belongs_to_one_outcome_and_none_of_them_is_a_reward() -> None:
    outcomes = {outcome_of(reason) for reason in get_args(Reason)}
    assert outcomes == set(get_args(Outcome)) - {"completed", "truncated"}
