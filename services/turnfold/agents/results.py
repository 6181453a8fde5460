"""What an agent gives back, and what it means. Pure."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import msgspec


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a rollout, when there is more to say than a number."""

    reward: float
    rewards: dict[str, float] = {}
    """Named parts of the reward, for reports."""
    is_truncated: bool = False
    """The agent ran out of turns, context or time but was scored all the same."""
    info: dict[str, str] = {}
    """Anything worth finding again in the log."""


class EnvironmentFailed(Exception):
    """Raise this in an agent when its world broke (a sandbox died): nobody's reward is 0."""


class InvalidResult(ValueError):
    """An agent's result that is no reward."""


def as_result(value: Any) -> Result:
    """A finite number or a Result becomes a Result.

    Raises InvalidResult for anything else: a reward that is True, "0.5", NaN or missing is a
    mistake of the agent, and training on a guess of what it meant would hide it.
    """
    result = value if isinstance(value, Result) else Result(reward=_number("reward", value))
    rewards = {name: _number(f"rewards[{name!r}]", part) for name, part in result.rewards.items()}
    return msgspec.structs.replace(result, reward=_number("reward", result.reward), rewards=rewards)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidResult(
            f"{name}: expected a finite number, got {type(value).__name__} {str(value)[:40]!r}"
        )
    return float(value)
