"""What the author of an agent imports, and the worker that runs agents.

    from turnfold.agents import EnvironmentFailed, Result

    async def run(task, rollout):
        async with rollout.openai() as client:       # an AsyncOpenAI; or rollout.anthropic(), .http()
            ...
        return 1.0                                   # the reward
        return {"format": 0.1, "answer": 0.4}        # in named parts
        return Result(reward=0.5, is_truncated=True)

An agent that is started by something else than `turnfold worker` opens its rollouts itself, with
`GatewayClient`.
"""

from turnfold.agents.client import (
    GatewayClient,
    GatewayError,
    ModelAccess,
    Rollout,
    RolloutClosed,
    Session,
)
from turnfold.agents.results import (
    EnvironmentFailed,
    InvalidResult,
    Outcome,
    Reason,
    Result,
    SetUpTimedOut,
)

__all__ = [
    "EnvironmentFailed",
    "GatewayClient",
    "GatewayError",
    "InvalidResult",
    "ModelAccess",
    "Outcome",
    "Reason",
    "Result",
    "Rollout",
    "RolloutClosed",
    "Session",
    "SetUpTimedOut",
]
