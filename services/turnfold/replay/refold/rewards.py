"""Another reward on a trajectory. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import msgspec

from turnfold.schemas.errors import UserError
from turnfold.schemas.trajectories import Trajectory

RewardFunction = Callable[[Trajectory], float]
"""Looks at rows, ledger and the reward as logged, and gives the reward that counts instead."""


class RewardError(UserError):
    """A reward function that cannot be used; the text says what was expected."""


def with_reward(trajectory: Trajectory, reward: RewardFunction, name: str) -> Trajectory:
    """The trajectory with the reward that the function gives, and without the parts of the old one.

    A rollout that was aborted has no rows and no reward, and is not shown to the function. `name`
    is the function's, for the RewardError that is raised when it fails or gives no finite number.
    """
    if trajectory.status == "aborted":
        return trajectory
    where = f"rollout {trajectory.rollout_id}: reward function {name}"
    try:
        value: Any = reward(trajectory)
    except Exception as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(f"{where} gave {value!r}: expected a finite number")
    return msgspec.structs.replace(trajectory, reward=float(value), rewards={})
