"""What an agent gives back, and what became of its rollout. Pure.

    return 0.5                                                the reward
    return {"format": 0.1, "answer": 0.4}                     named parts; the reward is their sum
    return Result(reward=0.5, rewards={"answer": 0.9})        both, when the sum is not meant

A rollout without a reward is aborted with a reason; it is never scored 0 for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal

import msgspec

Outcome = Literal[
    "completed", "truncated", "agent_error", "environment_error", "timeout", "aborted"
]
"""What became of a rollout, in one word for counters and dashboards."""

Reason = Literal[
    "agent_error",
    "invalid_result",
    "agent_timeout",
    "environment_error",
    "setup_timeout",
    "gateway_error",
    "worker_shutdown",
    "group_decided",
    "closed",
]
"""Why a rollout has no reward, as the log has it; of one that is `closed` it has another end."""

_OUTCOME: dict[Reason, Outcome] = {
    "agent_error": "agent_error",
    "invalid_result": "agent_error",
    "agent_timeout": "timeout",
    "environment_error": "environment_error",
    "setup_timeout": "environment_error",
    "gateway_error": "environment_error",
    "worker_shutdown": "aborted",
    "group_decided": "aborted",
    "closed": "aborted",
}


def outcome_of(reason: Reason) -> Outcome:
    """The outcome that a reason belongs to.

    >>> outcome_of("setup_timeout")
    'environment_error'
    """
    return _OUTCOME[reason]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a rollout, when there is more to say than a number."""

    reward: float
    rewards: dict[str, float] = {}
    """Named parts of the reward, for reports."""
    turn_rewards: dict[str, float] = {}
    """What single turns were worth in themselves, by the ids of their responses; on top of
    `reward`."""
    is_truncated: bool = False
    """The agent ran out of turns, context or time but was scored all the same."""
    info: dict[str, str] = {}
    """Anything worth finding again in the log."""


class EnvironmentFailed(Exception):
    """Raise this in an agent when its world broke (a sandbox died): nobody's reward is 0."""


class SetUpTimedOut(EnvironmentFailed):
    """The agent's world was not ready in time."""


class InvalidResult(ValueError):
    """An agent's result that is no reward."""


def as_result(value: Any) -> Result:
    """A finite number, a mapping of named numbers or a Result becomes a Result.

    Raises InvalidResult for anything else: a reward that is True, "0.5", NaN or missing is a
    mistake of the agent, and training on a guess of what it meant would hide it.
    """
    if isinstance(value, Mapping):
        value = _sum_of(value)
    result = value if isinstance(value, Result) else Result(reward=_number("reward", value))
    return msgspec.structs.replace(
        result,
        reward=_number("reward", result.reward),
        rewards=_parts("rewards", result.rewards),
        turn_rewards=_parts("turn_rewards", result.turn_rewards),
    )


def _sum_of(parts: Mapping[Any, Any]) -> Result:
    if not parts:
        raise InvalidResult("reward: expected a number or named parts, got no parts at all")
    numbers = _parts("rewards", parts)
    return Result(reward=math.fsum(numbers.values()), rewards=numbers)


def _parts(field: str, parts: Mapping[Any, Any]) -> dict[str, float]:
    return {str(name): _number(f"{field}[{name!r}]", part) for name, part in parts.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidResult(
            f"{name}: expected a finite number, got {type(value).__name__} {str(value)[:40]!r}"
        )
    return float(value)
